"""Compare the planner's memory bound with PyTorch's own memory tracker, on a CPU, without allocating memory.

    python benchmarks/planner_memory.py

For each layout of a grid, this project's trainer runs two steps with fake tensors in a fake process group of eight
ranks. The script prints the peak of the second step according to `MemTracker`, the planner's bound, and the difference.
Sequences are short and blocks are recomputed, so weights, gradients, optimizer states, gathers and reductions dominate
the peak: on a CPU, blocks and loss are not compiled, so the memory of compiled code is unknown. PyTorch's pipelines
exchange shapes between ranks when built, which fake ranks cannot do, so `pp` is 1.
"""

import statistics
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))

from sweeper.preflight.clusters import build_cluster
from workloads.estimator.memory import GIB, peak_memory
from workloads.layouts.layout import Job, Layout
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
# An untied and a tied model with few layers (all layers are equal) and a small vocabulary.
SHAPES = {name: replace(MODELS[name], layers=2, vocabulary=32_000) for name in ("llama3_8b", "llama3_1b")}


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


def list_jobs() -> Iterator[tuple[str, Job]]:
    """Yield the jobs of the grid that this project's trainer runs, with the names of their models."""
    site, states = Site.of(build_cluster("h100", None, RANKS)), ("fp32", "bf16")
    for name, degrees, micro_batches, reshard, state in product(SHAPES, DEGREES, (1, 2), (True, False), states):
        dp_replicate, dp_shard, tp, cp = degrees
        layout = Layout(
            dp_replicate=dp_replicate,
            dp_shard=dp_shard,
            tp=tp,
            cp=cp,
            global_batch=dp_replicate * dp_shard * micro_batches,
            checkpointing="full",
            reshard_after_forward=reshard,
        )
        job = Job(SHAPES[name], layout, SEQUENCE_LENGTH, state=state, compiled=False)  # type: ignore[arg-type]
        if not find_violation(job, site, rules_of(job.trainer)):
            yield name, job


def compare_all() -> Iterator[Comparison]:
    """Yield the comparison of each job. All jobs share one process group, since DTensor caches the names of groups."""
    cluster = build_cluster("h100", None, RANKS)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        for name, job in list_jobs():
            yield Comparison(name, job, _track_gib(job), peak_memory(job, cluster).allocated_gib)
    finally:
        dist.destroy_process_group()


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
        tracker = _Peak()
        tracker.track_external(*stages)
        with tracker:
            trainer.step(batch)
        states = [value for state in trainer._optimizer.state.values() for value in state.values()]
        states_bytes = sum((value.to_local() if isinstance(value, DTensor) else value).nbytes for value in states)
    kinds = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    # The tracker does not count states that the first step created.
    return (kinds["Total"] - kinds[_MemRefType.OPT] + states_bytes) / GIB


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


def _allocate(stage: Stage, device: torch.device, mode: FakeTensorMode) -> None:
    named = [(module, name, p) for module in stage.modules() for name, p in module._parameters.items() if p is not None]
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


def main() -> None:
    warnings.simplefilter("ignore")
    found = []
    for each in compare_all():
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
