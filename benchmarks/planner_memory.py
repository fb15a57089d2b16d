"""Compare the planner's memory bound with PyTorch's own memory tracker, on a CPU, without allocating memory.

    python benchmarks/planner_memory.py [--trainer torchtitan]

For each layout of a grid, a trainer runs two steps with fake tensors in a fake process group of eight ranks. The script
prints the peak of the second step according to `MemTracker`, the planner's bound, and the difference. Sequences are
short, so weights, gradients, optimizer states, gathers and reductions dominate the peak: on a CPU, blocks and loss are
not compiled, so the memory of compiled code is unknown. PyTorch's pipelines exchange shapes between ranks when built,
which fake ranks cannot do, so `pp` is 1. This project's blocks are recomputed; torchtitan's are recomputed, selectively
recomputed ("op"), or not. torchtitan's own `Trainer` builds and trains its Llama 3, with a GPU's attention and norm.
"""

import argparse
import gc
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.trainers import configure, import_torchtitan
from sweeper.preflight.clusters import build_cluster
from workloads.estimator.memory import GIB, peak_memory
from workloads.layouts.layout import Checkpointing, Job, Layout
from workloads.layouts.rules import Site, find_violation, rules_of
from workloads.models.model import MODELS
from workloads.parallel import apply, train
from workloads.parallel.stage import Stage

RANKS, SEQUENCE_LENGTH = 8, 256
# dp_replicate, dp_shard, tp and cp; their product is RANKS
DEGREES = (
    *((1, 8, 1, 1), (8, 1, 1, 1), (2, 4, 1, 1), (4, 2, 1, 1), (1, 4, 2, 1), (1, 2, 4, 1), (2, 2, 2, 1)),
    *((1, 4, 1, 2), (1, 2, 1, 4), (1, 2, 2, 2), (2, 1, 2, 2)),
)
# All layers are equal, so a few are enough. This project's trainer has an untied and a tied model; torchtitan has a
# model with a block larger than the head, and one with a head larger than a block.
SMALL = {name: replace(MODELS[name], layers=2, vocabulary=32_000) for name in ("llama3_8b", "llama3_1b")}
LARGE = {"llama3_8b, small vocabulary": SMALL["llama3_8b"], "llama3_8b": replace(MODELS["llama3_8b"], layers=4)}
SHAPES = {"own": SMALL, "torchtitan": LARGE}
CHECKPOINTING: dict[str, tuple[Checkpointing, ...]] = {"own": ("full",), "torchtitan": ("none", "per_op", "full")}


class Comparison(NamedTuple):
    model: str
    job: Job
    tracked_gib: float
    bound_gib: float

    @property
    def slack_percent(self) -> float:
        return 100 * (self.bound_gib / self.tracked_gib - 1)


class _Peak(MemTracker):
    """Tracks the peak of a step without tracking modules, since the tracker allows only one forward pass per module."""

    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...


def list_jobs(trainer: str) -> Iterator[tuple[str, Job]]:
    """Yield the jobs of the grid that the trainer runs, with the names of their models."""
    site, checkpointing = Site.of(build_cluster("h100", None, RANKS)), cycle(CHECKPOINTING[trainer])
    grid = product(SHAPES[trainer].items(), DEGREES, (1, 2), (True, False), ("fp32", "bf16"))
    for (name, model), degrees, micro_batches, reshard, state in grid:
        dp_replicate, dp_shard, _, cp = degrees
        is_ddp = trainer == "torchtitan" and dp_shard * cp == 1
        layout = Layout(
            *degrees,
            global_batch=dp_replicate * dp_shard * micro_batches,
            sharding="none" if is_ddp else "fsdp2",
            checkpointing=next(checkpointing),
            reshard_after_forward=reshard,
        )
        state = "amp" if is_ddp and state == "fp32" else state
        job = Job(model, layout, SEQUENCE_LENGTH, trainer, state=state, compiled=False)  # type: ignore[arg-type]
        if not find_violation(job, site, rules_of(job.trainer)):
            yield name, job


def compare_all(trainer: str = "own") -> Iterator[Comparison]:
    """Yield the comparison of each job. All jobs share one process group, since DTensor caches the names of groups."""
    cluster, track = build_cluster("h100", None, RANKS), _track_gib if trainer == "own" else _track_torchtitan_gib
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        for name, job in list_jobs(trainer):
            yield Comparison(name, job, track(job), peak_memory(job, cluster).allocated_gib)
    finally:
        dist.destroy_process_group()
        gc.enable()  # torchtitan disables it


def _track_gib(job: Job) -> float:
    """Return the first rank's peak memory in the second step, in GiB."""
    mode, layout = FakeTensorMode(allow_non_fake_inputs=True), job.layout
    groups = apply.build_groups(layout, "cpu")
    stages = _build_stages(job, groups, mode)
    with mode, patch("torch.optim.AdamW", partial(_build_fused, torch.optim.AdamW)):
        trainer = train.Trainer(stages, layout, groups, torch.device("cpu"), 1e-4, clips=job.state == "fp32")
        rows = layout.global_batch // layout.dp
        batch = train.Batch(torch.zeros(rows, job.sequence_length + 1, dtype=torch.int64))
        trainer.step(batch)
        return _track_step(partial(trainer.step, batch), *stages, trainer._optimizer)


def _track_step(step: Callable[[], object], *external: Any) -> float:
    """Return the peak memory of a step, in GiB, with external modules and optimizers."""
    tracker, infer = _Peak(), ShardingPropagator._propagate_tensor_meta_non_cached

    def infer_untracked(*arguments: Any) -> Any:  # DTensor infers shapes with fake tensors, on a GPU too
        with _disable_current_modes():
            return infer(*arguments)

    tracker.track_external(*external)
    with patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", infer_untracked), tracker:
        step()
    return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"] / GIB)


def _build_fused(optimizer: Any, *arguments: Any, **options: Any) -> Any:
    """Return a fused optimizer, as on a GPU: other optimizers have temporary tensors."""
    return optimizer(*arguments, **options | {"fused": True})


def _build_stages(job: Job, groups: apply.Groups, mode: FakeTensorMode) -> list[Stage]:
    """Build the stages on the meta device, and give their parameters fake memory without values."""
    spec = apply.ModelSpec(job.model, job.sequence_length, torch.bfloat16, compiled=False, state=job.state)
    with (
        patch.object(Stage, "to_empty", lambda stage, device: _allocate(stage, device, mode)),
        patch.object(apply, "fill_buffers"),
        patch.object(apply, "_initialize_parameters"),
    ):
        return apply.build_stages(spec, job.layout, groups, torch.device("cpu"), lambda _, size: torch.empty(size))


def _allocate(model: nn.Module, device: torch.device, mode: FakeTensorMode) -> None:
    named = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    new: dict[nn.Parameter, nn.Parameter] = {}
    with mode:
        for module, name, parameter in named:
            if parameter not in new:  # a tied weight is one
                new[parameter] = nn.Parameter(_like(parameter, device))
            module._parameters[name] = new[parameter]


def _like(parameter: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=device)
    place: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
    return DTensor.from_local(local, parameter.device_mesh, parameter.placements, **place)


def _track_torchtitan_gib(job: Job) -> float:
    """Return the first rank's peak memory in the second step of torchtitan's trainer, in GiB."""
    with patch("torch._utils._get_available_device_type", lambda: "cpu"):
        torchtitan = import_torchtitan()
    mode, layout, specs = FakeTensorMode(allow_non_fake_inputs=True), job.layout, torchtitan.train_spec_module
    values = {"shape": job.model, "sequence_length": job.sequence_length, "compile": False, "learning_rate": 1e-4}
    values |= {"state": "bf16" if job.state == "bf16" else "fp32", "steps": 2, "seed": 0, "imbalance": None}
    values |= {"checkpointing": layout.checkpointing.replace("per_op", "selective")}
    metrics = MagicMock(**{"should_log.return_value": False})
    metrics.device_memory_monitor.get_peak_stats.return_value = SimpleNamespace(max_reserved_gib=0, max_reserved_pct=0)
    replaced = (
        (torchtitan, "build_metrics_processor", lambda *_: metrics),
        (torchtitan.dist_utils, "set_determinism", lambda *_, **__: None),
        (torchtitan.dist_utils, "dist_sum", lambda *_: 1.0),
        (nn.Module, "to_empty", lambda model, device: _allocate(model, torch.device(device), mode)),
        (specs.get_train_spec("llama3").model_cls, "init_weights", lambda *_, **__: None),
        (nn.RMSNorm, "forward", lambda norm, values: _FusedNorm.apply(values, norm.weight)),
        (sys.modules["torchtitan.models.attention"].ScaledDotProductAttentionWrapper, "forward", _attend),
        # DDP reads tensors when it is built, and to sort its buckets by the first backward pass.
        (torch.nn.parallel.distributed, "_verify_param_shape_across_processes", lambda *_: None),
        (torch.nn.parallel.distributed, "_sync_module_states", lambda **_: None),
        (dist.Reducer, "_rebuild_buckets", lambda _: False),
    )
    with ExitStack() as stack:
        for target, name, value in replaced:
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patch.dict(specs._extra_train_specs))
        stack.enter_context(patch.dict(os.environ, LOCAL_RANK="0"))
        trainer = torchtitan.Trainer(configure(SimpleNamespace(**vars(layout) | values)))  # type: ignore[arg-type]
        trainer.device = torch.device("cpu")
        (model,) = trainer.model_parts
        if layout.sharding == "none":
            model.register_comm_hook(None, _reduce_nothing)
        with mode:
            model.freqs_cis = torch.empty_like(model.freqs_cis, device="cpu")
            tokens = torch.zeros(1, job.sequence_length, dtype=torch.int64)
            batches = cycle([({"input": tokens}, tokens)])
            trainer.train_step(batches)
            return _track_step(partial(trainer.train_step, batches), model, *trainer.optimizers)


class _FusedNorm(torch.autograd.Function):
    """Saves the tensors of a GPU's norm. A CPU's norm is not fused and saves more."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(values, weight, values.new_empty(values.shape[:-1], dtype=torch.float32))
        return torch.empty_like(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        values, weight, _ = context.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def _attend(_: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> Any:
    """Call a GPU's attention, which torchtitan's selective checkpointing and context parallelism recognize."""
    return torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, is_causal=True)[0]


def _reduce_nothing(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Return DDP's bucket as it is, because the fake process group has no result for DDP."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", default="own", choices=SHAPES)
    trainer = parser.parse_args().trainer
    if trainer == "torchtitan" and not find_spec("torchtitan"):
        parser.error("--trainer torchtitan needs the packages torchtitan 0.2.2, torchdata, tyro and triton")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = []
    for each in compare_all(trainer):
        found.append(each)
        figures = f"{each.tracked_gib:7.2f} {each.bound_gib:7.2f} GiB {each.slack_percent:+6.1f}%"
        print(f"{each.model} {each.job.state} {each.job.layout}: {figures}", flush=True)
    slacks = [each.bound_gib - each.tracked_gib for each in found]
    print(
        f"{len(found)} layouts: {sum(slack < 0 for slack in slacks)} exceed the bound; slack {min(slacks):.2f} to "
        f"{max(slacks):.2f} GiB, median {statistics.median(slacks):.2f} GiB or "
        f"{statistics.median(each.slack_percent for each in found):.0f}%"
    )


if __name__ == "__main__":
    main()
