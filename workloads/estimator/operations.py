"""Seconds of a block on one GPU, forward, backward and recomputed, and of what the memory's bandwidth limits."""

from __future__ import annotations

from dataclasses import dataclass

from workloads.estimator.attention import attention_s
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.products import Product, block_products, cast_s, product_s

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


def pass_elements(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    """Return how many values of 2 bytes norms, rotary embeddings, activations and residual sums read and write."""
    model, tp = placed.model, placed.layout.tp
    residual = (16 if backward else 10) * model.hidden_size / placed.residual_parts
    activation = _activation_elements(placed, layer, backward=backward)
    rotary = 2 * (model.heads + model.kv_heads) * model.head_size / tp if model.positions == "rope" else 0.0
    return placed.tokens * (residual + activation + rotary)


def _activation_elements(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    """Return how many values of a token the MLP's activation reads and writes."""
    model = placed.model
    width = model.intermediate_size
    if model.has_experts(layer):
        width = model.experts_per_token * model.expert_intermediate_size + model.shared_expert_intermediate_size
    passes = (6, 3) if model.mlp_matrices == 3 else (3, 2)  # backward, forward
    return width / placed.layout.tp * passes[0 if backward else 1]


def pass_s(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    """Return the seconds of what the memory's bandwidth limits in a block."""
    fused = placed.trainer.fused or placed.job.compiled
    elements = pass_elements(placed, layer, backward=backward) * (1 if fused else EAGER_FACTOR)
    return placed.pass_s(placed.element_bytes * elements) + _permutation_s(placed, layer)


# A dropless mixture of experts tells the host how many tokens each expert has, so that in each block's forward pass the
# GPU waits for launches, and has small kernels of the router. Assumed, no microbenchmark is known to us.
ROUTING_S = 1.2e-3


def _permutation_s(placed: PlacedJob, layer: int) -> float:
    """Return the seconds of routing, and of sorting tokens by expert and back."""
    model = placed.model
    if not model.has_experts(layer):
        return 0.0
    tokens = placed.tokens / placed.layout.tp
    return placed.pass_s(tokens * _sorted_copies(placed) * model.hidden_size * 2) + ROUTING_S


def _sorted_copies(placed: PlacedJob) -> float:
    """Return how often a token is read or written to sort it by expert and back.

    A token is read once and written once for each of its experts, and back. An all-to-all needs the copies sorted by
    rank before and by expert after it, both ways. DeepEP brings a token to a rank once for all of its experts there.
    """
    count, ranks = placed.model.experts_per_token, placed.layout.ep
    if ranks == 1:
        return 2 + 2 * count
    if placed.job.dispatcher == "deepep":
        return 2 * ranks * (1 - (1 - 1 / ranks) ** count) + 2 * count
    return 2 + 6 * count


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block for one micro-batch: `recomputed` is what the backward pass computes again."""

    forward: Seconds
    backward: Seconds
    recomputed: Seconds


def block_seconds(placed: PlacedJob, layer: int) -> BlockSeconds:
    """Return the seconds of a block. A search asks for the same operations in many layouts, so they are kept."""
    job, layout, device = placed.job, placed.layout, placed.cluster.device
    sizes = (layer, job.sequence_length, job.document_tokens, layout.micro_batch, layout.tp, layout.cp, layout.ep)
    kernels = (job.trainer, job.precision, placed.attention_kernel, job.compiled, job.dispatcher)
    choices = (layout.checkpointing, layout.sequence_parallel, job.expert_imbalance)
    rates = (device.name, device.architecture, device.memory_gb_s, *device.sustained_tflops.items())
    key = (job.model, sizes, kernels, choices, rates)
    if key not in _BLOCK_SECONDS:
        once = forward(placed, layer)
        _BLOCK_SECONDS[key] = BlockSeconds(once, backward(placed, layer, once), recomputed(placed, layer, once))
    return _BLOCK_SECONDS[key]


_BLOCK_SECONDS: dict[tuple[object, ...], BlockSeconds] = {}


def forward(placed: PlacedJob, layer: int) -> Seconds:
    """Return the seconds of a block's forward pass over a micro-batch."""
    dtype = placed.precision.dtype
    products = block_products(placed, layer)
    casts = sum(cast_s(placed, product, backward=False) for product in products)
    return Seconds(
        sum(product_s(placed, product, dtype) for product in products),
        attention_s(placed, layer, backward=False),
        pass_s(placed, layer, backward=False) + casts,
    )


def backward(placed: PlacedJob, layer: int, once: Seconds) -> Seconds:
    """Return the seconds of a block's backward pass, without what it computes again; `once` are the forward pass's."""
    casts = sum(cast_s(placed, product, backward=True) for product in block_products(placed, layer))
    return Seconds(
        2 * once.products,
        attention_s(placed, layer, backward=True),
        pass_s(placed, layer, backward=True) + casts,
    )


# torchtitan saves every second product of a block, so that of q, k, v, output, gate, up and down it repeats k, output
# and up (torchtitan/parallelisms/parallelize_llama.py at 9dec370: mm_count).
def recomputed(placed: PlacedJob, layer: int, once: Seconds) -> Seconds:
    """Return the seconds of what a block's backward pass computes again; `once` are the forward pass's."""
    match placed.layout.checkpointing:
        case "full":
            return once
        case "per_op":
            products = {product.name: product for product in block_products(placed, layer)}
            share = _repeated_share(placed, products)
            casts = sum(cast_s(placed, product, backward=False) for product in products.values())
            return Seconds(once.products * share, 0.0, once.other - casts * (1 - share))
        case "selective":
            up = [product for product in block_products(placed, layer) if product.name == "up"]
            return Seconds(
                sum(product_s(placed, product, placed.precision.dtype) for product in up), 0.0, once.other / 2
            )
        case "core_attention":
            return Seconds(0.0, once.attention, 0.0)
        case "norm_act":
            return Seconds(0.0, 0.0, placed.pass_s(2 * _norm_and_activation_elements(placed, layer)))
    return Seconds()


def _norm_and_activation_elements(placed: PlacedJob, layer: int) -> float:
    """Return how many values of 2 bytes the norms and the activation of a forward pass read and write."""
    norms = 4 * placed.model.hidden_size / placed.residual_parts
    return placed.tokens * (norms + _activation_elements(placed, layer, backward=False))


def _repeated_share(placed: PlacedJob, products: dict[str, Product]) -> float:
    model = placed.model
    total = sum(product.flops for product in products.values())
    key = products["qkv"].flops * model.kv_heads / (model.heads + 2 * model.kv_heads)
    up = products["up"].flops / max(1, model.mlp_matrices - 1)
    return (key + products["output"].flops + up) / total


def head_s(placed: PlacedJob) -> float:
    """Return the seconds of the output layer and the loss of a micro-batch, forward and backward."""
    model, tp = placed.model, placed.layout.tp
    head = Product("head", placed.tokens, model.vocabulary / tp, model.hidden_size)
    logits = placed.tokens * model.vocabulary / tp
    return 3 * product_s(placed, head, placed.plain_dtype) + placed.pass_s(logits * placed.trainer.loss_bytes)
