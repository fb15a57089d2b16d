"""A layout in the words of the command, `key=value`."""

from __future__ import annotations

from collections.abc import Mapping

from workloads.layouts.layout import Layout

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")
USUAL = {
    **dict.fromkeys(DEGREES, ("1",)),
    "schedule": ("1f1b",),
    "stages_per_rank": ("1",),
    "sharding": ("none", "fsdp2"),
    "reshard_after_forward": ("true",),
}


def layout_words(layout: Layout) -> dict[str, str]:
    """Return the fields of a layout that a plan searches, as the command takes them."""
    return {
        **{name: str(getattr(layout, name)) for name in DEGREES},
        "schedule": layout.schedule,
        "stages_per_rank": str(layout.stages_per_rank),
        "sharding": layout.sharding,
        "micro_batch": str(layout.micro_batch),
        "checkpointing": layout.checkpointing,
        "reshard_after_forward": str(layout.reshard_after_forward).lower(),
    }


def describe(layout: Layout) -> str:
    """Return the layout in a line, without the fields that have their usual value."""
    words = layout_words(layout)
    unusual: dict[str, object] = {name: value for name, value in words.items() if value not in USUAL.get(name, ())}
    optional = {"checkpointed_layers": layout.checkpointed_layers, "layers_per_stage": layout.layers_per_stage}
    unusual |= {name: value for name, value in optional.items() if value is not None}
    return write_words(unusual)


def write_words(values: Mapping[str, object]) -> str:
    """Return values as the command takes them: `tp=8 reshard_after_forward=false`."""
    return " ".join(f"{name}={_write_value(value)}" for name, value in values.items())


def _write_value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
