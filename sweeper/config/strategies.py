"""Fixed layouts by name: the table `conf/strategies.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from sweeper.config import space as spaces
from sweeper.config.gpu_counts import apply_to_entry
from sweeper.config.hardware import Target
from sweeper.config.resolution import CONF, ResolvedConfig
from sweeper.config.validation import build
from workloads.api.errors import UserInputError, suggest

# Degrees that a row of the table leaves at one.
DEFAULTS = {"dp_replicate": 1, "cp": 1, "stages_per_rank": 1, "schedule": "1f1b"}


@dataclass(frozen=True)
class Strategy:
    """A fixed layout for the GPUs of one vendor and one model."""

    vendor: str
    model: str
    space: dict[str, Any]


def read_strategies() -> dict[str, list[Strategy]]:
    """Return the rows of the table by the name of their strategy."""
    table = OmegaConf.to_container(OmegaConf.load(CONF / "strategies.yaml"))
    assert isinstance(table, dict)
    rows_by_name = {str(name): rows for name, rows in table.items()}
    return {name: [build(Strategy, row, f"{name}.") for row in rows] for name, rows in rows_by_name.items()}


def apply_strategy(resolved: ResolvedConfig, target: Target, gpus: int) -> ResolvedConfig:
    """Return the configuration with the layout that its strategy has for this vendor, model and number of GPUs.

    Raises:
        UserInputError: for an unknown strategy, one without a row for them, or a number of GPUs that its degrees do not
            divide.
    """
    name = resolved.config.workload.strategy
    if name is None:
        return resolved
    strategies = read_strategies()
    if name not in strategies:
        raise UserInputError(f"workload.strategy={name}: unknown strategy. {suggest(name, strategies)}")
    is_amd = (target.architecture or "").startswith("gfx")
    vendor = "amd" if is_amd else "nvidia"  # a CPU takes either
    model = spaces.parse(resolved.config.space, target.hardware.kind).constants.get("model")
    model = model or (resolved.settings or {}).get("model")
    row = next((row for row in strategies[name] if (row.vendor, row.model) == (vendor, model)), None)
    if row is None:
        models = ", ".join(sorted({row.model for row in strategies[name] if row.vendor == vendor}))
        raise UserInputError(f"workload.strategy={name}: no layout for model {model} on {vendor}. Available: {models}")
    parameters = {field.name for field in fields(resolved.workload.Parameters)}
    layout = {**DEFAULTS, **layout_on(gpus, name, row)}
    return resolved.with_space({name: value for name, value in layout.items() if name in parameters})


def layout_on(gpus: int, name: str, row: Strategy) -> dict[str, Any]:
    """Return the values of a row on so many GPUs: those that tp and pp leave are sharded data parallel.

    Raises:
        UserInputError: tp and pp do not divide the number of GPUs.
    """
    divided = row.space["tp"] * row.space["pp"]
    if gpus % divided:
        raise UserInputError(
            f"gpus={gpus}: workload.strategy={name} has tp={row.space['tp']} x pp={row.space['pp']} for {row.model} on "
            f"{row.vendor}. Allowed: multiples of {divided}"
        )
    values = {key: apply_to_entry(value, gpus) for key, value in row.space.items()}
    return {**values, "dp_shard": gpus // divided}
