"""What differs between trainers: kernels, overlap, data types, buffers, and the share of the kernels' rates reached."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from workloads.layouts.job import AttentionKernel

EFFICIENCIES = Path(__file__).with_name("efficiencies.csv")


@dataclass(frozen=True)
class Trainer:
    """The rules of a trainer.

    Attributes:
        core: whose engine it runs on: trainers of one core have similar efficiencies.
        attention: the kernel that it calls.
        fused: norms, activations and residual sums are fused kernels even where nothing is compiled.
        gradient_bytes: of a gradient in its reduction.
        main_gradients: gradients of all micro-batches are added up in fp32, unsharded (Megatron).
        overlaps_data_parallel: collectives of data parallelism run beside computation.
        tensor_link_share: of the link's bandwidth that tensor parallel collectives reach.
        loss_bytes: bytes read and written for a logit, forward and backward.
        logit_bytes: bytes held at once for a logit at the peak of the loss.
        chunked_loss: logits of a few tokens at a time exist.
        averages_copies_once: gradients are averaged over copies of the model once a step, not for each micro-batch.
        buffers_gib: buckets of gathered weights and of gradients that are not parts of a layer.
        reserved_share: what the allocator holds beyond what it gave out, as a share of it.
    """

    name: str
    core: Literal["pytorch", "megatron", "deepspeed"] = "pytorch"
    attention: AttentionKernel = "cudnn"
    fused: bool = True
    gradient_bytes: int = 4
    main_gradients: bool = False
    overlaps_data_parallel: bool = True
    tensor_link_share: float = 0.78
    loss_bytes: float = 28
    logit_bytes: float = 14
    chunked_loss: bool = False
    averages_copies_once: bool = False
    buffers_gib: float = 0.0
    reserved_share: float = 0.05


MEGATRON = Trainer("megatron", "megatron", main_gradients=True, loss_bytes=24)
TRAINERS = {
    # Tensor parallel collectives at 0.45 of the link: benchmarks/results/parallel_h200.md.
    "own": Trainer(
        "own",
        tensor_link_share=0.45,
        loss_bytes=16,
        logit_bytes=4,
        chunked_loss=True,
        averages_copies_once=True,
        reserved_share=0.0,  # its memory is fitted to what is allocated, and segments that grow leave little beside it
    ),
    "torchtitan": Trainer("torchtitan", fused=False, tensor_link_share=0.45),
    "megatron": MEGATRON,
    "megatron-core": replace(MEGATRON, name="megatron-core"),
    "megatron-bridge": replace(MEGATRON, name="megatron-bridge"),
    # Megatron-LM of 2022: scores go through memory, gradients are reduced after the backward pass, in fp16.
    "megatron-lm": replace(
        MEGATRON, name="megatron-lm", attention="unfused", gradient_bytes=2, overlaps_data_parallel=False
    ),
    "nemo": replace(MEGATRON, name="nemo"),
    "primus": replace(MEGATRON, name="primus"),
    "nemo-automodel": Trainer("nemo-automodel"),
    # Two buckets of 5e8 gradients and 1e9 gathered weights stay allocated: the defaults reduce_bucket_size with
    # overlap_comm, and stage3_max_live_parameters. The loss is in pieces, as Liger's kernels compute it.
    "deepspeed": Trainer(
        "deepspeed", "deepspeed", "flash3", gradient_bytes=2, loss_bytes=10, chunked_loss=True, buffers_gib=3.7
    ),
    "llm-foundry": Trainer("llm-foundry", attention="flash2", fused=False),
    "prime-rl": Trainer("prime-rl", attention="flash2", fused=False),
}
SYNONYMS = {
    "llm_foundry": "llm-foundry",
    "megatron_lm": "megatron-lm",
    "megatron_core": "megatron-core",
    "megatron_bridge": "megatron-bridge",
    "megatron-deepspeed": "megatron-lm",
    "nemo_automodel": "nemo-automodel",
    "automodel": "nemo-automodel",
    "prime_rl": "prime-rl",
}


def find_trainer(name: str) -> Trainer:
    """Return the rules of a trainer.

    Raises:
        KeyError: the table has none of that name.
    """
    return TRAINERS[SYNONYMS.get(name, name)]


@cache
def efficiencies() -> dict[tuple[str, str], float]:
    """Return the calibrated efficiency of each pair of trainer and device."""
    with EFFICIENCIES.open(newline="") as lines:
        return {(row["trainer"], row["device"]): float(row["efficiency"]) for row in csv.DictReader(lines)}


@cache
def find_efficiency(trainer: str, device: str) -> float:
    """Return the share of the kernels' rates that a trainer reaches on a device."""
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
