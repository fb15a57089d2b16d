"""What each trainer offers to a search over layouts. Of checkpointing and resharding the fastest stands first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workloads.planner.trainers import TRAINERS

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
assert OFFERS.keys() == TRAINERS.keys()


def fixed_by(trainer: str) -> dict[str, int]:
    """Return the degrees that a trainer does not divide by."""
    return dict(WITHOUT.get(trainer, {}))
