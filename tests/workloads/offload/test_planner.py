"""The planner: its plan fits the budgets, is the fastest that it predicts, and never slower with more memory."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support import replay
from tests.support.offload_plans import CPU, H200, MODEL, SHAPE, SLOW_LINK, find_plan
from workloads.api.contract import Infeasible
from workloads.llama.attention_kernels import CPU_KERNEL
from workloads.llama.fp8_block import build_block_math
from workloads.models.model import MODELS
from workloads.offload import device_rates
from workloads.offload.cost_model import MemoryBudget, ModelSizes, Placement
from workloads.offload.device_rates import measure_device_rates
from workloads.offload.optimizer import Precision
from workloads.offload.plan import GIB, ActivationPlan, LayerPlan
from workloads.offload.plan_search import find_fastest_plan, find_fastest_plans

PLACEMENT = Placement(
    MODEL,
    SHAPE.layers,
    SHAPE.layers,
    sequence_length=8192,
    sequences_per_chunk=1,
    chunks_per_round=2,
    accumulation_rounds=4,
)


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
