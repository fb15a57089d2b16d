"""The table of trainers: the layout values that each supports and that a search tries, and how each computes."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from workloads.layouts.layout import AttentionKernel, Job
from workloads.tables import read_csv, read_toml

EFFICIENCIES = Path(__file__).with_name("efficiencies.csv")
OWN = "own"
Values = Mapping[str, tuple[Any, ...]]  # keyed by layout field
VALUES = {"runs", "search", "alone"}
BASES = ("fsdp", "fsdp1")  # rows on which other rows are based; no trainer has these names


@dataclass(frozen=True)
class Trainer:
    """A row of the table of trainers."""

    name: str
    # The engine that the trainer runs on. Trainers with the same core have similar efficiencies.
    core: Literal["pytorch", "megatron", "deepspeed"] = "pytorch"
    # The values of layout fields that the trainer runs; a field that is not listed may have any value.
    runs: Values = field(default_factory=dict)
    # The values that a search tries; for checkpointing and resharding, fastest first.
    search: Values = field(default_factory=dict)
    without: tuple[str, ...] = ()  # degrees that are always 1, because the trainer lacks them or they are not modeled
    alone: Values = field(default_factory=dict)  # degrees that the trainer does not combine with a sharding
    # Tensor-parallel ranks may share a key-value head, so the number of ranks may be a multiple of the number of heads.
    shares_kv_heads: bool = False
    attention: AttentionKernel = "cudnn"  # the kernel that the trainer calls
    fused: bool = True  # norms, activations and residual sums are fused kernels even if nothing is compiled
    compiles: bool = False  # the trainer supports torch.compile, which a search assumes to be on
    gradient_bytes: int = 4  # per gradient in the reduction
    main_gradients: bool = False  # gradients of all micro-batches are accumulated in fp32, unsharded (Megatron)
    overlaps_data_parallel: bool = True  # data-parallel collectives overlap with computation
    tensor_link_share: float = 0.78  # the share of the link's bandwidth that tensor-parallel collectives reach
    loss_bytes: float = 28  # bytes read and written per logit, forward and backward
    logit_bytes: float = 14  # bytes allocated per logit at the peak of the loss, computed eagerly on one GPU
    compiles_loss: bool = False  # the loss is compiled with the blocks
    chunked_loss: bool = False  # only the logits of a few tokens exist at a time
    # Gradients are averaged over replicas of the model once per step, not for each micro-batch.
    averages_copies_once: bool = False
    buffers_gib: float = 0.0  # buckets of gathered weights and of gradients that are not parts of a layer
    # The allocator's reserved but unallocated memory, as a share of the allocated memory: the largest measured share.
    reserved_share: float = 0.09

    def fixed_degrees(self, sharding: str | None = None) -> dict[str, int]:
        """Return the degrees that must be 1 because the trainer does not support them, at all or with this sharding."""
        return dict.fromkeys((*self.without, *self.alone.get(sharding or "", ())), 1)

    def divides_kv_heads(self, kv_heads: int, tp: int) -> bool:
        return not kv_heads % tp or (self.shares_kv_heads and not tp % kv_heads)

    def find_unsupported(self, given: Mapping[str, Any]) -> str:
        """Return why the trainer cannot run the given fields of a layout; empty if it can."""
        for name, value in self.fixed_degrees(given.get("sharding")).items():
            if given.get(name, value) != value:
                if name not in self.without:
                    return f"{name}={given[name]}: {self.name} does not run it with sharding={given['sharding']}"
                return f"{name}={given[name]}: {self.name} is planned without it; it has to be {value}"
        for name, values in self.runs.items():
            if given.get(name, values[0]) not in values:
                shown, *allowed = (str(one).lower() for one in (given[name], *values))
                return f"{name}={shown}: {self.name} does not run it. Allowed with this trainer: {', '.join(allowed)}"
        return ""


def _read_trainers() -> dict[str, Trainer]:
    rows: dict[str, Trainer] = {}
    for name, row in read_toml(__file__, "trainers.toml").items():
        base = rows[row.pop("like")] if "like" in row else Trainer(name)
        values: dict[str, Any] = row | {"without": tuple(row.get("without", base.without))}
        for key in VALUES & row.keys():
            known = {} if key == "alone" else getattr(base, key)
            values[key] = {**known, **{field: tuple(allowed) for field, allowed in row[key].items()}}
        rows[name] = replace(base, name=name, **values)
    return {name: row for name, row in rows.items() if name not in BASES}


TRAINERS = _read_trainers()
SYNONYMS = {name.replace("-", "_"): name for name in TRAINERS if "-" in name}
SYNONYMS |= {"megatron-deepspeed": "megatron-lm", "automodel": "nemo-automodel"}


def is_own(job: Job) -> bool:
    """Return whether this project's own trainer runs a job."""
    return job.trainer == OWN


def find_trainer(name: str) -> Trainer:
    """Return a trainer's row in the table. Raises KeyError if there is none."""
    return TRAINERS[SYNONYMS.get(name, name)]


@cache
def efficiencies() -> dict[tuple[str, str], float]:
    rows = read_csv(__file__, EFFICIENCIES.name)
    return {(row["trainer"], row["device"]): float(row["efficiency"]) for row in rows}


@cache
def find_efficiency(trainer: str, device: str) -> float:
    return nearest_efficiency(trainer, device, efficiencies())


def nearest_efficiency(trainer: str, device: str, table: Mapping[tuple[str, str], float]) -> float:
    """Return a trainer's efficiency on a device or, if the table lacks it, the median over the nearest pairs: trainers
    with the same core, which call the same kernels, on this device or else on any, then any trainer on this device."""
    name = SYNONYMS.get(trainer, trainer)
    core = find_trainer(name).core
    same_core = {pair: value for pair, value in table.items() if find_trainer(pair[0]).core == core}
    candidates = (
        [value for pair, value in table.items() if pair == (name, device)],
        [value for (_, other), value in same_core.items() if other == device],
        list(same_core.values()),
        [value for (_, other), value in table.items() if other == device],
    )
    return next((statistics.median(values) for values in candidates if values), 1.0)
