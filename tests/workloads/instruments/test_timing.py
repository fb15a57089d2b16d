"""Timing on a GPU: the cost of events, many calls in a reading, cold caches. On a CPU, the GPU is a stand-in."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pytest
import torch

from tests.support.amd_device import MI250X, MI300X, MI355X, StandInProperties, amd_device
from tests.support.any_load.sitecustomize import ORIGINAL
from workloads.instruments import device as devices
from workloads.instruments import timing

DEVICE = torch.device("cuda", 0)


class StandInGpu:
    """A GPU's clock: events that cost `event_us` a pair, and steps of `step_us`, as on AMD GPUs with slow events."""

    def __init__(self, patch: pytest.MonkeyPatch, *, event_us: float, step_us: float) -> None:
        self.now_us, self.event_us, self.step_us = 0.0, event_us, step_us
        self.log: list[str] = []
        gpu = self

        @dataclass
        class Event:
            enable_timing: bool = False
            at_us: float = 0.0

            def record(self) -> None:
                gpu.now_us += gpu.event_us
                self.at_us = gpu.now_us
                gpu.log.append("event")

            def elapsed_time(self, end: Event) -> float:
                return (end.at_us - self.at_us) / 1e3

        def flush() -> None:
            gpu.now_us += 300.0
            gpu.log.append("flush")

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append("wait"))
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(timing, "build_flush", lambda device: flush)
        timing.event_cost_s.cache_clear()

    def step(self) -> None:
        self.now_us += self.step_us
        self.log.append("step")


@pytest.fixture(autouse=True)
def _forget_the_stand_ins_event_cost() -> object:
    yield
    timing.event_cost_s.cache_clear()


@pytest.mark.parametrize("cold_cache", [False, True])
def test_the_cost_of_events_is_subtracted(cold_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandInGpu(monkeypatch, event_us=8.0, step_us=5.0)
    times_s = timing.time_steps(gpu.step, DEVICE, warmup=1, repeats=4, cold_cache=cold_cache)
    assert times_s == pytest.approx([5e-6] * 4)
    assert timing.event_cost_s(DEVICE) == pytest.approx(8e-6)


def test_the_flush_comes_before_each_call_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandInGpu(monkeypatch, event_us=2.0, step_us=5.0)
    timing.event_cost_s(DEVICE)
    gpu.log.clear()
    timing.time_in_turns([gpu.step, gpu.step], DEVICE, warmup=0, repeats=2)
    assert gpu.log == ["flush", "event", "step", "event"] * 4


def test_a_reading_of_short_warm_calls_spans_many(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandInGpu(monkeypatch, event_us=8.0, step_us=5.1)
    calls = timing.calls_in_reading(gpu.step, DEVICE)
    assert calls == 40
    gpu.log.clear()
    times_s = timing.time_steps(gpu.step, DEVICE, warmup=0, repeats=2, cold_cache=False, calls=calls)
    assert times_s == pytest.approx([5.1e-6] * 2)
    assert gpu.log == ["wait", "event", *["step"] * 40, "event"] * 2


@pytest.mark.parametrize(("step_us", "calls"), [(0.7, timing.MAX_CALLS), (45.0, 5), (55.0, 1), (1500.0, 1)])
def test_long_calls_are_timed_one_by_one(step_us: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandInGpu(monkeypatch, event_us=8.0, step_us=step_us)
    assert timing.calls_in_reading(gpu.step, DEVICE) == calls
    assert timing.calls_in_reading(gpu.step, torch.device("cpu")) == 1


def test_no_reading_is_shorter_than_an_event_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandInGpu(monkeypatch, event_us=8.0, step_us=0.0)
    assert timing.time_steps(gpu.step, DEVICE, warmup=0, repeats=1, cold_cache=False) == (timing.RESOLUTION_S,)


@pytest.mark.parametrize(("properties", "flushed_mib"), [(MI300X, 4 * 288), (MI355X, 4 * 288), (MI250X, 512)])
def test_the_flush_exceeds_a_memory_side_cache_four_times(properties: StandInProperties, flushed_mib: int) -> None:
    with amd_device(properties):
        assert devices.flush_mib(DEVICE) == flushed_mib


def test_other_gpus_have_the_cache_that_their_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    def reports(l2_mib: int) -> None:
        properties = StandInProperties("NVIDIA GPU", "NVIDIA GPU", 10, 0, 148, 2**37, L2_cache_size=l2_mib * 2**20)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    for l2_mib, flushed_mib in ((60, 512), (126, 512), (192, 768)):
        reports(l2_mib)
        assert devices.flush_mib(DEVICE) == flushed_mib
    monkeypatch.setattr(devices, "CPU_FLUSH_MIB", ORIGINAL[devices.__name__]["CPU_FLUSH_MIB"])
    assert devices.flush_mib(torch.device("cpu")) == 512


def test_a_flush_reads_and_writes_every_element_of_the_whole_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer on the CPU stands in for a GPU's: a sum of calls in every element shows that it was read."""
    buffers = list[torch.Tensor]()

    def create(size: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        buffers.append(torch.ones(size, dtype=dtype))
        return buffers[-1]

    monkeypatch.setattr(devices, "LEAST_FLUSH_MIB", 1)
    monkeypatch.setattr(devices, "CPU_FLUSH_MIB", 1)
    monkeypatch.setattr(devices.torch, "zeros", create)
    with amd_device(StandInProperties("AMD GPU", "gfx90a", 9, 0, 104, 2**36)):
        flush = devices.build_flush(DEVICE)
        flush()
        flush()
    devices.build_flush(torch.device("cpu"))()
    on_gpu, on_cpu = buffers
    assert on_gpu.nbytes == 32 * 2**20 and bool((on_gpu == 3).all())
    assert on_cpu.nbytes == 2**20 and bool((on_cpu == 0).all())


@pytest.mark.gpu
def test_a_short_product_takes_as_long_alone_as_among_many() -> None:
    """Within the cost of a pair of events: without its subtraction they differ by more."""
    a = torch.randn(1024, 1024, device=DEVICE, dtype=torch.bfloat16)
    c = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, a, out=c)

    cost_s, calls = timing.event_cost_s(DEVICE), timing.calls_in_reading(multiply, DEVICE)
    assert timing.RESOLUTION_S < cost_s < 100e-6 and calls > 1
    alone, among = (
        statistics.median(timing.time_steps(multiply, DEVICE, warmup=5, repeats=30, cold_cache=False, calls=count))
        for count in (1, calls)
    )
    assert abs(alone - among) < cost_s


@pytest.mark.gpu
def test_a_flush_makes_a_copy_slower() -> None:
    source = torch.ones(20 * 2**20, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    warm, cold = (
        statistics.median(
            timing.time_steps(lambda: target.copy_(source), DEVICE, warmup=5, repeats=30, cold_cache=cold_cache)
        )
        for cold_cache in (False, True)
    )
    assert cold > 1.1 * warm
