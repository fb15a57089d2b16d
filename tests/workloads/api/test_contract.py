"""Measurements that no metric can be computed from, or that set a derived metric, are refused where they are made."""

import math
from dataclasses import replace
from typing import Any

import pytest

from sweeper.metrics.derivation import STATISTICS, Prices, cost_metrics, derive
from workloads.api import contract
from workloads.api.contract import Energy, Measurement
from workloads.api.metrics import ROWS, SUFFIXES, find_source

COMPLETE = Measurement(
    executed={},
    step_resolution_s=1e-6,
    step_times_s=(1.0, 1.1, 1.2, 1.1, 1.0, 1.2),
    sustained_step_times_s=(1.0, 1.1, 1.2, 1.1, 1.0, 1.2),
    independent=True,
    baseline_step_times_s=(2.0, 2.1, 2.2, 2.1, 2.0, 2.2),
    bytes_per_step=1e9,
    flops_per_step=1e12,
    hardware_flops_per_step=2e12,
    tokens_per_step=100,
    matrix_dtype="bf16",
    energy=Energy(100.0, 1.0, 3, "counter"),
)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_times_s": (1.0, 0.0)}, "step_times_s has 0.0"),
        ({"step_times_s": (1.0, math.nan)}, "step_times_s has nan"),
        ({"step_times_s": (1e-300,)}, "step_times_s has 1e-300: no timer resolves less than 1e-07 s"),
        ({"sustained_step_times_s": (1e-8,)}, "sustained_step_times_s has 1e-08"),
        ({"statistic": "best"}, "statistic='best': allowed are median, mean, fastest"),
        ({"metrics": {"loss": None}}, r"metrics\['loss'\] is None"),
        ({"tokens_per_step": -1}, "tokens_per_step=-1: it must be finite and not negative"),
        ({"flops_per_step": math.inf}, "flops_per_step=inf: it must be finite and not negative"),
        ({"hardware_flops_per_step": math.nan}, "hardware_flops_per_step=nan"),
        ({"bytes_per_step": -1.0}, "bytes_per_step=-1.0"),
        ({"flops_per_step": 2.0, "hardware_flops_per_step": 1.0}, "hardware_flops_per_step=1 is less than"),
        ({"metrics": {"tokens_per_s": 1e9}}, "tokens_per_s is derived from step_times_s and tokens_per_step"),
        ({"metrics": {"mfu": 0.9}}, "mfu is derived from step_times_s, flops_per_step and matrix_dtype"),
        ({"metrics": {"tflops_per_gpu_ci_low": 1.0}}, "tflops_per_gpu_ci_low is derived from"),
        ({"files": {"../trace.json": b""}}, r"files\['../trace.json'\]: must be the name of a file, without a folder"),
    ],
)
def test_an_impossible_measurement_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Measurement(**{"executed": {}, "step_times_s": (1.0,)} | fields)


def test_the_statistics_of_the_contract_are_those_that_are_computed() -> None:
    assert set(contract.STATISTICS) == set(STATISTICS)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("statistic", contract.STATISTICS)
def test_a_workload_may_set_none_of_the_metrics_that_are_derived(ranks: int, statistic: str) -> None:
    derived = derive([replace(COMPLETE, statistic=statistic)] * ranks, {"bf16": 10.0}, {"bf16": 8.0}, 1.0)
    assert not {name for name in derived if not find_source(name)}


def test_every_reserved_name_is_derived() -> None:
    """A name that nothing derives would be refused for no reason."""
    derived = derive([COMPLETE] * 2, {"bf16": 10.0}, {"bf16": 8.0}, 1.0)
    derived |= cost_metrics(derived, 2, Prices(per_hour=2.0))
    assert {row.name for row in ROWS if row.source} <= set(derived)
    assert all(any(name.endswith(suffix) for name in derived) for suffix in SUFFIXES)


def test_metrics_of_other_names_are_allowed() -> None:
    for name in ("loss", "bus_gb_s", "claimed_tokens_per_s", "predicted_tokens_per_s", "score", "peak_device_gib"):
        assert find_source(name) == ""
