"""Write a layout as `key=value` arguments of the command."""

from collections.abc import Mapping

from workloads.layouts.layout import Layout

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "ep", "pp")
WORDS = (*DEGREES, "schedule", "stages_per_rank", "sharding", "micro_batch", "checkpointing", "reshard_after_forward")
USUAL = {
    **dict.fromkeys(DEGREES, ("1",)),
    "schedule": ("1f1b",),
    "stages_per_rank": ("1",),
    "sharding": ("none", "fsdp2"),
    "reshard_after_forward": ("true",),
}


def layout_words(layout: Layout) -> dict[str, str]:
    return {name: str(getattr(layout, name)).lower() for name in WORDS}


def describe(layout: Layout) -> str:
    """Describe the layout in one line, omitting fields that have their usual values."""
    words = layout_words(layout)
    unusual: dict[str, object] = {name: value for name, value in words.items() if value not in USUAL.get(name, ())}
    optional = {"checkpointed_layers": layout.checkpointed_layers, "layers_per_stage": layout.layers_per_stage}
    unusual |= {name: value for name, value in optional.items() if value is not None}
    return write_words(unusual)


def write_words(values: Mapping[str, object]) -> str:
    texts = {name: ",".join(map(str, v)) if isinstance(v, tuple) else str(v).lower() for name, v in values.items()}
    return " ".join(f"{name}={text}" for name, text in texts.items())
