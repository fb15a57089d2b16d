"""The planner: its plan fits the budgets, is the fastest that it predicts, and never slower with more memory."""

import gzip
import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import pynvml
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import CommandResult, Workspace, examples
from tests.support import replay
from workloads.api.contract import Infeasible, Machine, OutOfMemory, Rank, Scalar
from workloads.api.trial import run_trial
from workloads.llama.attention_kernels import CPU_KERNEL
from workloads.llama.fp8_block import build_block_math
from workloads.models.model import MODELS
from workloads.offload import Offload, OffloadParameters, device_rates, run
from workloads.offload.cost_model import DeviceRates, MemoryBudget, ModelSizes, Placement
from workloads.offload.device_rates import measure_device_rates
from workloads.offload.gang import Gang
from workloads.offload.optimizer import Precision
from workloads.offload.plan import GIB, ActivationPlan, Distribution, LayerPlan
from workloads.offload.plan_search import Prediction, find_fastest_plan, find_fastest_plans

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama3_8b"], layers=8)
# About those of one H200: 620 TFLOP/s, copies of 50.8 GB/s in each direction at once.
H200 = DeviceRates(
    forward_s_per_token=0.92e-6,
    backward_s_per_token=1.9e-6,
    recompute_s_per_token={"full": 0.0, "gate": 0.18e-6, "projections": 0.36e-6, "attention": 0.5e-6, "input": 0.72e-6},
    lm_head_s_per_token=5.1e-6,
    h2d_s_per_byte=1 / 50.8e9,
    d2h_s_per_byte=1 / 50.8e9,
    optimizer_s_per_byte=4e-12,
    workspace_bytes_per_token=180e3,
    min_chunk_tokens=8192,
)
SLOW_LINK = replace(H200, h2d_s_per_byte=10 * H200.h2d_s_per_byte, d2h_s_per_byte=10 * H200.d2h_s_per_byte)
MODEL = ModelSizes(SHAPE, element_bytes=2, state_bytes_per_parameter=4)
PLACEMENT = Placement(
    MODEL,
    SHAPE.layers,
    SHAPE.layers,
    sequence_length=8192,
    sequences_per_chunk=1,
    chunks_per_round=2,
    accumulation_rounds=4,
)


def find_plan(device_gib: float, host_gib: float, sequences: int = 8, rates: DeviceRates = H200) -> Prediction:
    return find_fastest_plan(MODEL, 8192, sequences, MemoryBudget(device_gib, host_gib), rates)


@examples(5)  # about 1 s each
@given(st.floats(14, 60), st.floats(0, 40), st.floats(0, 20), st.floats(0, 20))
def test_more_memory_is_never_slower_and_every_plan_fits(
    device_gib: float, host_gib: float, more_device_gib: float, more_host_gib: float
) -> None:
    try:
        small = find_plan(device_gib, host_gib)
    except Infeasible:
        assume(False)
    large = find_plan(device_gib + more_device_gib, host_gib + more_host_gib)
    assert large.times.step_s <= small.times.step_s * (1 + 1e-9)
    budgets = (device_gib, host_gib), (device_gib + more_device_gib, host_gib + more_host_gib)
    for prediction, (device_budget_gib, host_budget_gib) in zip((small, large), budgets, strict=True):
        assert prediction.device_bytes <= device_budget_gib * GIB and prediction.host_bytes <= host_budget_gib * GIB
        assert prediction.plan.tokens_per_step == 8 * 8192


def test_plans_for_many_budgets_are_those_for_each() -> None:
    budgets = [MemoryBudget(2, 1), MemoryBudget(16, 30), MemoryBudget(30, 8), MemoryBudget(200, 0)]
    plans = find_fastest_plans(MODEL, 8192, 8, budgets, H200)
    assert plans[0] is None
    for budget, plan in list(zip(budgets, plans, strict=True))[1:]:
        assert plan == find_plan(budget.device_gib, budget.host_gib)


@pytest.mark.parametrize(
    ("host_gib", "device_gib", "sequence_length", "sequences"),
    [(70, 40, 8192, 16), (60, 24, 8192, 1), (53, 92, 8192, 1), (90, 78, 65536, 2)],
)
def test_the_simulated_step_of_the_engine_takes_no_longer_than_predicted(
    host_gib: float, device_gib: float, sequence_length: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 3 8B on one H200, at budgets where copies used to delay each other, or (53 and 92 GiB) where half of the
    optimizer states used to be on the host and the prediction was too fast."""
    model = ModelSizes(MODELS["llama3_8b"], element_bytes=2, state_bytes_per_parameter=4)
    budget = MemoryBudget(device_gib, host_gib)
    prediction = find_fastest_plan(model, sequence_length, sequences, budget, H200)
    one_step_s, two_steps_s = (
        replay.simulate_steps_s(model.shape, prediction.plan, H200, monkeypatch, steps) for steps in (1, 2)
    )
    assert two_steps_s - one_step_s <= 1.015 * prediction.times.step_s


def test_keys_and_values_that_leave_do_not_delay_other_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are small. Where they counted among the chunks in flight, the step took 3% longer than with them kept."""
    rates = replace(H200, forward_s_per_token=0.83e-6, backward_s_per_token=1.7e-6)
    plan = find_fastest_plan(MODEL, 32768, 4, MemoryBudget(30, 40), rates).plan
    times_s = [
        replay.simulate_steps_s(SHAPE, replace(plan, keys_values_on=location), rates, monkeypatch, steps=1)
        for location in ("device", "host")
    ]
    assert times_s[1] <= 1.005 * times_s[0]


def test_a_long_sequence_is_divided_no_more_than_its_memory_needs() -> None:
    """Each further segment takes as long for each token."""
    rates = replace(H200, split_forward_s_per_token=6e-9, split_backward_s_per_token=14e-9)
    model = replace(MODEL, shape=MODELS["llama3_8b"])
    plans = {
        device_gib: find_fastest_plan(model, 65536, 2, MemoryBudget(device_gib, 112), rates) for device_gib in (20, 78)
    }
    assert plans[20].plan.segments_per_sequence > plans[78].plan.segments_per_sequence == 2
    measured_at, segments = 65536 / H200.min_chunk_tokens, plans[78].plan.segments_per_sequence
    faster_s = 2 * 65536 * model.shape.layers * (measured_at - segments) * 20e-9
    free = find_fastest_plan(model, 65536, 2, MemoryBudget(78, 112), H200)
    assert free.times.step_s - faster_s <= plans[78].times.step_s < free.times.step_s


def test_casting_weights_for_products_takes_memory_and_time() -> None:
    """A plan with everything on the device casts each layer twice a round and adds each chunk's gradients."""
    rates = replace(H200, weight_cast_s=0.001, gradient_sum_s=0.01)
    model = replace(MODEL, cast_bytes_per_parameter=2)
    budget = MemoryBudget(200, 0)
    in_bf16 = find_fastest_plan(MODEL, 8192, 8, budget, H200)
    in_fp8 = find_fastest_plan(model, 8192, 8, budget, rates)
    plan, layers = in_fp8.plan, SHAPE.layers
    additional_s = layers * plan.accumulation_rounds * (2 * 0.001 + plan.chunks_per_round * 0.01)
    assert in_fp8.times.step_s == pytest.approx(in_bf16.times.step_s + additional_s)
    # Fewer and larger chunks, since each adds its gradients.
    assert plan.chunk_tokens > in_bf16.plan.chunk_tokens
    same_plan = PLACEMENT.activation_memory(budget, H200)
    less_memory = replace(PLACEMENT, model=model).activation_memory(budget, H200)
    assert same_plan.missing_gib == less_memory.missing_gib == 0
    assert same_plan.device_bytes - less_memory.device_bytes == 2 * SHAPE.block_parameters(0)


def test_chunks_have_a_multiple_of_the_tokens_that_products_need() -> None:
    """65,568 tokens in eight segments are 8,196 each, which is no multiple of 16."""
    budget, rates = MemoryBudget(24, 60), replace(H200, workspace_bytes_per_token=400e3)
    free = find_fastest_plan(MODEL, 65568, 1, budget, rates).plan
    multiple = find_fastest_plan(replace(MODEL, token_multiple=16), 65568, 1, budget, rates).plan
    assert free.chunk_tokens % 16 != 0 and multiple.chunk_tokens % 16 == 0


FP8 = Precision(torch.bfloat16, recipe="fp8_tensorwise")


@pytest.mark.parametrize(("precision", "costs"), [(Precision(torch.float32), False), (FP8, True)])
def test_the_casts_of_a_recipe_are_measured(precision: Precision, costs: bool) -> None:
    rates = measure_device_rates("llama_tiny", 32, CPU, precision)
    assert (rates.weight_cast_s > 0) == (rates.gradient_sum_s > 0) == costs


def test_slow_sums_of_gradients_do_not_hide_what_recomputation_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fp8 in experts on an H100: without this, plans recomputed attention although the host had memory for it."""
    monkeypatch.setattr(device_rates, "_measure_medians_s", lambda steps, _: [float(n) for n, _ in enumerate(steps, 1)])
    monkeypatch.setattr(device_rates, "_measure_weight_passes", lambda *_: (0.0, 100.0))
    recompute = measure_device_rates.__wrapped__("llama_tiny", 32, CPU, FP8).recompute_s_per_token
    assert sorted(recompute.values()) == pytest.approx([n * recompute["gate"] for n in range(len(recompute))])
    assert recompute["gate"] > recompute["full"] == 0


@pytest.mark.parametrize("enough_memory", [True, False])
def test_the_time_of_a_further_segment_is_what_shorter_ones_take_longer(
    enough_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All passes run once, over segments of 128 tokens. Their times are given, since a CPU's are too uneven."""
    build_passes, lengths = device_rates._build_passes, []

    def run_once(steps: list[Callable[[], object]], _: torch.device) -> list[float]:
        for step in steps:
            step()
        return next(times_s)

    def build_if_enough(state: Any, tokens: int, *division: Any) -> Any:
        if tokens > (64 if enough_memory else 32):
            raise torch.OutOfMemoryError("CUDA out of memory")
        lengths.append((tokens, division[1]))
        return build_passes(state, tokens, *division)

    longer, shorter = (64, 32) if enough_memory else (32, 16)
    times_s = itertools.cycle([[0.1 * longer, 0.2 * longer], [0.14 * shorter, 0.26 * shorter]])
    monkeypatch.setattr(device_rates, "_measure_medians_s", run_once)
    monkeypatch.setattr(device_rates, "_build_passes", build_if_enough)
    block_math = build_block_math(MODELS["llama_tiny"], CPU_KERNEL, "", compiled=False)
    with torch.no_grad():
        state = device_rates._BlockState.draw(block_math, CPU, torch.float32)
        per_token_s = device_rates._measure_split(state, 128, 32)
    assert lengths == [(longer, (128 - longer) // 2), (shorter, (128 - shorter) // 2)]
    further = 2 if enough_memory else 4
    assert per_token_s == pytest.approx((0.04 / further, 0.06 / further))


def test_with_memory_for_everything_nothing_is_copied() -> None:
    prediction = find_plan(200, 0)
    assert prediction.times.copied_bytes == 0 and prediction.times.copy_wait_s == 0 and prediction.host_bytes == 0
    assert {replace(layer, activations=()) for layer in prediction.plan.layers} == {LayerPlan(activations=())}
    assert set(prediction.plan.list_activations()) == {ActivationPlan("full", "device")}


def test_with_little_device_memory_optimizer_states_are_on_the_host() -> None:
    prediction = find_plan(15, 60)
    assert prediction.times.copied_bytes > 0
    assert {layer.optimizer_states for layer in prediction.plan.layers} == {"host"}


def test_budgets_that_no_plan_fits_are_infeasible_with_the_missing_gib() -> None:
    message = r"device_gib=2 and host_gib=1 are too small: at least [\d.]+ GiB more needed \(device [\d.]+, host "
    with pytest.raises(Infeasible, match=message):
        find_plan(2, 1)


@pytest.mark.parametrize("sequences", [8, 32])
def test_slower_copies_make_a_slower_plan_that_copies_less(sequences: int) -> None:
    fast, slow = (find_plan(16, 200, sequences, rates) for rates in (H200, SLOW_LINK))
    assert slow.times.copied_bytes < fast.times.copied_bytes
    assert slow.times.step_s > fast.times.step_s


NVLINK = replace(H200, link_s_per_byte=1 / 350e9)
THROUGH_HOST = replace(H200, link_s_per_byte=H200.h2d_s_per_byte, links_are_the_hosts=True)


@pytest.mark.parametrize(
    ("rates", "gpus", "device_gib", "fastest"),
    [(NVLINK, 4, 16, "sharded"), (NVLINK, 8, 20, "sharded"), (THROUGH_HOST, 2, 30, "replicas")],
)
def test_the_fastest_distribution_depends_on_gpus_links_and_memory(
    rates: DeviceRates, gpus: int, device_gib: float, fastest: str
) -> None:
    budget, step_s = [MemoryBudget(device_gib, 12.0 * gpus)], dict[str, float]()
    for distribution in get_args(Distribution):
        model = MODEL.distribute(distribution, gpus)
        (found,) = find_fastest_plans(model, 8192, 32, budget, rates)
        assert found is not None
        step_s[distribution] = found.times.step_s
    assert min(step_s, key=step_s.__getitem__) == fastest


@pytest.mark.parametrize(("peer_copy_s_per_byte", "sums"), [(0.0, 3 / 2 / 3), (1 / 350e9, 4 / 2 / 3)])
def test_shares_of_gradients_are_added_in_each_round(peer_copy_s_per_byte: float, sums: float) -> None:
    sum_s_per_byte, budget = 7e-13, [MemoryBudget(130, 24)]  # where nothing waits for copies
    rates = replace(NVLINK, peer_copy_s_per_byte=peer_copy_s_per_byte)
    without, found = (
        find_fastest_plans(MODEL.distribute("sharded", 2), 8192, 8, budget, each)[0]
        for each in (rates, replace(rates, sum_s_per_byte=sum_s_per_byte))
    )
    assert without is not None and found is not None and found.plan == without.plan
    layers = found.plan.accumulation_rounds * MODEL.shape.layers
    expected_s = layers * sums * MODEL.layer_weight_bytes * sum_s_per_byte
    assert found.times.step_s - without.times.step_s == pytest.approx(expected_s)


@pytest.mark.parametrize("distribution", get_args(Distribution))
def test_gangs_take_as_long_as_predicted(distribution: Distribution, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = find_fastest_plans(MODEL.distribute(distribution, 2), 8192, 8, [MemoryBudget(16, 24)], NVLINK)
    assert found is not None
    gang = Gang(distribution, ranks=2)
    one_step_s, two_steps_s = (
        replay.simulate_steps_s(SHAPE, found.plan, NVLINK, monkeypatch, steps, gang) for steps in (1, 2)
    )
    assert 0.96 < (two_steps_s - one_step_s) / found.times.step_s <= 1.015


def test_gpus_share_the_hosts_memory_and_shards_need_the_least_of_it() -> None:
    """Two replicas of 8 layers keep their whole state twice."""
    budget, sizes = MemoryBudget(14, 24), (MODEL.distribute("replicas", 2), MODEL.distribute("sharded", 2))
    replicas, sharded = (find_fastest_plans(model, 8192, 32, [budget], NVLINK)[0] for model in sizes)
    assert replicas is None and sharded is not None and sharded.host_bytes <= 12 * GIB
    with pytest.raises(Infeasible, match=r"at least [\d.]+ GiB more needed on each of 2 GPUs \(device "):
        find_fastest_plan(sizes[0], 8192, 32, budget, NVLINK)
    with pytest.raises(Infeasible, match="31 sequences cannot be divided among 2 GPUs"):
        find_fastest_plan(sizes[1], 8192, 31, budget, NVLINK)
    with pytest.raises(Infeasible, match="layers cannot be divided among 16 GPUs"):
        find_fastest_plan(MODEL.distribute("ring", 16), 8192, 32, budget, NVLINK)


def test_a_ring_of_few_chunks_waits_for_its_first_and_last_gpu() -> None:
    """With 32 chunks 4 GPUs wait for 3 of them in each round; with 4 chunks for as many as they compute, nearly."""
    many, few = (
        find_fastest_plans(MODEL.distribute("ring", 4), 8192, chunks, [MemoryBudget(60, 200)], NVLINK)[0]
        for chunks in (32, 4)
    )
    assert many is not None and few is not None
    assert 1.3 < (few.times.step_s / 4) / (many.times.step_s / 32) < 1.75


def test_slower_copies_make_rounds_of_more_tokens() -> None:
    """Layers are copied in every round, so with a link ten times slower a step has fewer rounds of more tokens."""
    fast, slow = (find_plan(16, 200, 32, rates).plan for rates in (H200, SLOW_LINK))
    assert slow.accumulation_rounds < fast.accumulation_rounds
    assert slow.chunks_per_round * slow.chunk_tokens > fast.chunks_per_round * fast.chunk_tokens
    assert slow.tokens_per_step == fast.tokens_per_step == 32 * 8192


TINY = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "steps": 3}
ON_DEVICE = {"device_gib": 1.0, "host_gib": 0.0}


def test_a_trial_keeps_within_its_host_budget_and_its_loss_does_not_depend_on_the_plan() -> None:
    """On a CPU two plans compute the same numbers up to rounding, from tensors that are stored elsewhere."""
    on_device = run_trial("offload", {**TINY, **ON_DEVICE}, Rank())
    assert on_device.metrics["copied_gib_per_step"] == 0 and on_device.metrics["peak_host_gib"] == 0
    device_gib = find_min_device_gib(0.05)
    offloaded = run_trial("offload", {**TINY, "device_gib": device_gib, "host_gib": 0.05}, Rank())
    assert 0 < offloaded.metrics["peak_host_gib"] <= 0.05 and offloaded.metrics["copied_gib_per_step"] > 0
    assert offloaded.metrics["loss"] == pytest.approx(on_device.metrics["loss"], abs=1e-5)
    for share in ("copy_wait_share", "optimizer_share", "predicted_copy_wait_share"):
        assert 0 <= offloaded.metrics[share] <= 1
    assert offloaded.hardware_flops_per_step >= on_device.hardware_flops_per_step > on_device.flops_per_step


def test_a_warm_up_step_of_one_round_trains_on_that_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, step, find = [], run.Engine.step, run.find_fastest_plan

    def find_two_rounds(*arguments: Any) -> Prediction:
        prediction = find(*arguments)
        two = {"sequences_per_chunk": 1, "segments_per_sequence": 1, "chunks_per_round": 2, "accumulation_rounds": 2}
        return replace(prediction, plan=replace(prediction.plan, **two))

    def note_rounds(engine: run.Engine, batch: torch.Tensor) -> torch.Tensor:
        rounds.append(len(batch))
        return step(engine, batch)

    monkeypatch.setattr(run, "find_fastest_plan", find_two_rounds)
    monkeypatch.setattr(run.Engine, "step", note_rounds)
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "warmup_rounds": 1}, Rank())
    assert rounds == [1, 2, 2, 2] and measurement.executed["warmup_rounds"] == 1
    assert len(measurement.step_times_s) == 3 and measurement.tokens_per_step == 4 * 32
    run_trial("offload", {**TINY, **ON_DEVICE, "warmup": 0, "warmup_rounds": 1}, Rank())  # is as requested


def test_the_processes_of_a_gang_keep_host_memory_beside_what_they_pin() -> None:
    """On a host with 247 GiB available two processes trained with 223 GiB pinned, and one was killed with 236."""
    run.check_host_memory(int(111.6 * GIB), 2, "cuda", 247 * GIB)
    with pytest.raises(Infeasible, match=r"pins 235\.7 GiB of host memory for 2 GPUs.* set host_gib to at most 234"):
        run.check_host_memory(int(117.86 * GIB), 2, "cuda", 248 * GIB)


def test_the_start_of_a_trial_is_divided_into_its_parts() -> None:
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "steps": 1}, Rank())
    parts = [part.rsplit(" ", 2)[:2] for part in str(measurement.machine_info["startup"]).split(", ")]
    assert [name for name, _ in parts] == ["rates", "plan", "host memory", "weights", "first step"]
    assert sum(float(seconds) for _, seconds in parts) == pytest.approx(measurement.metrics["startup_s"], abs=0.26)


def test_fp8_is_infeasible_where_no_product_or_kernel_takes_it() -> None:
    parameters = OffloadParameters(device_gib=1.0, host_gib=0.0, dtype="fp8_tensorwise", sequence_length=40)
    with pytest.raises(Infeasible, match=r"dtype=fp8_tensorwise is emulated on this device: sm80 lacks fp8"):
        run.select_precision(parameters, "sm80")
    with pytest.raises(Infeasible, match="not for AMD's GPUs: this block's casts are Triton kernels"):
        run.select_precision(parameters, "gfx942")
    with pytest.raises(Infeasible, match="sequence_length=40: dtype=fp8_tensorwise needs a multiple of 16"):
        run.select_precision(parameters, "sm90")
    assert run.select_precision(replace(parameters, sequence_length=48), "sm90").recipe == "fp8_tensorwise"
    in_blocks = replace(parameters, dtype="fp8_blockwise", sequence_length=192)
    with pytest.raises(Infeasible, match="sequence_length=192: dtype=fp8_blockwise needs a multiple of 128"):
        run.select_precision(in_blocks, "sm90")
    with pytest.raises(Infeasible, match="dtype=fp8_blockwise is emulated on this device: sm100 lacks 1x128"):
        run.select_precision(in_blocks, "sm100")
    with pytest.raises(Infeasible, match="PyTorch groups products with scales of rows on sm90 alone; set dtype=bf16"):
        run.select_precision(replace(parameters, model="olmoe_1b_7b", sequence_length=48), "sm100")
    assert run.select_precision(replace(in_blocks, sequence_length=256), "sm90").recipe == "fp8_blockwise"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"imbalance": 2.0}, "imbalance=2: llama3_8b has no experts; set imbalance=null"),
        ({"model": "mixtral_8x7b", "imbalance": 5.0}, "imbalance=5: no expert has a token twice, so it is at most 4"),
        (
            {"model": "olmoe_1b_7b", "dtype": "fp8_blockwise"},
            "olmoe_1b_7b has experts, whose products have no scales of",
        ),
    ],
)
def test_what_experts_cannot_be_is_refused_in_a_line(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OffloadParameters(device_gib=1.0, host_gib=0.0, **values)


@pytest.mark.parametrize(
    ("hardware", "dtype", "reason"),
    [
        ("a100", "fp8_tensorwise", "is emulated on this device: sm80 lacks fp8 matrix units"),
        ("mi300x", "fp8_tensorwise", "is not for AMD's GPUs"),
    ],
)
def test_a_data_type_that_the_device_lacks_is_refused_before_a_trial(
    run_cli: Callable[..., CommandResult], hardware: str, dtype: str, reason: str
) -> None:
    result = run_cli("workload=llama_tiny", f"hardware={hardware}", f"space.dtype={dtype}", "plan=true")
    assert result.code == 2 and f"space.dtype={dtype} {reason}" in result.err


def test_a_plan_names_a_data_type_that_the_device_does_not_train_in() -> None:
    parameters = OffloadParameters(device_gib=1.0, host_gib=0.0, dtype="fp8_blockwise", sequence_length=8192)
    for architecture, reason in {"sm90": "", "sm100": "infeasible: dtype=fp8_blockwise is emulated"}.items():
        preview = Offload().preview(parameters, Machine("gpu", architecture, 1, 1))
        assert preview.startswith(reason) and bool(preview) == bool(reason)


def test_what_ran_is_read_back_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that trains in other types than requested does not report those of the request."""
    monkeypatch.setattr(run, "select_precision", lambda *_: Precision(torch.float32))
    parameters = OffloadParameters(
        device_gib=1.0, host_gib=0.0, **{**TINY, "dtype": "bf16", "master_weights": "none", "steps": 1}
    )
    measurement = run.measure(parameters, Rank())
    assert measurement.executed["dtype"] == "fp32" and measurement.executed["master_weights"] == "none"
    assert measurement.machine_info["type_of_optimizer_states"] == "fp32"
    assert measurement.executed["model"] == "llama_tiny" and measurement.executed["sequence_length"] == 32
    assert measurement.executed["sequences_per_step"] == 4 and measurement.executed["steps"] == 1


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_plan_that_runs_out_of_memory_is_followed_by_one_smaller_plan(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine fails as the allocator of a GPU makes it fail; a CPU has no allocator with a limit."""
    made, step, find = 0, run.Engine.step, run.find_fastest_plan
    budgets_gib: list[float] = []

    def fail_first(engine: run.Engine, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        if made <= failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Of the allocated memory")
        return step(engine, tokens)

    def find_and_note(model: ModelSizes, length: int, sequences: int, budget: MemoryBudget, rates: DeviceRates) -> Any:
        budgets_gib.append(budget.device_gib)
        return find(model, length, sequences, budget, rates)

    monkeypatch.setattr(run.Engine, "step", fail_first)
    monkeypatch.setattr(run, "find_fastest_plan", find_and_note)
    parameters = {**TINY, "device_gib": 1.0, "host_gib": 0.0}
    if failures == 2:
        with pytest.raises(OutOfMemory, match=r"2\.00 GiB\. Of the allocated memory"):
            run_trial("offload", parameters, Rank())
    else:
        measurement = run_trial("offload", parameters, Rank())
        assert measurement.metrics.get("replanned_device_gib") == (0.95 if failures else None)
        assert ("2.00 GiB" in str(measurement.machine_info.get("out_of_memory"))) == bool(failures)
    assert budgets_gib == [1.0, 0.95][: 1 + (failures > 0)]


def find_min_device_gib(host_gib: float) -> float:
    """Return about the least device memory that the tiny model trains in."""
    rates = measure_device_rates("llama_tiny", 32, CPU, Precision(torch.float32))
    model = ModelSizes(MODELS["llama_tiny"], element_bytes=4, state_bytes_per_parameter=8)
    too_small, enough = 0.0, 1.0
    for _ in range(16):
        device_gib = (too_small + enough) / 2
        try:
            find_fastest_plan(model, 32, 4, MemoryBudget(device_gib, host_gib), rates)
            enough = device_gib
        except Infeasible:
            too_small = device_gib
    return 1.02 * enough


def test_a_trace_names_the_parts_of_a_step() -> None:
    measurement = run_trial("offload", {**TINY, **ON_DEVICE, "model": "qwen3_moe_tiny", "profile": True}, Rank())
    events = json.loads(gzip.decompress(measurement.files["trace.json.gz"]))["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"layer 0 forward", "layer 1 backward", "layer 1 update", "head and loss"} <= names
    assert {"router", "permutation", "experts"} <= names
    shares = [measurement.metrics[f"{part}_share"] for part in ("router", "permutation", "experts")]
    assert min(shares) > 0 and sum(shares) < 1


@pytest.mark.gpu
def test_memory_as_the_driver_and_the_kernel_count_it_stays_within_both_budgets() -> None:
    """The driver counts the whole device and the kernel the whole process. Both hold more than the budgets cover, such
    as CUDA's context and libraries, so the memory of a trial of next to nothing is subtracted. A process of its own
    runs both trials: memory that earlier tests left in this one would count."""
    parameters = {"model": "llama3_1b", "sequence_length": 2048, "sequences_per_step": 32, "steps": 1}
    parameters |= {"device_gib": 9.0, "host_gib": 10.0}
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        device_before, host_before = process.submit(measure_peak_gib, {**TINY, **ON_DEVICE}).result()
        device_peak, host_peak = process.submit(measure_peak_gib, parameters).result()
    assert 4 < device_peak - device_before <= 9.2 and 4 < host_peak - host_before <= 10.5


def measure_peak_gib(parameters: dict[str, Scalar]) -> tuple[float, float]:
    """Return the most GiB that the device and this process use during a trial with `parameters`."""
    pynvml.nvmlInit()
    handle, done = pynvml.nvmlDeviceGetHandleByIndex(0), threading.Event()
    peak = [0.0, 0.0]

    def sample() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB)
            peak[1] = max(peak[1], int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        run_trial("offload", parameters, Rank(device="cuda"))
    finally:
        done.set()
        thread.join()
    return peak[0], peak[1]


@pytest.mark.gpu
def test_on_a_gpu_the_loss_of_an_offloaded_run_follows_the_one_on_the_device() -> None:
    parameters = {"model": "llama3_1b", "sequence_length": 1024, "sequences_per_step": 32, "warmup": 0}
    budgets = {"device_gib": 60.0, "host_gib": 0.0}, {"device_gib": 8.0, "host_gib": 12.0}
    for steps in (1, 10, 20):
        losses = [
            run_trial("offload", {**parameters, **budget, "steps": steps}, Rank(device="cuda")).metrics["loss"]
            for budget in budgets
        ]
        assert losses[1] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.soak
def test_a_sweep_over_budgets_reports_which_fit_and_which_do_not(workspace: Workspace) -> None:
    overrides = ["workload=llama_tiny", "space.device_gib=0.0001,1", "space.host_gib=0", "search=grid", "hardware=cpu"]
    done = workspace.run(*overrides)
    assert "1 complete, 1 infeasible" in done.out and "GiB more needed" in done.out
    assert "speed" in done.out and "tokens/s" in done.out and "predicted" in done.out
