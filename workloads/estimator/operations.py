"""Estimate a block's time on one GPU: GEMMs, attention, and operations limited by memory bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from workloads.estimator.placed_job import PlacedJob
from workloads.hardware.cluster import AttentionRates, Device
from workloads.hardware.precisions import sustained_flops
from workloads.layouts.layout import AttentionKernel
from workloads.layouts.trainers import is_own
from workloads.tables import read_csv

# A GEMM's time beyond its FLOPs at the sustained rate, profiled for 512^3 to 2048^3 on an H200 (timing_h200.md).
PRODUCT_OVERHEAD_S = 2.5e-6


@dataclass(frozen=True)
class Product:
    """A linear layer in a block: `count` GEMMs of `rows` x `k` times `k` x `n`."""

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
    model, tp = placed.model, placed.layout.tp
    products = []
    for matrix in (*model.mixer_matrices(layer), *model.shared_mlp_matrices(layer)):
        sizes = {"tokens": placed.tokens, "inputs": matrix.inputs, "outputs": matrix.outputs}
        sizes[matrix.divided] /= tp
        products.append(Product(matrix.name, sizes["tokens"], sizes["outputs"], sizes["inputs"], matrix.number))
    if model.has_experts(layer):  # each of a GPU's experts gets an equal share of tokens, times the imbalance
        local, width = model.experts / placed.layout.ep, model.expert_intermediate_size
        hidden, parts = model.expert_hidden_size or model.hidden_size, model.mlp_matrices - 1
        tokens = placed.tokens / tp * model.experts_per_token * placed.imbalance / local
        products += [
            Product("up", tokens, width, hidden, parts * local, grouped=True),
            Product("down", tokens, hidden, width, local, grouped=True),
        ]
    return products


# In fp8, a grouped GEMM also takes GROUPED_EXPOSED of the time of its reads and writes: over 48 grouped GEMMs of eight
# models, this lowers the error from 14 and 13% to 12 and 9% (root mean square, on an H100 and an H200, grouped_h100.md
# in benchmarks/results). Without this time, grouped GEMMs reach GROUPED_SHARE of the sustained rate of single GEMMs,
# both back to back at the power cap: 0.83 to 0.91 in bf16 and 0.83 to 0.94 in fp8, four each on an H200
# (grouped_h200.md). Other GPUs are not measured.
GROUPED_SHARE, GROUPED_EXPOSED = 0.89, 0.8
# Rows per tile. Kernels compute an expert's tokens tile by tile, so unequal loads leave half of the last tile empty.
GROUPED_ROWS = 128


def product_s(placed: PlacedJob, product: Product, dtype: str) -> float:
    """Estimate the time in seconds of a GEMM, or of one of the two GEMMs in its backward pass."""
    device = placed.cluster.device
    is_low = dtype in ("fp8", "fp4")
    is_measured = product.grouped and dtype in device.grouped_tflops
    rate = device.grouped_tflops[dtype] * 1e12 if is_measured else sustained_flops(device, dtype)
    rate *= placed.precision.rate_share if is_low else 1.0
    element_bytes = 1 if dtype == "fp8" else placed.element_bytes
    read = product.rows * product.k + product.k * product.n
    traffic = product.count * (read * element_bytes + placed.element_bytes * product.rows * product.n)
    traffic_s, flops = traffic / (device.memory_gb_s * 1e9), product.flops
    overhead = PRODUCT_OVERHEAD_S * (2 if product.grouped else product.count)
    if product.grouped and not is_measured:
        rate *= GROUPED_SHARE
        overhead += GROUPED_EXPOSED * traffic_s * is_low
    if product.grouped:
        tiles = product.rows / GROUPED_ROWS
        flops *= (math.ceil(tiles) if placed.job.expert_loads == "equal" else max(1.0, tiles + 0.5)) / tiles
    return max(flops / rate, traffic_s) + overhead


def products_of_s(placed: PlacedJob, layer: int, name: str = "") -> float:
    """Estimate the time in seconds of a block's GEMMs, or only of those named `name`."""
    products = (product for product in block_products(placed, layer) if name in ("", product.name))
    return sum(product_s(placed, product, placed.precision.dtype) for product in products)


def cast_s(placed: PlacedJob, product: Product, *, backward: bool) -> float:
    """Estimate how many seconds casting takes: a GEMM's weights and input, or its output's gradient if `backward`."""
    precision = placed.precision
    width = product.n * product.count if backward else product.k
    rows = product.rows * (product.count if product.grouped else 1)
    if product.grouped and placed.job.manual_backward and precision.cast_bytes:
        # Rows are written and copied in fp8, and weights are cast once for all chunks. The remaining pass transposes
        # rows inside experts (`workloads.llama.fp8_experts`).
        return placed.pass_s(2 * rows * (product.n if product.name == "up" else product.k)) if backward else 0.0
    if product.grouped and product.name == "up" and not backward:  # gate and up have one input
        rows /= placed.model.mlp_matrices - 1
    # Fused GEMMs quantize the activation, and its gradient, without writing them in bf16.
    is_fused = placed.job.fused_experts and product.grouped and (product.name == "up") == backward
    cast_bytes = precision.cast_bytes - (2 if is_fused else 0)
    activations = rows * (product.n if backward and product.grouped else width) * cast_bytes
    weights = product.n * product.k * product.count * precision.weight_bytes / 2 * placed.weight_casts
    return placed.pass_s(activations + weights, precision.instructions_gb_s)


ATTENTION_RATES = {
    (row["kernel"], row["architecture"]): AttentionRates(*(float(row[rate.name]) for rate in fields(AttentionRates)))
    for row in read_csv(__file__, "tables/attention_rates.csv")
}
# The backward pass of fused attention has five GEMMs; the forward pass has two.
ATTENTION_BACKWARD_PRODUCTS = 2.5
# Bytes per fp16 score of unfused attention. The forward pass computes the scores, a scaled and masked softmax, dropout
# with its mask, and the GEMM with the values. The backward pass computes the gradient of each.
SCORE_FORWARD_BYTES, SCORE_BACKWARD_BYTES = 13, 21


def attention_s(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    job, model = placed.job, placed.model
    if model.mixer(layer) != "attention":
        if model.mixer(layer) != "linear":
            return 0.0
        elements = LINEAR_PASSES * (model.linear_in + model.linear_out) + 2 * 2 * model.linear_state / LINEAR_CHUNK
        numel = placed.tokens * elements / placed.layout.tp
        return placed.pass_s(placed.element_bytes * numel) * (2 if backward else 1)
    if placed.attention_kernel == "unfused":
        scores = placed.tokens * job.sequence_length * model.heads / placed.layout.tp
        traffic = scores * (SCORE_BACKWARD_BYTES if backward else SCORE_FORWARD_BYTES)
        flops = 4 * scores * model.head_size * (2 if backward else 1)
        return flops / sustained_flops(placed.cluster.device, placed.plain_dtype) + placed.pass_s(traffic)
    length = job.document_tokens or job.sequence_length
    # Treated as a causal sequence with the same number of keys per token. With a window of 128 in 8,192 tokens,
    # FlashAttention 2 has 0.24 of its causal rate on an H200 (64 heads of 64 features, forward; backward 0.26).
    rates = attention_rates(placed.cluster.device, placed.attention_kernel)
    is_fp8 = placed.attention_kernel == "cudnn_fp8"  # what these two lines count is in the source of its rates
    keys = length if backward and is_fp8 else 2 * model.attended_tokens(layer, length)
    features = min(model.head_size + model.value_features, 256 if is_fp8 else math.inf)
    flops = placed.tokens * keys * model.heads * features / placed.layout.tp
    flops += placed.tokens * length * model.index_features(layer)
    share = rates.backward_share if backward else rates.forward_share
    # A query-key pair takes 1 + half_tokens / length times as long as at the highest rate. A call without the causal
    # mask counts as a call with twice its keys. Summed over the slowest context-parallel rank's calls, the second term
    # is 2 half_tokens / length for gathered keys (each of two sequence parts has a causal call and a call for all
    # earlier tokens), and cp half_tokens / length for a ring of cp calls.
    layout = placed.layout
    half_tokens = rates.half_tokens * (layout.cp if layout.cp_method == "ring" else min(layout.cp, 2))
    rate = sustained_flops(placed.cluster.device, placed.plain_dtype) * share * keys / (keys + half_tokens)
    rate *= min(1.0, 0.5 + model.head_size / 256)
    return flops * (ATTENTION_BACKWARD_PRODUCTS if backward else 1) / rate


# Assumed for linear mixers (Mamba-2, gated delta rule), because we know of no microbenchmark of their kernels.
# Convolution, gate, norm and chunks read and write LINEAR_PASSES values per value that the projections return or read.
# The state is written and read in fp32 after each chunk of LINEAR_CHUNK tokens.
LINEAR_PASSES, LINEAR_CHUNK = 6, 128


def attention_rates(device: Device, kernel: AttentionKernel) -> AttentionRates:
    """Return a fused kernel's rates: measured on the device, else from the table, else those of an H100."""
    if kernel in device.attention:
        return device.attention[kernel]
    known = (ATTENTION_RATES.get((name, device.architecture)) for name in (kernel, "flash2", "cudnn"))
    return next((rates for rates in known if rates), ATTENTION_RATES["flash2", "sm90"])


# Factor on the bytes of norms, rotary embeddings and activations in separate PyTorch kernels, some of which cast to
# fp32. Chosen after seeing torchtitan's eager rows (benchmarks/results/planner.md).
EAGER_FACTOR = 3.5


@dataclass(frozen=True)
class Seconds:
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


def _activation_elements(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    model = placed.model
    width: float = model.intermediate_size if model.has_mlp(layer) else 0
    if model.has_experts(layer):
        rows = model.experts_per_token * placed.buffered_rows
        width = rows * model.expert_intermediate_size + model.shared_expert_intermediate_size
    passes = (6, 3) if model.mlp_matrices == 3 else (3, 2)  # backward, forward
    if placed.job.fused_experts and model.has_experts(layer):  # the gradient still reads gate and up, 2 of 6 passes
        width -= rows * model.expert_intermediate_size * (4 / 6 if backward else 1)
    # Compiled code that writes the gradients of gate and up into one tensor computes both for every element: 688 us
    # instead of 334 us for 8,192 tokens of an 8B model (benchmarks/offload.md, entry 11).
    repeats = 2 if backward and is_own(placed.job) and not placed.job.manual_backward else 1
    return width / placed.layout.tp * passes[0 if backward else 1] * repeats


def _attention_over_ranks_elements(placed: PlacedJob, *, backward: bool) -> float:
    """Return how many values per token context-parallel attention reads and writes around its kernels.
    With gathered keys and values, `workloads.parallel.context` orders the keys and values of all ranks, merges two
    results for each of two query parts, and sums gradients in fp32. torchtitan uses PyTorch's code (2.11,
    _context_parallel/_attention.py), which merges results and passes gradients on in fp32."""
    model, cp, is_torch = placed.model, placed.layout.cp, placed.job.trainer == "torchtitan"
    if cp == 1 or placed.layout.cp_method != "allgather" or not (is_torch or is_own(placed.job)):
        return 0.0
    if is_torch:
        queries, keys_values = (5 * cp + 5, 12.5 * cp + 1.5) if backward else (19 * cp - 13, 2 * cp)
    else:
        queries, keys_values = (13, 12 * cp + 7) if backward else (7, 2 + 2 * cp)
    return (queries * model.heads * model.head_size + keys_values * model.kv_features) / placed.layout.tp


# In most trainers, the host must read the token count of each expert in a dropless mixture. ROUTING_S is a pass's
# wait for launches after this read, plus small router kernels. LAUNCHES_S is the host's time to launch a block, and a
# block takes at least this long. A graph of the step does not wait: Qwen3 235B takes 32.2 s with a graph and 44.4 s
# without on 128 GB200s, or 5.4 and 7.4 ms per block and micro-batch, the head included (Megatron-LM, PR 5728).
ROUTING_S, LAUNCHES_S = 0.6e-3, 7.1e-3
# The time between kernels that a host launches one by one, in PyTorch 2.11 on a host with two H200s (13.7 to 15.4 µs,
# `calibrate`). Waits for launches are proportional to it.
LAUNCH_US = 15.0
# Megatron adds expert output biases, times routing weights, in separate kernels and joins the results (`_apply_bias` in
# core/transformer/moe/experts.py at d98e8a64). The values are reads and writes per output value, forward and backward.
EXPERT_BIAS_PASSES = (6, 8)


# Passes over residual streams around attention or the MLP, forward and backward, at the rate of `pass_s`: fused kernels
# take 1.5 and 4.9 ms on a GB200 for 32,768 tokens of 4 x 7,168 values, 0.47 ms each (Megatron-LM, PR 3828). Backward,
# two more kernels add up three gradients.
STREAM_PASSES = (3.3, 14)


def pass_s(placed: PlacedJob, layer: int, *, backward: bool) -> float:
    """Estimate the time, in seconds, of norms, rotary embeddings, activations, residual sums and sorting by expert.

    Sorting reads each token once and writes it once per expert, and the way back moves the same number of bytes. Copies
    are sorted by rank before an all-to-all and by expert after it, in both directions. DeepEP sends a token to a rank
    once for all of its experts on that rank. An all-gather sends every token to every rank.
    """
    model, tp, ranks = placed.model, placed.layout.tp, placed.layout.ep
    passes = (8 if backward else 5) + STREAM_PASSES[backward] * model.streams
    residual = passes * model.norms * model.hidden_size / placed.residual_parts
    activation = _activation_elements(placed, layer, backward=backward)
    queries_keys = (model.heads + model.kv_heads) * model.head_size / tp * (model.mixer(layer) == "attention")
    rotary = queries_keys * (2 * (model.positions == "rope") + (3 if backward else 2) * (model.qk_norm != ""))
    fused = placed.trainer.fused or placed.job.compiled
    elements = placed.tokens * (residual + activation + rotary) * (1 if fused else EAGER_FACTOR)
    elements += placed.tokens * _attention_over_ranks_elements(placed, backward=backward)
    seconds = placed.pass_s(placed.element_bytes * elements)
    if not model.has_experts(layer):
        return seconds
    count = model.experts_per_token
    received = count * (placed.buffered_rows + placed.imbalance) / 2  # a buffer is written, and its received rows read
    copies: float = 2 + 2 * count + (0 if ranks == 1 else 4) * received
    if ranks > 1 and placed.job.dispatcher == "deepep":
        copies = 2 * ranks * (1 - (1 - 1 / ranks) ** count) + 2 * received
    elif ranks > 1 and placed.job.dispatcher == "allgather":
        copies = 2 * ranks + 2 * received
    if model.gpt_oss and placed.trainer.core == "megatron" and not placed.job.fused_experts:
        copies += EXPERT_BIAS_PASSES[backward] * received
    sorting_s = placed.pass_s(placed.tokens / tp * copies * (model.expert_hidden_size or model.hidden_size) * 2)
    reads_counts = waits_for_host(placed, layer) and not placed.job.expert_capacity
    return seconds + sorting_s + (ROUTING_S * launch_ratio(placed.cluster.device) if reads_counts else 0.0)


def launch_ratio(device: Device) -> float:
    return (device.launch_us or LAUNCH_US) / LAUNCH_US


def waits_for_host(placed: PlacedJob, layer: int) -> bool:
    """Return whether a block's experts wait for the host. This project's trainer keeps token counts on the device."""
    return placed.model.has_experts(layer) and not placed.layout.cuda_graph and not is_own(placed.job)


@dataclass(frozen=True)
class BlockSeconds:
    """A block's time for one micro-batch. `recomputed` is the time of recomputation in the backward pass."""

    forward: Seconds
    backward: Seconds
    recomputed: Seconds


_BLOCK_SECONDS: dict[tuple[object, ...], BlockSeconds] = {}


def block_seconds(placed: PlacedJob, layer: int) -> BlockSeconds:
    """Estimate a block's time. Results are cached, because a search needs the same operations in many layouts."""
    job, layout, device = placed.job, placed.layout, placed.cluster.device
    if share := placed.plain_share:  # the mean over blocks
        jobs = [replace(job, precision=name, bf16_blocks=0) for name in (job.precision, placed.plain_dtype)]
        low, plain = (vars(block_seconds(PlacedJob(some, placed.cluster), layer)) for some in jobs)
        return BlockSeconds(**{name: low[name] * (1 - share) + plain[name] * share for name in low})
    sizes = (layer, job.sequence_length, job.document_tokens, layout.micro_batch, layout.tp, layout.cp, layout.ep)
    kernels = (job.trainer, job.precision, placed.attention_kernel, job.compiled, job.dispatcher, job.manual_backward)
    choices = (layout.checkpointing, layout.sequence_parallel, layout.cp_method, layout.cuda_graph)
    measured = (device.copy_gb_s, device.launch_us, *device.sustained_tflops.items(), *device.grouped_tflops.items())
    rates = (device.name, device.architecture, device.memory_gb_s, *measured)
    loads = (job.expert_loads, placed.imbalance, placed.buffered_rows, job.expert_capacity, job.fused_experts)
    model = (job.model, job.model.qk_norm, placed.weight_casts, *loads)
    key = (*model, sizes, kernels, choices, rates, *device.attention.items())
    if key not in _BLOCK_SECONDS:
        products_s = products_of_s(placed, layer)
        forward = _seconds(placed, layer, products_s, backward=False)
        backward = _seconds(placed, layer, 2 * products_s, backward=True)
        _BLOCK_SECONDS[key] = BlockSeconds(forward, backward, recomputed(placed, layer, forward))
    return _BLOCK_SECONDS[key]


def _seconds(placed: PlacedJob, layer: int, products_s: float, *, backward: bool) -> Seconds:
    casts = sum(cast_s(placed, product, backward=backward) for product in block_products(placed, layer))
    other = pass_s(placed, layer, backward=backward) + casts
    return Seconds(products_s, attention_s(placed, layer, backward=backward), other)


def _omits_last_product(placed: PlacedJob) -> bool:
    """Return whether full recomputation leaves out a block's last GEMM: by hand, or compiled with the block, which this
    project's trainer does not do with tensor parallelism. Other trainers' blocks were not counted."""
    job = placed.job
    if is_own(job):
        return job.manual_backward or (job.compiled and placed.layout.tp == 1)
    return job.trainer == "torchtitan" and job.compiled


# torchtitan saves every second GEMM of a block. Among q, k, v, output, gate, up and down, torchtitan recomputes k,
# output and up (torchtitan/parallelisms/parallelize_llama.py at 9dec370: mm_count).
def recomputed(placed: PlacedJob, layer: int, once: Seconds) -> Seconds:
    """Estimate the time of recomputation in a block's backward pass. `once` is the forward pass's time."""
    match placed.layout.checkpointing:
        case "full":  # the backward pass does not read the output of the last GEMM
            last_s = products_of_s(placed, layer, "down") if _omits_last_product(placed) else 0.0
            return Seconds(once.products - last_s, once.attention, once.other)
        case "per_op":
            products = {product.name: product for product in block_products(placed, layer)}
            model, flops = placed.model, {name: product.flops for name, product in products.items()}
            key = flops.get("qkv", 0) * model.kv_heads / (model.heads + 2 * model.kv_heads)
            up = flops.get("up", 0) / max(1, model.mlp_matrices - 1)
            total = sum(product.flops for product in products.values())
            share = (key + flops.get("output", 0) + up) / total if placed.saves_products else 1.0
            casts = sum(cast_s(placed, product, backward=False) for product in products.values())
            return Seconds(once.products * share, 0.0, once.other - casts * (1 - share))
        case "selective_up" | "selective" as kind:
            share = 0.5 if kind == "selective_up" else 1.0
            return Seconds(share * products_of_s(placed, layer, "up"), 0.0, once.other / 2)
        case "core_attention":
            return Seconds(0.0, once.attention, 0.0)
        case "norm_act":
            norms = 4 * placed.model.hidden_size / placed.residual_parts
            elements = placed.tokens * (norms + _activation_elements(placed, layer, backward=False))
            return Seconds(0.0, 0.0, placed.pass_s(2 * elements))
    return Seconds()


# Bytes per logit in this project's uncompiled loss over a divided vocabulary: cast to fp32 (6), logsumexp (4),
# difference (8), exponential (8), division (8) and cast to bf16 (6).
EAGER_LOSS_BYTES = 40


def head_s(placed: PlacedJob) -> float:
    """Estimate the time in seconds of the output layer and loss for a micro-batch, forward and backward."""
    model, tp = placed.model, placed.layout.tp
    head = Product("head", placed.tokens, model.vocabulary / tp, model.hidden_size)
    logits = placed.tokens * model.vocabulary / tp
    is_eager = is_own(placed.job) and tp > 1
    loss_bytes = EAGER_LOSS_BYTES if is_eager else placed.trainer.loss_bytes
    dtype = placed.precision.dtype if placed.job.low_precision_head else placed.plain_dtype
    once_s = 3 * product_s(placed, head, dtype) + placed.pass_s(logits * loss_bytes)
    if dtype != placed.plain_dtype:
        once_s += cast_s(placed, head, backward=False) + cast_s(placed, head, backward=True)
    if not model.prediction_layers:
        return once_s
    joined = Product("joined", placed.tokens / tp, model.hidden_size, 2 * model.hidden_size)  # with the next embedding
    return once_s + model.prediction_layers * (once_s + 3 * product_s(placed, joined, placed.plain_dtype))
