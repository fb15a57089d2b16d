"""The matrix products of a block on one GPU, their seconds, and those of the casts before them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.precisions import sustained_flops

# A product takes so long beyond its FLOPs at the sustained rate: 512^3 to 2048^3 on an H200 (timing_h200.md, profiler).
PRODUCT_OVERHEAD_S = 2.5e-6


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


def block_products(placed: PlacedJob, layer: int) -> list[Product]:
    """Return the products of a block's forward pass on one GPU."""
    model, tp, tokens = placed.model, placed.layout.tp, placed.tokens
    heads, kv_heads = model.heads * model.head_size, model.kv_heads * model.head_size
    products = [
        Product("qkv", tokens, (heads + 2 * kv_heads) / tp, model.hidden_size),
        Product("output", tokens, model.hidden_size, heads / tp),
    ]
    if not model.has_experts(layer):
        return products + list(_mlp(placed, tokens, model.intermediate_size))
    if model.shared_expert_intermediate_size:
        products += list(_mlp(placed, tokens, model.shared_expert_intermediate_size))
    return products + list(_experts(placed))


def _mlp(placed: PlacedJob, tokens: float, width: int) -> Iterator[Product]:
    model, tp = placed.model, placed.layout.tp
    yield Product("up", tokens, width / tp, model.hidden_size, model.mlp_matrices - 1)
    yield Product("down", tokens, model.hidden_size, width / tp)


def _experts(placed: PlacedJob) -> Iterator[Product]:
    """Yield the grouped products of a GPU's experts, which have equal shares of its tokens, times the imbalance."""
    model, layout = placed.model, placed.layout
    tokens = placed.tokens / layout.tp * model.experts_per_token * placed.job.expert_imbalance
    local = model.experts / layout.ep
    width, parts = model.expert_intermediate_size, model.mlp_matrices - 1
    yield Product("up", tokens / local, width, model.hidden_size, parts * local, grouped=True)
    yield Product("down", tokens / local, model.hidden_size, width, local, grouped=True)


GROUPED_SHARE = 0.85  # of a single product's rate that grouped kernels reach
GROUPED_ROWS = 128  # rows of a tile: an expert's tokens are computed in so many at a time


def product_s(placed: PlacedJob, product: Product, dtype: str) -> float:
    """Return the seconds of a product, or of one of the two of its backward pass."""
    device = placed.cluster.device
    rate = sustained_flops(device, dtype)
    if dtype in ("fp8", "fp4"):
        rate *= placed.precision.rate_share
    element_bytes = 1 if dtype == "fp8" else placed.element_bytes
    read = product.rows * product.k + product.k * product.n
    traffic = product.count * (read * element_bytes + placed.element_bytes * product.rows * product.n)
    flops = product.flops
    if product.grouped:
        rate *= GROUPED_SHARE
        flops *= math.ceil(product.rows / GROUPED_ROWS) * GROUPED_ROWS / product.rows
    overhead = PRODUCT_OVERHEAD_S * (2 if product.grouped else product.count)
    return max(flops / rate, traffic / (device.memory_gb_s * 1e9)) + overhead


def cast_s(placed: PlacedJob, product: Product, *, backward: bool) -> float:
    """Return the seconds of the casts before a product: its input, or its output's gradient, and its weights."""
    precision = placed.precision
    width = product.n * product.count if backward else product.k
    rows = product.rows if not product.grouped else product.rows * product.count
    activations = rows * (product.n if backward and product.grouped else width) * precision.cast_bytes
    weights = product.n * product.k * product.count * precision.weight_bytes / 2
    return placed.pass_s(activations + weights, precision.instructions_gb_s)
