"""Derived figures against arithmetic done by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.metrics.derivation import derive
from workloads.api.contract import Measurement


def measured(*times_s: float, **more: object) -> Measurement:
    return Measurement(executed={}, step_times_s=times_s, **more)  # type: ignore[arg-type]


def test_the_rate_of_a_product_is_its_operations_over_its_median_time() -> None:
    metrics = derive([measured(0.001, 0.002, 0.004, flops_per_step=2e12, matrix_dtype="bf16")], {"bf16": 2000.0})
    assert metrics["tflops"] == pytest.approx(1000)
    assert metrics["step_time_ms"] == pytest.approx(2)
    assert metrics["mfu"] == pytest.approx(0.5)
    assert metrics["steps"] == 3
    assert metrics["tflops_p10"] < metrics["tflops"] < metrics["tflops_p90"]


def test_the_bounds_of_a_rate_are_those_of_the_step_time_mirrored() -> None:
    metrics = derive([measured(0.5, 1.0, 1.0, 2.0, 1.0, tokens_per_step=10)], {})
    assert (metrics["tokens_per_s_ci_low"], metrics["tokens_per_s_ci_high"]) == (5.0, 20.0)
    assert metrics["effective_steps"] == metrics["steps"] == 5


def test_a_steady_figure_has_a_narrow_interval_and_a_noisy_one_a_wide_one() -> None:
    steady = derive([measured(*[0.001, 0.00101, 0.00099] * 10, flops_per_step=1e9)], {})
    noisy = derive([measured(*[0.001, 0.002, 0.0005] * 10, flops_per_step=1e9)], {})
    width = [m["tflops_ci_high"] - m["tflops_ci_low"] for m in (steady, noisy)]
    assert width[0] < 0.05 * steady["tflops"] < width[1]


def test_burst_and_sustained_rates_are_separate_metrics() -> None:
    metrics = derive(
        [measured(0.001, flops_per_step=1e12, matrix_dtype="bf16", sustained_step_times_s=(0.002, 0.002, 0.002))],
        {"bf16": 1000.0},
    )
    assert metrics["tflops"] == pytest.approx(1000) and metrics["tflops_sustained"] == pytest.approx(500)
    assert metrics["mfu"] == pytest.approx(1.0) and metrics["mfu_sustained"] == pytest.approx(0.5)


def test_there_is_no_utilization_without_a_peak() -> None:
    assert "mfu" not in derive([measured(0.001, flops_per_step=1e9, matrix_dtype="fp8")], {"bf16": 989.0})


def test_a_gang_is_as_slow_as_its_slowest_rank() -> None:
    ranks = [
        measured(1.0, 1.0, flops_per_step=1e12, tokens_per_step=100, matrix_dtype="bf16"),
        measured(2.0, 2.0, flops_per_step=1e12, tokens_per_step=100, matrix_dtype="bf16"),
    ]
    metrics = derive(ranks, {"bf16": 10.0})
    assert metrics["tflops"] == pytest.approx(1.0)
    assert metrics["tflops_per_gpu"] == pytest.approx(0.5)
    assert metrics["tokens_per_s_per_gpu"] == pytest.approx(50)
    assert metrics["mfu"] == pytest.approx(1.0 / (2 * 10.0))


@given(st.lists(st.floats(1e-6, 10), min_size=1, max_size=30), st.floats(1e6, 1e15))
def test_the_rate_times_the_step_time_is_the_flops_of_a_step(times_s: list[float], flops: float) -> None:
    metrics = derive([measured(*times_s, flops_per_step=flops)], {})
    if len(times_s) % 2:  # the median of an even number of rates is not the rate of the median time
        assert math.isclose(metrics["tflops"] * metrics["step_time_ms"] * 1e9, flops, rel_tol=1e-9)
    assert metrics.get("tflops_p10", 0) <= metrics["tflops"] * (1 + 1e-12)


def test_the_slowest_of_independent_devices_is_found_by_their_medians() -> None:
    """Each rank is slow in a different repeat, so no rank is slow in its median."""
    ranks = [
        measured(*(2.0 if i == rank else 1.0 for i in range(5)), flops_per_step=1e12, independent=True)
        for rank in range(4)
    ]
    metrics = derive(ranks, {})
    assert metrics["tflops"] == pytest.approx(4.0)
    assert metrics["tflops_slowest_gpu"] == pytest.approx(1.0) and metrics["gpu_spread"] == pytest.approx(0.0)
