"""The table of trainers: the values of a layout that each runs and that a search tries, and how it computes."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from workloads.layouts.layout import AttentionKernel, Job, Schedule

EFFICIENCIES = Path(__file__).with_name("efficiencies.csv")
OWN = "own"
Values = Mapping[str, tuple[Any, ...]]  # by the name of a layout's field
ALL_SCHEDULES = get_args(Schedule)  # those of torch.distributed.pipelining
FSDP_RUNS: Values = {"schedule": ("1f1b",), "sharding": ("none", "fsdp2"), "checkpointing": ("none", "full")}
FSDP_SEARCH: Values = {
    "schedule": ("1f1b",),
    "sharding": ("fsdp2",),
    "checkpointing": ("none", "full"),
    "reshard_after_forward": (False, True),
}


@dataclass(frozen=True)
class Trainer:
    """A row of the table."""

    name: str
    # whose engine it runs on: trainers of one core have similar efficiencies
    core: Literal["pytorch", "megatron", "deepspeed"] = "pytorch"
    # the values of a layout's fields that it runs; fields that are not named may have any
    runs: Values = field(default_factory=lambda: FSDP_RUNS)
    # those that a search tries, of checkpointing and resharding the fastest first
    search: Values = field(default_factory=lambda: FSDP_SEARCH)
    without: tuple[str, ...] = ()  # degrees that it does not have, or that are not modelled of it: they are 1
    alone: Values = field(default_factory=dict)  # degrees that it does not combine with a sharding
    # ranks of tensor parallelism may share a key-value head: their number may be a multiple of the heads'
    shares_kv_heads: bool = False
    attention: AttentionKernel = "cudnn"  # the kernel that it calls
    fused: bool = True  # norms, activations and residual sums are fused kernels even where nothing is compiled
    compiles: bool = False  # it has torch.compile, which a search takes as on
    gradient_bytes: int = 4  # of a gradient in its reduction
    main_gradients: bool = False  # gradients of all micro-batches are added up in fp32, unsharded (Megatron)
    overlaps_data_parallel: bool = True  # collectives of data parallelism run beside computation
    tensor_link_share: float = 0.78  # of the link's bandwidth that tensor parallel collectives reach
    loss_bytes: float = 28  # bytes read and written for a logit, forward and backward
    logit_bytes: float = 14  # bytes held at once for a logit at the peak of the loss
    chunked_loss: bool = False  # logits of a few tokens at a time exist
    # gradients are averaged over copies of the model once a step, not for each micro-batch
    averages_copies_once: bool = False
    buffers_gib: float = 0.0  # buckets of gathered weights and of gradients that are not parts of a layer
    reserved_share: float = 0.05  # what the allocator holds beyond what it gave out, as a share of it

    def variant(
        self, name: str, *, runs: Values | None = None, search: Values | None = None, **changes: Any
    ) -> Trainer:
        changes |= {"runs": {**self.runs, **(runs or {})}, "search": {**self.search, **(search or {})}}
        return replace(self, name=name, **changes)

    def fixed_degrees(self, sharding: str | None = None) -> dict[str, int]:
        """Return the degrees that it does not have, and those that it cannot combine with a sharding: they are 1."""
        return dict.fromkeys((*self.without, *self.alone.get(sharding or "", ())), 1)

    def divides_kv_heads(self, kv_heads: int, tp: int) -> bool:
        return not kv_heads % tp or (self.shares_kv_heads and not tp % kv_heads)

    def find_unsupported(self, given: Mapping[str, Any]) -> str:
        """Return why it cannot run given fields of a layout; empty where it can."""
        for name, value in self.fixed_degrees(given.get("sharding")).items():
            if given.get(name, value) != value:
                if name not in self.without:
                    return f"{name}={given[name]}: {self.name} does not run it with sharding={given['sharding']}"
                return f"{name}={given[name]}: {self.name} is planned without it; it has to be {value}"
        for name, values in self.runs.items():
            if given.get(name, values[0]) not in values:
                allowed = ", ".join(values)
                return f"{name}={given[name]}: {self.name} does not run it. Allowed with this trainer: {allowed}"
        return ""


FSDP = Trainer("")
FSDP1 = FSDP.variant(
    "",
    runs={"sharding": ("none", "fsdp1")},
    search={"sharding": ("fsdp1",)},
    without=("pp", "tp", "cp"),
    attention="flash2",
)
MEGATRON = Trainer(
    "megatron",
    "megatron",
    runs={
        "schedule": ("1f1b", "interleaved"),
        "sharding": ("none", "zero1", "zero2", "megatron_fsdp", "fsdp2"),
        "checkpointing": ("none", "core_attention", "norm_act", "full"),
    },
    search={
        "schedule": ("1f1b", "interleaved"),
        "sharding": ("zero1",),
        "checkpointing": ("none", "core_attention", "full"),
        "reshard_after_forward": (True,),
    },
    alone={"fsdp2": ("pp", "ep", "dp_replicate")},  # megatron/training/arguments.py, `validate_args`
    # `num_query_groups` is a multiple or a divisor of tp: core 0.16.1 to 0.20, transformer_config.py.
    shares_kv_heads=True,
    main_gradients=True,
    loss_bytes=24,
)
_ROWS = (
    # Tensor parallel collectives at 0.45 of the link: benchmarks/results/parallel_h200.md.
    FSDP.variant(
        OWN,
        runs={"schedule": ALL_SCHEDULES, "checkpointing": ("none", "selective", "full")},
        search={"schedule": ("1f1b", "interleaved"), "checkpointing": ("none", "selective", "full")},
        without=("ep",),
        compiles=True,
        tensor_link_share=0.45,
        loss_bytes=16,
        logit_bytes=4,
        chunked_loss=True,
        averages_copies_once=True,
        reserved_share=0.0,  # its memory is fitted to what is allocated, and segments that grow leave little beside it
    ),
    # 0.2.2, whose files are written, and of 0.3.0 (August 2026) what both have.
    FSDP.variant(
        "torchtitan",
        runs={"schedule": ALL_SCHEDULES, "checkpointing": ("none", "per_op", "full")},
        search={"schedule": ("1f1b", "interleaved"), "checkpointing": ("none", "per_op", "full")},
        fused=False,
        compiles=True,
        tensor_link_share=0.45,
    ),
    MEGATRON,
    MEGATRON.variant("megatron-core"),
    MEGATRON.variant("megatron-bridge"),  # 0.3.1 to 0.6.0 have `dist.use_torch_fsdp2` (training/config.py)
    # Megatron-LM of 2022: scores go through memory, gradients are reduced after the backward pass, in fp16.
    MEGATRON.variant(
        "megatron-lm",
        runs={"sharding": ("none", "zero1"), "checkpointing": ("none", "core_attention", "full")},
        search={"sharding": ("none", "zero1")},
        alone={},
        shares_kv_heads=False,
        attention="unfused",
        gradient_bytes=2,
        overlaps_data_parallel=False,
    ),
    MEGATRON.variant("nemo"),
    # 26.5.1: zero_bubble.yaml and primus_pipeline.yaml; replicas of FSDP2 (patches/args/hsdp_args_patches.py).
    MEGATRON.variant(
        "primus",
        runs={"schedule": ("1f1b", "interleaved", "zero_bubble", "zbv")},
        alone={"fsdp2": ("pp", "ep")},
    ),
    # 0.5.0: schedules are PyTorch's (pipelining/functional.py, `get_schedule_class`), tp divides the key-value heads
    # (parallelizer.py), and Megatron-FSDP runs without pp and ep (mesh_utils.py).
    FSDP.variant(
        "nemo-automodel",
        runs={
            "schedule": ALL_SCHEDULES,
            "sharding": ("none", "fsdp2", "megatron_fsdp"),
            "checkpointing": ("none", "per_op", "full"),
        },
        search={"schedule": ("1f1b", "interleaved"), "checkpointing": ("none", "per_op", "full")},
        alone={"megatron_fsdp": ("pp", "ep")},
    ),
    # Two buckets of 5e8 gradients and 1e9 gathered weights stay allocated: the defaults reduce_bucket_size with
    # overlap_comm, and stage3_max_live_parameters. The loss is in pieces, as Liger's kernels compute it. fsdp1 stands
    # for ZeRO-3. 0.19.6 has pipelines, with ZeRO-1 at most (runtime/pipe/engine.py), AutoTP and Ulysses, too: what they
    # need of a model and how fast they are is not known here.
    FSDP.variant(
        "deepspeed",
        core="deepspeed",
        runs={"sharding": ("none", "zero1", "zero2", "fsdp1")},
        search={"sharding": ("zero1", "zero2", "fsdp1"), "reshard_after_forward": (True,)},
        without=("pp", "tp", "cp"),
        attention="flash3",
        gradient_bytes=2,
        loss_bytes=10,
        chunked_loss=True,
        buffers_gib=3.7,
    ),
    # 0.22: its tensor parallelism is of MLPs alone (llmfoundry/tp), which no layout has.
    FSDP1.variant("llm-foundry", fused=False),
    # Runs what FSDP1 shards, in compiled blocks (foundation-model-stack/fms-fsdp).
    FSDP1.variant("fms-fsdp", compiles=True),
    # C++ and CUDA (IST-DASLab/llmq): fused kernels, gradients in bf16, the loss in pieces. `selective` stands for
    # --recompute-ffn, `norm_act` for --recompute-swiglu and --recompute-norm.
    FSDP.variant(
        "llmq",
        runs={"sharding": ("none", "zero1", "zero2"), "checkpointing": ("none", "norm_act", "selective", "full")},
        search={"sharding": ("zero1",), "checkpointing": ("none", "full"), "reshard_after_forward": (True,)},
        without=("pp", "tp", "cp"),
        gradient_bytes=2,
        loss_bytes=10,
        chunked_loss=True,
    ),
    # 0.8.1: trainer/parallel_dims.py has no tp, and pp is 1.
    FSDP.variant("prime-rl", without=("pp", "tp"), attention="flash2", fused=False, compiles=True),
)
TRAINERS = {row.name: row for row in _ROWS}
SYNONYMS = {name.replace("-", "_"): name for name in TRAINERS if "-" in name}
SYNONYMS |= {"megatron-deepspeed": "megatron-lm", "automodel": "nemo-automodel"}


def is_own(job: Job) -> bool:
    """Return whether this project's own trainer runs a job."""
    return job.trainer == OWN


def find_trainer(name: str) -> Trainer:
    """Return the row of a trainer. Raises KeyError if the table has none of that name."""
    return TRAINERS[SYNONYMS.get(name, name)]


@cache
def efficiencies() -> dict[tuple[str, str], float]:
    with EFFICIENCIES.open(newline="") as lines:
        return {(row["trainer"], row["device"]): float(row["efficiency"]) for row in csv.DictReader(lines)}


@cache
def find_efficiency(trainer: str, device: str) -> float:
    return nearest_efficiency(trainer, device, efficiencies())


def nearest_efficiency(trainer: str, device: str, table: Mapping[tuple[str, str], float]) -> float:
    """Return a pair's efficiency, or the median of the nearest pairs that the table has.

    Nearest is the same trainer on another device, then another trainer of the same core on this device or on any, then
    any trainer on this device; 1 where nothing is known.
    """
    name = SYNONYMS.get(trainer, trainer)
    core = find_trainer(name).core
    same_core = {pair: value for pair, value in table.items() if find_trainer(pair[0]).core == core}
    candidates = (
        [value for pair, value in table.items() if pair == (name, device)],
        [value for (other, _), value in table.items() if other == name],
        [value for (_, other), value in same_core.items() if other == device],
        list(same_core.values()),
        [value for (_, other), value in table.items() if other == device],
    )
    return next((statistics.median(values) for values in candidates if values), 1.0)
