"""The planner: what it picks fits, is the fastest it knows, and never gets slower with more memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import Place
from workloads.contract import Infeasible, Rank
from workloads.llama.shapes import MODELS
from workloads.offload.layout import LayerPlan
from workloads.offload.planner import GIB, Budget, Model, Prediction, Rates, choose
from workloads.offload.rates import machine_rates
from workloads.trial import run_trial

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama3_8b"], layers=8)
# About those of one H200: 620 TFLOP/s, copies of 50.8 GB/s each way at once.
H200 = Rates(
    forward_s=0.92e-6,
    backward_s=1.9e-6,
    again_s={"full": 0.0, "projections": 0.36e-6, "attention": 0.5e-6, "input": 0.72e-6},
    head_s=5.1e-6,
    up_s_per_byte=1 / 50.8e9,
    down_s_per_byte=1 / 50.8e9,
    update_s_per_byte=4e-12,
    workspace_bytes=180e3,
    chunk_tokens=8192,
)
MODEL = Model(SHAPE, width=2, state_bytes=4)


def plan(device_gib: float, host_gib: float, sequences: int = 8) -> Prediction:
    return choose(MODEL, 8192, sequences, Budget(device_gib, host_gib), H200)


@settings(max_examples=25, deadline=None)
@given(st.floats(14, 60), st.floats(0, 40), st.floats(0, 20), st.floats(0, 20))
def test_more_memory_is_never_slower_and_every_plan_fits(
    device: float, host: float, more_device: float, more_host: float
) -> None:
    try:
        small = plan(device, host)
    except Infeasible:
        assume(False)
    large = plan(device + more_device, host + more_host)
    assert large.step_s <= small.step_s * (1 + 1e-9)
    for found, budget in ((small, (device, host)), (large, (device + more_device, host + more_host))):
        assert found.device_bytes <= budget[0] * GIB and found.host_bytes <= budget[1] * GIB
        assert found.plan.tokens_per_step == 8 * 8192


def test_with_room_for_everything_nothing_moves() -> None:
    found = plan(200, 0)
    assert found.copied_bytes == 0 and found.waiting_s == 0 and found.host_bytes == 0
    assert set(found.plan.layers) == {LayerPlan()}


def test_with_little_room_state_is_on_the_host() -> None:
    found = plan(15, 60)
    assert found.copied_bytes > 0 and {p.states for p in found.plan.layers} == {"host"}


def test_what_cannot_work_says_by_how_much() -> None:
    with pytest.raises(Infeasible, match=r"device_gib=2 and host_gib=1: [\d.]+ GiB too little at best"):
        plan(2, 1)


def test_slow_copies_make_it_keep_more_rounds_worth_of_tokens() -> None:
    """With a link ten times slower weights have to be worth more tokens each time that they come."""
    slow = replace(H200, up_s_per_byte=10 * H200.up_s_per_byte, down_s_per_byte=10 * H200.down_s_per_byte)
    fast_plan = choose(MODEL, 8192, 8, Budget(16, 200), H200)
    slow_plan = choose(MODEL, 8192, 8, Budget(16, 200), slow)
    assert slow_plan.copied_bytes <= fast_plan.copied_bytes and slow_plan.step_s >= fast_plan.step_s


TINY = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "steps": 3}


def test_a_trial_trains_within_its_host_budget_and_the_same_whatever_the_plan() -> None:
    """On a CPU the numbers of two plans are the same to rounding; what differs is where things lie."""
    roomy = run_trial("offload", {**TINY, "device_gib": 1.0, "host_gib": 0.0}, Rank())
    assert roomy.figures["copied_gib_per_step"] == 0 and roomy.figures["peak_host_gib"] == 0
    tight = tightest(0.05)
    measured = run_trial("offload", {**TINY, "device_gib": tight, "host_gib": 0.05}, Rank())
    assert 0 < measured.figures["peak_host_gib"] <= 0.05 and measured.figures["copied_gib_per_step"] > 0
    assert measured.figures["loss"] == pytest.approx(roomy.figures["loss"], abs=1e-5)
    assert measured.hardware_flops_per_step >= roomy.hardware_flops_per_step > roomy.flops_per_step


def tightest(host_gib: float) -> float:
    """About the least device memory that the tiny model trains in."""
    rates, tiny = machine_rates("llama_tiny", 32, CPU, torch.float32, False), Model(MODELS["llama_tiny"], 4, 8)
    low, high = 0.0, 1.0
    for _ in range(16):
        middle = (low + high) / 2
        try:
            choose(tiny, 32, 4, Budget(middle, host_gib), rates)
            high = middle
        except Infeasible:
            low = middle
    return 1.02 * high


def test_a_sweep_over_budgets_tells_what_fits_and_what_does_not(place: Place) -> None:
    words = ["workload=llama_tiny", "space.device_gib=0.0001,1", "space.host_gib=0", "search=grid", "hardware=cpu"]
    done = place.run(*words)
    assert "1 complete, 1 infeasible" in done.out and "GiB too little at best" in done.out
    assert "tokens 1/s" in done.out and "predicted" in done.out
