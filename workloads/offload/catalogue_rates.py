"""Estimates of trials within memory budgets, based on the catalogue's rates for the GPU. Does not import torch."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from workloads.api.contract import Candidate, Estimate, Machine, Scalar
from workloads.api.recipes import RECIPES
from workloads.estimator.communication import bandwidth_gb_s
from workloads.estimator.operations import Product, attention_s, block_products, block_seconds, product_s
from workloads.estimator.placed_job import PlacedJob
from workloads.hardware.cluster import Cluster, Group
from workloads.layouts.layout import Job, Layout
from workloads.models.model import MODELS, Model
from workloads.offload import OffloadParameters, find_placement_problem, infeasible_reason
from workloads.offload.cost_model import DeviceRates, MemoryBudget, ModelSizes
from workloads.offload.plan import GIB, SAVED_ACTIVATIONS, recomputed_under
from workloads.offload.plan_search import explain_too_small, find_fastest_plans

CHUNK_TOKENS = 8192  # the smallest chunk on a GPU (`device_rates.TIMED_CHUNK_TOKENS`)
# GB/s per direction between host and GPU while both directions copy: 49 measured on an H200 with PCIe 5
# (benchmarks/results/offload_h200_rates.json), half of that with PCIe 4. GH200 and GB200 have faster links.
HOST_LINK_GB_S, OLDER_HOST_LINK_GB_S = 49.0, 24.0
OLDER = ("sm70", "sm75", "sm80", "sm86", "sm89", "gfx90")  # architectures of GPUs with PCIe 4 or older
# AdamW with int8 moments takes this many times as long as its memory traffic, because of rounding (experts_h100.md).
INT8_UPDATE = 3.7
VECTORS_OF_ADAMW = 7  # AdamW reads weight, gradient and two moments, and writes all but the gradient
STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256}  # bytes per number of one moment


def list_candidates(
    dimensions: Mapping[str, Sequence[Scalar]], constants: Mapping[str, Scalar], machine: Machine
) -> Iterator[Candidate]:
    """Yield every point with its estimate. Budgets for the same training are planned together, which is faster."""
    trainings: dict[OffloadParameters, list[tuple[dict[str, Scalar], MemoryBudget]]] = defaultdict(list)
    for values in product(*dimensions.values()):
        point = dict(zip(dimensions, values, strict=True))
        parameters = OffloadParameters(**{**constants, **point})  # type: ignore[arg-type]
        budget = MemoryBudget(parameters.device_gib, parameters.host_gib)
        trainings[replace(parameters, device_gib=0, host_gib=0)].append((point, budget))
    for training, points in trainings.items():
        estimates = _estimate_budgets(training, [budget for _, budget in points], machine)
        yield from (Candidate(point, estimate) for (point, _), estimate in zip(points, estimates, strict=True))


def _estimate_budgets(
    training: OffloadParameters, budgets: Sequence[MemoryBudget], machine: Machine
) -> Iterator[Estimate]:
    """Yield the speed, memory and duration of the fastest plan within each budget, excluding process startup."""
    length, sequences = training.sequence_length, training.sequences_per_step
    problem = find_placement_problem(training.distribution, machine.world_size, machine.ranks_per_node)
    if reason := infeasible_reason(training.dtype, length, machine.architecture, training.shape):
        problem = reason, "the GPU trains in this data type"
    if problem:
        yield from (Estimate(*problem) for _ in budgets)
        return
    rates = estimate_rates(training.shape, length, training.dtype, machine.cluster)
    if training.optimizer_states == "int8":
        rates = replace(rates, optimizer_s_per_byte=INT8_UPDATE * rates.optimizer_s_per_byte)
    model = model_sizes(training, machine.world_size)
    predictions = find_fastest_plans(model, length, sequences, budgets, rates)
    for budget, prediction in zip(budgets, predictions, strict=True):
        point = f"device_gib={budget.device_gib:g} host_gib={budget.host_gib:g}"
        if budget.device_gib > (memory_gib := machine.cluster.device.memory_gib):
            reason = f"device_gib={budget.device_gib:g}: the GPU has {memory_gib:.4g} GiB"
            yield Estimate(reason, "the budget is within the GPU's memory", description=point)
        elif prediction is None:
            reason = explain_too_small(model, length, sequences, budget, rates)
            yield Estimate(f"too small: {reason}", "a plan fits the budget", description=point)
        else:
            step_s, rounds = prediction.times.step_s, prediction.plan.accumulation_rounds
            warmup = training.warmup * min(1.0, (training.warmup_rounds or rounds) / rounds)
            metrics = {"tokens_per_s": length * sequences / step_s, "memory_gib": prediction.device_bytes / GIB}
            metrics["peak_host_gib"] = prediction.host_bytes * model.gpus / GIB
            metrics["trial_s"] = (warmup + training.steps) * step_s
            if prediction.model.distribution:
                point += f" {prediction.model.distribution}"
            yield Estimate(metrics=metrics, description=point)


def model_sizes(parameters: OffloadParameters, gpus: int = 1) -> ModelSizes:
    is_fp32, recipe = parameters.dtype == "fp32", RECIPES[parameters.dtype]
    has_masters = parameters.master_weights == "fp32" and not is_fp32
    states = parameters.optimizer_states or ("fp32" if is_fp32 or has_masters else "bf16")
    shape, multiple = MODELS[parameters.model], recipe.multiples[2]
    pads = shape.experts and recipe.is_scaled
    return ModelSizes(
        shape,
        4 if is_fp32 else 2,
        2 * STATE_BYTES[states] + 4 * has_masters,
        cast_bytes_per_parameter=2 if recipe.is_scaled else 0,  # casts by rows and by columns, one byte each
        token_multiple=multiple,  # weight gradients sum over tokens
        padded_tokens=-(-multiple * shape.experts // shape.experts_per_token) if pads else 0,
    ).distribute(parameters.distribution, gpus)


def estimate_rates(model: Model, sequence_length: int, precision: str, cluster: Cluster) -> DeviceRates:
    """Return the rates of one GPU of a cluster, derived from the catalogue, in the form that `device_rates` measures.
    The experts process a chunk of CHUNK_TOKENS, all on this GPU, so their imbalance does not change the work."""
    layout = Layout(micro_batch=max(1, CHUNK_TOKENS // sequence_length) if model.experts else 1)
    job = Job(model, layout, sequence_length, precision=precision, state="bf16", manual_backward=True)
    placed = PlacedJob(job, cluster)
    block, tokens = block_seconds(placed, 0), placed.tokens
    dtype = placed.precision.dtype
    by_name = {product.name: product_s(placed, product, dtype) for product in block_products(placed, 0)}
    operation_s = {
        "qkv": by_name["qkv"],
        "output": by_name["output"],
        "gate": by_name["up"] / 2,
        "up": by_name["up"] / 2,
        "attention": attention_s(placed, 0, backward=False),
    }
    recompute_s = {
        saved: sum(operation_s[name] for name, choices in recomputed_under(model).items() if saved in choices) / tokens
        for saved in SAVED_ACTIVATIONS
    }
    head = Product("head", tokens, model.vocabulary, model.hidden_size)
    architecture = cluster.device.architecture
    is_older = architecture.startswith(OLDER)
    host_s = 1e-9 / (OLDER_HOST_LINK_GB_S if is_older else HOST_LINK_GB_S)
    over_host = cluster.topology.wiring == "host"
    link_s = host_s if over_host else 1e-9 / bandwidth_gb_s(cluster, Group(cluster.gpus))
    # This fits the bf16 measurements of Llama 3 1B and 8B on an H200: 112,768 and 200,832 bytes per token.
    workspace = placed.element_bytes * (6 * model.intermediate_size + 3.5 * model.hidden_size)
    gradient_sum_s = repeated_s = cast_s = 0.0
    if model.experts:  # expert rows in and out, tensors inside experts, and a new gradient of the larger weights
        inside, copies = 6 * model.expert_intermediate_size, 2 * model.hidden_size
        workspace += placed.element_bytes * model.experts_per_token * (inside + copies)
        expert_weights = model.expert_weights(0)
        workspace += placed.element_bytes * expert_weights * 2 / 3 / CHUNK_TOKENS
        gradient_sum_s = placed.copy_s(3) * placed.element_bytes * expert_weights  # reads two, writes one
        if placed.precision.cast_bytes:  # reads weights twice (for the largest magnitude), writes rows and columns
            cast_s = placed.copy_s(2 * placed.element_bytes + 2) * expert_weights
        # The backward pass copies each token to its rows again.
        repeated_s = placed.pass_s(placed.element_bytes * model.hidden_size * (1 + model.experts_per_token))
    return DeviceRates(
        forward_s_per_token=block.forward.total / tokens,
        backward_s_per_token=block.backward.total / tokens + repeated_s,
        recompute_s_per_token=recompute_s,
        lm_head_s_per_token=3 * product_s(placed, head, placed.plain_dtype) / tokens,
        h2d_s_per_byte=host_s,
        d2h_s_per_byte=host_s,
        optimizer_s_per_byte=placed.copy_s(VECTORS_OF_ADAMW),
        workspace_bytes_per_token=workspace,
        min_chunk_tokens=CHUNK_TOKENS,
        gradient_sum_s=gradient_sum_s,
        weight_cast_s=cast_s,
        sum_s_per_byte=placed.copy_s(3),
        link_s_per_byte=link_s,
        links_are_the_hosts=over_host,
        peer_copy_s_per_byte=link_s if architecture.startswith("sm") and not over_host else 0.0,
    )
