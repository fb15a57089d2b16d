"""Seconds of attention: by the rate of its kernel and the length, or through memory where no kernel is fused."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from workloads.estimator.cluster import AttentionRates, Device
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.precisions import sustained_flops
from workloads.layouts.layout import AttentionKernel

ATTENTION_RATES = Path(__file__).parent / "tables" / "attention_rates.csv"
# A backward pass of fused attention has five products where a forward pass has two.
ATTENTION_BACKWARD_PRODUCTS = 2.5
# Of an architecture that the table lacks: about FlashAttention 2 on sm90.
UNKNOWN_RATES = AttentionRates(0.45, 0.4, 900)


def attention_s(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    """Return the seconds of a block's attention over a micro-batch, forward or backward."""
    if placed.attention_kernel == "unfused":
        return _unfused_attention_s(placed, backward=backward)
    job, model = placed.job, placed.model
    length = job.document_tokens or job.sequence_length
    pairs = placed.tokens * model.attended_tokens(layer, length)
    flops = 4 * pairs * model.heads * model.head_size / placed.layout.tp
    rates = attention_rates(placed.cluster.device, placed.attention_kernel)
    share = rates.backward_share if backward else rates.forward_share
    rate = sustained_flops(placed.cluster.device, placed.plain_dtype) * share * length / (length + rates.half_tokens)
    rate *= min(1.0, 0.5 + model.head_size / 256)
    return flops * (ATTENTION_BACKWARD_PRODUCTS if backward else 1) / rate


# Bytes of unfused attention for a score in fp16: its product, scaled and masked softmax, dropout with its mask, and the
# product with the values; backward the gradients of each.
SCORE_FORWARD_BYTES, SCORE_BACKWARD_BYTES = 13, 21


def _unfused_attention_s(placed: PlacedJob, *, backward: bool) -> float:
    model = placed.model
    scores = placed.tokens * placed.job.sequence_length * model.heads / placed.layout.tp
    traffic = scores * (SCORE_BACKWARD_BYTES if backward else SCORE_FORWARD_BYTES)
    flops = 4 * scores * model.head_size * (2 if backward else 1)
    return flops / sustained_flops(placed.cluster.device, "bf16") + placed.pass_s(traffic)


@cache
def _attention_table() -> dict[tuple[str, str], AttentionRates]:
    with ATTENTION_RATES.open(newline="") as lines:
        return {
            (row["kernel"], row["architecture"]): AttentionRates(*(float(row[name]) for name in AttentionRates._fields))
            for row in csv.DictReader(lines)
        }


def attention_rates(device: Device, kernel: AttentionKernel) -> AttentionRates:
    """Return the rates of a fused kernel: as measured on the device, else those of the table for its architecture."""
    if kernel in device.attention:
        return device.attention[kernel]
    table = _attention_table()
    known = (table.get((name, device.architecture)) for name in (kernel, "flash2", "cudnn"))
    return next((rates for rates in known if rates), UNKNOWN_RATES)
