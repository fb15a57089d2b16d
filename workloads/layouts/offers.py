"""What each trainer runs, and what of it a search over layouts tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from workloads.layouts.job import Schedule
from workloads.layouts.trainers import TRAINERS

# Fields of a layout, and the values that a trainer runs.
Values = Mapping[str, tuple[Any, ...]]
ALL_SCHEDULES = get_args(Schedule)  # those of torch.distributed.pipelining
MEGATRON_RUNS: Values = {
    "schedule": ("1f1b", "interleaved"),
    "sharding": ("none", "zero1", "zero2", "megatron_fsdp", "fsdp2"),
    "checkpointing": ("none", "core_attention", "norm_act", "full"),
}
FSDP_RUNS: Values = {"schedule": ("1f1b",), "sharding": ("none", "fsdp2"), "checkpointing": ("none", "full")}
RUNS: Mapping[str, Values] = {
    "own": {**FSDP_RUNS, "schedule": ALL_SCHEDULES, "checkpointing": ("none", "selective", "full")},
    "torchtitan": {**FSDP_RUNS, "schedule": ALL_SCHEDULES, "checkpointing": ("none", "per_op", "full")},
    "megatron": MEGATRON_RUNS,
    # Megatron-LM of 2022.
    "megatron-lm": {
        **MEGATRON_RUNS,
        "sharding": ("none", "zero1"),
        "checkpointing": ("none", "core_attention", "full"),
    },
    "megatron-core": MEGATRON_RUNS,
    "megatron-bridge": {**MEGATRON_RUNS, "sharding": ("none", "zero1", "zero2", "megatron_fsdp")},
    "nemo": {**MEGATRON_RUNS, "sharding": ("none", "zero1", "zero2", "megatron_fsdp")},
    "primus": {**MEGATRON_RUNS, "schedule": ("1f1b", "interleaved", "zero_bubble", "zbv")},
    "nemo-automodel": FSDP_RUNS,
    "prime-rl": FSDP_RUNS,
    "llm-foundry": {**FSDP_RUNS, "sharding": ("none", "fsdp1")},
    "deepspeed": {**FSDP_RUNS, "sharding": ("none", "zero1", "zero2", "fsdp1")},  # fsdp1 stands for ZeRO-3
}
# What a search tries. Of checkpointing and resharding the fastest stands first.
MEGATRON = {
    "schedule": ("1f1b", "interleaved"),
    "sharding": ("zero1",),
    "checkpointing": ("none", "core_attention", "full"),
    "reshard_after_forward": (True,),
}
FSDP = {
    "schedule": ("1f1b",),
    "sharding": ("fsdp2",),
    "checkpointing": ("none", "full"),
    "reshard_after_forward": (False, True),
}
OFFERS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "own": {**FSDP, "schedule": ("1f1b", "interleaved"), "checkpointing": ("none", "selective", "full")},
    "torchtitan": {**FSDP, "schedule": ("1f1b", "interleaved"), "checkpointing": ("none", "per_op", "full")},
    "megatron": MEGATRON,
    "megatron-lm": {**MEGATRON, "sharding": ("none", "zero1")},
    "megatron-core": MEGATRON,
    "megatron-bridge": MEGATRON,
    "nemo": MEGATRON,
    "primus": MEGATRON,
    "nemo-automodel": FSDP,
    "prime-rl": FSDP,
    "llm-foundry": {**FSDP, "sharding": ("fsdp1",)},
    "deepspeed": {**FSDP, "sharding": ("zero1", "zero2", "fsdp1"), "reshard_after_forward": (True,)},
}
# Trainers without a degree: it is 1.
WITHOUT = {
    "nemo-automodel": {"pp": 1},
    "prime-rl": {"pp": 1, "tp": 1},
    "llm-foundry": {"pp": 1, "tp": 1, "cp": 1},
    "deepspeed": {"pp": 1, "tp": 1, "cp": 1},
}
# Degrees that Megatron-LM does not combine with a sharding: `validate_args` of its megatron/training/arguments.py.
ALONE = {"fsdp2": ("pp", "ep", "dp_replicate")}
assert OFFERS.keys() == RUNS.keys() == TRAINERS.keys()


def fixed_by(trainer: str, sharding: str | None = None) -> dict[str, int]:
    """Return the degrees that a trainer does not divide by, and those that it cannot combine with a sharding."""
    is_megatron = "megatron_fsdp" in RUNS[trainer]["sharding"]
    alone = ALONE.get(sharding or "", ()) if is_megatron else ()
    return {**WITHOUT.get(trainer, {}), **dict.fromkeys(alone, 1)}


def find_unsupported(trainer: str, given: Mapping[str, Any]) -> str:
    """Return why a trainer cannot run given fields of a layout; empty where it can."""
    for name, value in fixed_by(trainer, given.get("sharding")).items():
        if given.get(name, value) != value:
            if name not in fixed_by(trainer):
                return f"{name}={given[name]}: {trainer} does not run it with sharding={given['sharding']}"
            return f"{name}={given[name]}: {trainer} has no such degree; it has to be {value}"
    for name, values in RUNS[trainer].items():
        if given.get(name, values[0]) not in values:
            return f"{name}={given[name]}: {trainer} does not run it. Allowed with this trainer: {', '.join(values)}"
    return ""
