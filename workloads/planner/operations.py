"""Seconds of the operations of a block on one GPU: products, attention and what the memory's bandwidth limits."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.planner.precisions import sustained_flops
from workloads.planner.setting import Setting
from workloads.planner.sizes import attended_tokens, has_experts

ATTENTION_RATES = Path(__file__).parent / "tables" / "attention_rates.csv"
# A product takes so long beyond its FLOPs at the sustained rate: 512^3 to 2048^3 on an H200 (timing_h200.md, profiler).
PRODUCT_OVERHEAD_S = 2.5e-6
# A backward pass of fused attention has five products where a forward pass has two.
ATTENTION_BACKWARD_PRODUCTS = 2.5
EAGER_FACTOR = 3.5  # bytes of norms, rotary embeddings and activations in single PyTorch kernels, in fp32 where cast


@dataclass(frozen=True)
class Seconds:
    """Seconds by kind of operation."""

    products: float = 0.0
    attention: float = 0.0
    other: float = 0.0

    def __add__(self, rest: Seconds) -> Seconds:
        return Seconds(self.products + rest.products, self.attention + rest.attention, self.other + rest.other)

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(self.products * factor, self.attention * factor, self.other * factor)

    @property
    def total(self) -> float:
        return self.products + self.attention + self.other


@dataclass(frozen=True)
class Product:
    """A linear layer of a block: `count` products of `rows` x `k` with `k` x `n`."""

    name: str
    rows: float
    n: float
    k: float
    count: float = 1.0
    grouped: bool = False

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.n * self.k * self.count


def block_products(setting: Setting, layer: int) -> list[Product]:
    """Return the products of a block's forward pass on one GPU."""
    model, tp, tokens = setting.model, setting.layout.tp, setting.tokens
    heads, kv_heads = model.heads * model.head_size, model.kv_heads * model.head_size
    products = [
        Product("qkv", tokens, (heads + 2 * kv_heads) / tp, model.hidden_size),
        Product("output", tokens, model.hidden_size, heads / tp),
    ]
    if not has_experts(model, layer):
        return products + list(_mlp(setting, tokens, model.intermediate_size))
    if model.shared_expert_intermediate_size:
        products += list(_mlp(setting, tokens, model.shared_expert_intermediate_size))
    return products + list(_experts(setting))


def _mlp(setting: Setting, tokens: float, width: int) -> Iterator[Product]:
    model, tp = setting.model, setting.layout.tp
    yield Product("up", tokens, width / tp, model.hidden_size, model.mlp_matrices - 1)
    yield Product("down", tokens, model.hidden_size, width / tp)


def _experts(setting: Setting) -> Iterator[Product]:
    """Yield the grouped products of a GPU's experts, which have equal shares of its tokens, times the imbalance."""
    model, layout = setting.model, setting.layout
    tokens = setting.tokens / layout.tp * model.experts_per_token * setting.job.expert_imbalance
    local = model.experts / layout.ep
    width, parts = model.expert_intermediate_size, model.mlp_matrices - 1
    yield Product("up", tokens / local, width, model.hidden_size, parts * local, grouped=True)
    yield Product("down", tokens / local, model.hidden_size, width, local, grouped=True)


GROUPED_SHARE = 0.85  # of a single product's rate that grouped kernels reach
GROUPED_ROWS = 128  # rows of a tile: an expert's tokens are computed in so many at a time


def product_s(setting: Setting, product: Product, dtype: str) -> float:
    """Return the seconds of a product, or of one of the two of its backward pass."""
    device = setting.cluster.device
    rate = sustained_flops(device, dtype)
    if dtype.startswith("fp") and dtype != "fp16":
        rate *= setting.precision.rate_share
    element_bytes = 1 if dtype == "fp8" else 2
    read = product.rows * product.k + product.k * product.n
    traffic = product.count * (read * element_bytes + 2 * product.rows * product.n)
    flops = product.flops
    if product.grouped:
        rate *= GROUPED_SHARE
        flops *= math.ceil(product.rows / GROUPED_ROWS) * GROUPED_ROWS / product.rows
    overhead = PRODUCT_OVERHEAD_S * (2 if product.grouped else product.count)
    return max(flops / rate, traffic / (device.memory_gb_s * 1e9)) + overhead


def cast_s(setting: Setting, product: Product, *, backward: bool) -> float:
    """Return the seconds of the casts before a product: its input, or its output's gradient, and its weights."""
    precision = setting.precision
    width = product.n * product.count if backward else product.k
    rows = product.rows if not product.grouped else product.rows * product.count
    activations = rows * (product.n if backward and product.grouped else width) * precision.cast_bytes
    weights = product.n * product.k * product.count * precision.weight_bytes / 2
    return setting.pass_s(activations + weights, precision.instructions_gb_s)


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
    rate = sustained_flops(setting.cluster.device, "bf16") * share * length / (length + half_tokens)
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


def pass_elements(setting: Setting, layer: int, *, backward: bool) -> float:
    """Return how many values of 2 bytes norms, rotary embeddings, activations and residual sums read and write."""
    model, tp = setting.model, setting.layout.tp
    residual = (16 if backward else 10) * model.hidden_size / setting.residual_parts
    activation = _activation_elements(setting, layer, backward=backward)
    rotary = 2 * (model.heads + model.kv_heads) * model.head_size / tp if model.positions == "rope" else 0.0
    return setting.tokens * (residual + activation + rotary)


def _activation_elements(setting: Setting, layer: int, *, backward: bool) -> float:
    """Return how many values of a token the MLP's activation reads and writes."""
    model = setting.model
    width = model.intermediate_size
    if has_experts(model, layer):
        width = model.experts_per_token * model.expert_intermediate_size + model.shared_expert_intermediate_size
    passes = (6, 3) if model.mlp_matrices == 3 else (3, 2)  # backward, forward
    return width / setting.layout.tp * passes[0 if backward else 1]


def pass_s(setting: Setting, layer: int, *, backward: bool) -> float:
    """Return the seconds of what the memory's bandwidth limits in a block."""
    fused = setting.trainer.fused or setting.job.compiled
    elements = pass_elements(setting, layer, backward=backward) * (1 if fused else EAGER_FACTOR)
    return setting.pass_s(2 * elements) + _permutation_s(setting, layer)


# A dropless mixture of experts tells the host how many tokens each expert has, so that in each block's forward pass the
# GPU waits for launches, and has small kernels of the router. Assumed, no microbenchmark is known to us.
ROUTING_S = 1.2e-3


def _permutation_s(setting: Setting, layer: int) -> float:
    """Return the seconds of routing, and of sorting tokens by expert and back."""
    model = setting.model
    if not has_experts(model, layer):
        return 0.0
    tokens = setting.tokens / setting.layout.tp
    return setting.pass_s(tokens * _sorted_copies(setting) * model.hidden_size * 2) + ROUTING_S


def _sorted_copies(setting: Setting) -> float:
    """Return how often a token is read or written to sort it by expert and back.

    A token is read once and written once for each of its experts, and back. An all-to-all needs the copies sorted by
    rank before and by expert after it, both ways. DeepEP brings a token to a rank once for all of its experts there.
    """
    count, ranks = setting.model.experts_per_token, setting.layout.ep
    if ranks == 1:
        return 2 + 2 * count
    if setting.job.dispatcher == "deepep":
        return 2 * ranks * (1 - (1 - 1 / ranks) ** count) + 2 * count
    return 2 + 6 * count


def forward(setting: Setting, layer: int) -> Seconds:
    """Return the seconds of a block's forward pass over a micro-batch."""
    dtype = setting.precision.dtype
    products = block_products(setting, layer)
    casts = sum(cast_s(setting, product, backward=False) for product in products)
    return Seconds(
        sum(product_s(setting, product, dtype) for product in products),
        attention_s(setting, layer, backward=False),
        pass_s(setting, layer, backward=False) + casts,
    )


def backward(setting: Setting, layer: int, once: Seconds) -> Seconds:
    """Return the seconds of a block's backward pass, without what it computes again; `once` are the forward pass's."""
    casts = sum(cast_s(setting, product, backward=True) for product in block_products(setting, layer))
    return Seconds(
        2 * once.products,
        attention_s(setting, layer, backward=True),
        pass_s(setting, layer, backward=True) + casts,
    )


# torchtitan saves every second product of a block, so that of q, k, v, output, gate, up and down it repeats k, output
# and up (torchtitan/parallelisms/parallelize_llama.py at 9dec370: mm_count).
def recomputed(setting: Setting, layer: int, once: Seconds) -> Seconds:
    """Return the seconds of what a block's backward pass computes again; `once` are the forward pass's."""
    match setting.layout.checkpointing:
        case "full":
            return once
        case "per_op":
            products = {product.name: product for product in block_products(setting, layer)}
            share = _repeated_share(setting, products)
            casts = sum(cast_s(setting, product, backward=False) for product in products.values())
            return Seconds(once.products * share, 0.0, once.other - casts * (1 - share))
        case "selective":
            up = [product for product in block_products(setting, layer) if product.name == "up"]
            return Seconds(
                sum(product_s(setting, product, setting.precision.dtype) for product in up), 0.0, once.other / 2
            )
        case "core_attention":
            return Seconds(0.0, once.attention, 0.0)
        case "norm_act":
            return Seconds(0.0, 0.0, setting.pass_s(2 * _norm_and_activation_elements(setting, layer)))
    return Seconds()


def _norm_and_activation_elements(setting: Setting, layer: int) -> float:
    """Return how many values of 2 bytes the norms and the activation of a forward pass read and write."""
    norms = 4 * setting.model.hidden_size / setting.residual_parts
    return setting.tokens * (norms + _activation_elements(setting, layer, backward=False))


def _repeated_share(setting: Setting, products: dict[str, Product]) -> float:
    model = setting.model
    total = sum(product.flops for product in products.values())
    key = products["qkv"].flops * model.kv_heads / (model.heads + 2 * model.kv_heads)
    up = products["up"].flops / max(1, model.mlp_matrices - 1)
    return (key + products["output"].flops + up) / total


def head_s(setting: Setting) -> float:
    """Return the seconds of the output layer and the loss of a micro-batch, forward and backward."""
    model, tp = setting.model, setting.layout.tp
    head = Product("head", setting.tokens, model.vocabulary / tp, model.hidden_size)
    logits = setting.tokens * model.vocabulary / tp
    return 3 * product_s(setting, head, "bf16") + setting.pass_s(logits * setting.trainer.loss_bytes)
