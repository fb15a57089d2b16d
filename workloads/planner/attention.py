"""Seconds of attention: by the rate of its kernel and the length, or through memory where no kernel is fused."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from workloads.planner.precisions import sustained_flops
from workloads.planner.setting import Setting
from workloads.planner.sizes import attended_tokens

ATTENTION_RATES = Path(__file__).parent / "tables" / "attention_rates.csv"
# A backward pass of fused attention has five products where a forward pass has two.
ATTENTION_BACKWARD_PRODUCTS = 2.5


def attention_s(setting: Setting, layer: int, *, backward: bool) -> float:
    """Return the seconds of a block's attention over a micro-batch, forward or backward."""
    if setting.attention_kernel == "unfused":
        return _unfused_attention_s(setting, backward=backward)
    job, model = setting.job, setting.model
    length = job.document_tokens or job.sequence_length
    pairs = setting.tokens * attended_tokens(model, layer, length)
    flops = 4 * pairs * model.heads * model.head_size / setting.layout.tp
    forward_share, backward_share, half_tokens = attention_rates(setting)
    share = backward_share if backward else forward_share
    rate = sustained_flops(setting.cluster.device, setting.plain_dtype) * share * length / (length + half_tokens)
    rate *= min(1.0, 0.5 + model.head_size / 256)
    return flops * (ATTENTION_BACKWARD_PRODUCTS if backward else 1) / rate


# Bytes of unfused attention for a score in fp16: its product, scaled and masked softmax, dropout with its mask, and the
# product with the values; backward the gradients of each.
SCORE_FORWARD_BYTES, SCORE_BACKWARD_BYTES = 13, 21


def _unfused_attention_s(setting: Setting, *, backward: bool) -> float:
    model = setting.model
    scores = setting.tokens * setting.job.sequence_length * model.heads / setting.layout.tp
    traffic = scores * (SCORE_BACKWARD_BYTES if backward else SCORE_FORWARD_BYTES)
    flops = 4 * scores * model.head_size * (2 if backward else 1)
    return flops / sustained_flops(setting.cluster.device, "bf16") + setting.pass_s(traffic)


@cache
def _attention_table() -> dict[tuple[str, str], tuple[float, float, float]]:
    with ATTENTION_RATES.open(newline="") as lines:
        return {
            (row["kernel"], row["architecture"]): (
                float(row["forward_share"]),
                float(row["backward_share"]),
                float(row["half_tokens"]),
            )
            for row in csv.DictReader(lines)
        }


def attention_rates(setting: Setting) -> tuple[float, float, float]:
    """Return the shares of the products' rate forward and backward, and the tokens at which half of them is reached."""
    table, architecture = _attention_table(), setting.cluster.device.architecture
    kernels = (setting.attention_kernel, "flash2", "cudnn")
    return next(
        (table[kernel, architecture] for kernel in kernels if (kernel, architecture) in table), (0.45, 0.4, 900)
    )
