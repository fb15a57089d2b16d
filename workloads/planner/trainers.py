"""What differs between trainers: kernels, overlap, data types, buffers, and the share of the kernels' rates reached."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

EFFICIENCIES = Path(__file__).parent / "tables" / "efficiencies.csv"
AttentionKernel = Literal["flash2", "flash3", "cudnn", "unfused"]


@dataclass(frozen=True)
class Trainer:
    """The rules of a trainer.

    Attributes:
        attention: the kernel that it calls.
        fused: norms, activations and residual sums are fused kernels even where nothing is compiled.
        gradient_bytes: of a gradient in its reduction.
        main_gradients: gradients of all micro-batches are added up in fp32, unsharded (Megatron).
        overlaps_data_parallel: collectives of data parallelism run beside computation.
        tensor_link_share: of the link's bandwidth that tensor parallel collectives reach.
        loss_bytes: bytes read and written for a logit, forward and backward.
        logit_gib_bytes: bytes held at once for a logit at the peak of the loss.
        chunked_loss: logits of a few tokens at a time exist.
        buffers_gib: buckets of gathered weights and of gradients that are not parts of a layer.
        reserved_share: what the allocator holds beyond what it gave out, as a share of it.
    """

    name: str
    attention: AttentionKernel = "cudnn"
    fused: bool = True
    gradient_bytes: int = 4
    main_gradients: bool = False
    overlaps_data_parallel: bool = True
    tensor_link_share: float = 0.78
    loss_bytes: float = 28
    logit_bytes: float = 14
    chunked_loss: bool = False
    buffers_gib: float = 0.0
    reserved_share: float = 0.05


MEGATRON = Trainer("megatron", main_gradients=True, loss_bytes=24)
TRAINERS = {
    # Tensor parallel collectives at 0.45 of the link: benchmarks/results/parallel_h200.md.
    "own": Trainer("own", gradient_bytes=2, tensor_link_share=0.45, loss_bytes=16, chunked_loss=True),
    "torchtitan": Trainer("torchtitan", "flash2", fused=False, tensor_link_share=0.45),
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
    "deepspeed": Trainer("deepspeed", "flash3", gradient_bytes=2, loss_bytes=10, chunked_loss=True, buffers_gib=6.0),
    "llm-foundry": Trainer("llm-foundry", "flash2", fused=False),
    "prime-rl": Trainer("prime-rl", "flash2"),
}
SYNONYMS = {"llm_foundry": "llm-foundry", "megatron_lm": "megatron-lm", "megatron_core": "megatron-core"}


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


def find_efficiency(trainer: str, device: str) -> float:
    """Return the share of the kernels' rates that a trainer reaches on a device.

    Without a calibrated one it is that of the same trainer on another device, or the median of the table.
    """
    name, table = SYNONYMS.get(trainer, trainer), efficiencies()
    if (name, device) in table:
        return table[name, device]
    nearest = sorted(value for (other, _), value in table.items() if other == name) or sorted(table.values())
    return nearest[len(nearest) // 2] if nearest else 1.0
