"""The planner: what it picks fits, is the fastest it knows, and never gets slower with more memory."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.conftest import Place
from tests.support import replay
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.llama.shapes import MODELS
from workloads.offload.cost_model import Budget, Model, Rates
from workloads.offload.device_rates import machine_rates
from workloads.offload.plan import GIB, LayerPlan
from workloads.offload.planner import Prediction, choose

CPU = torch.device("cpu")
SHAPE = replace(MODELS["llama3_8b"], layers=8)
# About those of one H200: 620 TFLOP/s, copies of 50.8 GB/s each way at once.
H200 = Rates(
    forward_s=0.92e-6,
    backward_s=1.9e-6,
    again_s={"full": 0.0, "gate": 0.18e-6, "projections": 0.36e-6, "attention": 0.5e-6, "input": 0.72e-6},
    head_s=5.1e-6,
    up_s_per_byte=1 / 50.8e9,
    down_s_per_byte=1 / 50.8e9,
    update_s_per_byte=4e-12,
    workspace_bytes=180e3,
    chunk_tokens=8192,
)
MODEL = Model(SHAPE, element_bytes=2, state_bytes=4)


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
    assert large.times.step_s <= small.times.step_s * (1 + 1e-9)
    for found, budget in ((small, (device, host)), (large, (device + more_device, host + more_host))):
        assert found.device_bytes <= budget[0] * GIB and found.host_bytes <= budget[1] * GIB
        assert found.plan.tokens_per_step == 8 * 8192


@pytest.mark.parametrize(
    ("host_gib", "device_gib", "length", "sequences"),
    [(70, 40, 8192, 16), (60, 24, 8192, 1), (53, 92, 8192, 1), (90, 78, 65536, 2)],
)
def test_what_the_engine_queues_takes_no_longer_than_the_planner_says(
    host_gib: float, device_gib: float, length: int, sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8B on one H200, where copies had stood in each other's way; once half the states came from the host."""
    model = Model(MODELS["llama3_8b"], element_bytes=2, state_bytes=4)
    found = choose(model, length, sequences, Budget(device_gib, host_gib), H200)
    one, two = (replay.steps_s(model.shape, found.plan, H200, monkeypatch, steps) for steps in (1, 2))
    assert two - one <= 1.015 * found.times.step_s


def test_with_room_for_everything_nothing_moves() -> None:
    found = plan(200, 0)
    assert found.times.copied_bytes == 0 and found.times.waiting_s == 0 and found.host_bytes == 0
    assert set(found.plan.layers) == {LayerPlan()}


def test_with_little_room_state_is_on_the_host() -> None:
    found = plan(15, 60)
    assert found.times.copied_bytes > 0 and {p.states for p in found.plan.layers} == {"host"}


def test_what_cannot_work_says_by_how_much() -> None:
    with pytest.raises(Infeasible, match=r"device_gib=2 and host_gib=1: [\d.]+ GiB too little at best"):
        plan(2, 1)


SLOW_LINK = replace(H200, up_s_per_byte=10 * H200.up_s_per_byte, down_s_per_byte=10 * H200.down_s_per_byte)


@pytest.mark.parametrize("sequences", [8, 32])
def test_slower_copies_make_a_slower_plan_that_copies_less(sequences: int) -> None:
    fast = choose(MODEL, 8192, sequences, Budget(16, 200), H200)
    slow = choose(MODEL, 8192, sequences, Budget(16, 200), SLOW_LINK)
    assert slow.times.copied_bytes < fast.times.copied_bytes
    assert slow.times.step_s > fast.times.step_s


def test_slower_copies_make_rounds_of_more_tokens() -> None:
    """Layers stream in every round, so with a link that is ten times slower a step has fewer rounds of more tokens."""
    fast, slow = (choose(MODEL, 8192, 32, Budget(16, 200), rates).plan for rates in (H200, SLOW_LINK))
    assert slow.rounds < fast.rounds
    assert slow.chunks * slow.chunk_tokens > fast.chunks * fast.chunk_tokens
    assert slow.tokens_per_step == fast.tokens_per_step == 32 * 8192


TINY = {"model": "llama_tiny", "sequence_length": 32, "sequences_per_step": 4, "dtype": "fp32", "steps": 3}


def test_a_trial_trains_within_its_host_budget_and_the_same_whatever_the_plan() -> None:
    """On a CPU the numbers of two plans are the same to rounding; what differs is where things lie."""
    roomy = run_trial("offload", {**TINY, "device_gib": 1.0, "host_gib": 0.0}, Rank())
    assert roomy.metrics["copied_gib_per_step"] == 0 and roomy.metrics["peak_host_gib"] == 0
    tight = tightest(0.05)
    measured = run_trial("offload", {**TINY, "device_gib": tight, "host_gib": 0.05}, Rank())
    assert 0 < measured.metrics["peak_host_gib"] <= 0.05 and measured.metrics["copied_gib_per_step"] > 0
    assert measured.metrics["loss"] == pytest.approx(roomy.metrics["loss"], abs=1e-5)
    for share in ("copy_wait_share", "optimizer_share", "predicted_copy_wait_share"):
        assert 0 <= measured.metrics[share] <= 1
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


def test_a_trace_has_the_names_of_the_parts() -> None:
    measured = run_trial("offload", {**TINY, "device_gib": 1.0, "host_gib": 0.0, "profile": True}, Rank())
    events = json.loads(gzip.decompress(measured.files["trace.json.gz"]))["traceEvents"]
    assert {"layer 0 forward", "layer 1 backward", "layer 1 update", "head and loss"} <= {e.get("name") for e in events}


@pytest.mark.gpu
def test_on_a_gpu_memory_stays_within_both_budgets_as_seen_from_outside() -> None:
    """By the driver's count of the whole device and the kernel's of this process; both hold more than the budgets speak
    of: CUDA's context and libraries, so what a trial with next to nothing needs is taken off."""
    asked = {"model": "llama3_1b", "sequence_length": 2048, "sequences_per_step": 32, "steps": 1}
    before = most_used(lambda: run_trial("offload", {**TINY, "device_gib": 1.0, "host_gib": 0.0}, Rank(device="cuda")))
    used = most_used(lambda: run_trial("offload", {**asked, "device_gib": 9.0, "host_gib": 10.0}, Rank(device="cuda")))
    device, host = used[0] - before[0], used[1] - before[1]
    assert 4 < device <= 9.2 and 4 < host <= 10.5


def most_used(run: Callable[[], object]) -> tuple[float, float]:
    """The most GiB of the device and of this process meanwhile."""
    pynvml.nvmlInit()
    handle, done = pynvml.nvmlDeviceGetHandleByIndex(0), threading.Event()
    most = [0.0, 0.0]

    def look() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB)
            most[1] = max(most[1], int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / GIB)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return most[0], most[1]


@pytest.mark.gpu
def test_on_a_gpu_the_loss_of_an_offloaded_run_follows_the_one_on_the_device() -> None:
    asked = {"model": "llama3_1b", "sequence_length": 1024, "sequences_per_step": 32, "warmup": 0}
    for steps in (1, 10, 20):
        losses = [
            run_trial(
                "offload", {**asked, "steps": steps, "device_gib": device, "host_gib": host}, Rank(device="cuda")
            ).metrics["loss"]
            for device, host in ((60.0, 0.0), (8.0, 12.0))
        ]
        assert losses[1] == pytest.approx(losses[0], rel=3e-3)


@pytest.mark.soak
def test_a_sweep_over_budgets_tells_what_fits_and_what_does_not(place: Place) -> None:
    words = ["workload=llama_tiny", "space.device_gib=0.0001,1", "space.host_gib=0", "search=grid", "hardware=cpu"]
    done = place.run(*words)
    assert "1 complete, 1 infeasible" in done.out and "GiB too little at best" in done.out
    assert "speed" in done.out and "tokens/s" in done.out and "predicted" in done.out
