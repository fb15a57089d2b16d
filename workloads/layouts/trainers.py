"""The table of trainers: the values of a layout that each runs and that a search tries, and how it computes."""

import csv
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from workloads.layouts.layout import AttentionKernel, Job

EFFICIENCIES = Path(__file__).with_name("efficiencies.csv")
OWN = "own"
Values = Mapping[str, tuple[Any, ...]]  # by the name of a layout's field
VALUES = {"runs", "search", "alone"}
BASES = ("fsdp", "fsdp1")  # rows that others are like, which no trainer has


@dataclass(frozen=True)
class Trainer:
    """A row of the table."""

    name: str
    # whose engine it runs on: trainers of one core have similar efficiencies
    core: Literal["pytorch", "megatron", "deepspeed"] = "pytorch"
    # the values of a layout's fields that it runs; fields that are not named may have any
    runs: Values = field(default_factory=dict)
    # those that a search tries, of checkpointing and resharding the fastest first
    search: Values = field(default_factory=dict)
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
    logit_bytes: float = 14  # bytes held at once for a logit at the peak of the loss, which one GPU computes eagerly
    compiles_loss: bool = False  # the loss is compiled with the blocks
    chunked_loss: bool = False  # logits of a few tokens at a time exist
    # gradients are averaged over copies of the model once a step, not for each micro-batch
    averages_copies_once: bool = False
    buffers_gib: float = 0.0  # buckets of gathered weights and of gradients that are not parts of a layer
    # what the allocator holds at most beyond what it gave out, as a share of it: no measured row has more
    reserved_share: float = 0.09

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


def _read_trainers() -> dict[str, Trainer]:
    rows: dict[str, Trainer] = {}
    for name, row in tomllib.loads(Path(__file__).with_name("trainers.toml").read_text()).items():
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
