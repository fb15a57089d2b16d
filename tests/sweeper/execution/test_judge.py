"""From a result to a record: what fails a trial that its workload reported as complete."""

from pathlib import Path
from typing import Any

import pytest

from sweeper.common.trials import Trial, TrialRecord, TrialResult, TrialStatus
from sweeper.config.schema import Hardware
from sweeper.config.space import Space
from sweeper.execution.judge import TrialJudge
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.derivation import Prices
from sweeper.preflight.work import WorkIdentifier
from workloads.api import registry
from workloads.api.contract import Energy, Measurement


def judge(
    folder: Path, objective: str = "tflops", *, clock_headroom: float = 1.0, prices: Prices | None = None, **fields: Any
) -> TrialRecord:
    """Return the record of a trial whose only rank measured these fields on a device of 100 TFLOP/s."""
    hardware = Hardware(name="h200", dense_peak_tflops={"bf16": 100.0}, clock_headroom=clock_headroom)
    work = WorkIdentifier(registry.load("probe"), Space())
    criteria = Criteria.of({objective: "maximize"})
    trial_judge = TrialJudge(criteria, hardware, {}, lambda _: {}, work, folder, prices or Prices())
    measurement = Measurement(**{"executed": {}, "step_times_s": (1.0,) * 5, "matrix_dtype": "bf16"} | fields)
    result = TrialResult(TrialStatus.COMPLETE, 0.0, 1.0, measurements=(measurement,))
    return trial_judge.build_record(Trial(0, {}), result, attempts=1, elapsed_s=1.0)


def test_a_step_of_a_running_trial_has_its_cost_for_the_pruner(tmp_path: Path) -> None:
    work = WorkIdentifier(registry.load("probe"), Space())
    arguments = (Criteria.of({"cost_per_million_tokens": "minimize"}), Hardware(name="h200"), {}, lambda _: {})
    priced = TrialJudge(*arguments, work, tmp_path, Prices(per_hour=3.6))
    step = priced.derive_step(Trial(0, {}), {"tokens_per_s": 1000.0}, ranks=2)
    assert step["cost_per_million_tokens"] == pytest.approx(2.0)  # two devices for 1,000 s at 3.6 an hour


def test_a_rate_above_the_peak_of_the_vendor_fails_the_trial(tmp_path: Path) -> None:
    record = judge(tmp_path, flops_per_step=303e12)
    assert record.status is TrialStatus.FAILED and record.metrics == {}
    assert record.reason.startswith("impossible: mfu is 303% of the vendor's dense peak")
    assert judge(tmp_path, flops_per_step=99e12).status is TrialStatus.COMPLETE


def test_a_clock_may_exceed_the_one_of_the_peak_where_the_catalogue_says_so(tmp_path: Path) -> None:
    assert judge(tmp_path, flops_per_step=108e12, clock_headroom=1.2).status is TrialStatus.COMPLETE
    assert judge(tmp_path, flops_per_step=121e12, clock_headroom=1.2).status is TrialStatus.FAILED


@pytest.mark.parametrize(
    "fields",
    [
        {"flops_per_step": 50e12, "hardware_flops_per_step": 140e12},
        {"flops_per_step": 50e12, "sustained_step_times_s": (0.4,) * 5},
    ],
)
def test_every_utilization_of_the_peak_is_checked(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert "of the vendor's dense peak" in judge(tmp_path, **fields).reason


def test_an_objective_that_needs_the_energy_says_why_there_is_none(tmp_path: Path) -> None:
    missing = Energy(missing="the steps took 0.5 s; the energy counter needs 1 s")
    record = judge(tmp_path, "tflop_per_joule", flops_per_step=1e12, energy=missing)
    assert record.status is TrialStatus.FAILED
    assert record.reason.startswith(
        f"tflop_per_joule was not measured, since the device's energy is not known: {missing.missing}"
    )


def test_tokens_have_a_cost_where_a_price_is_set(tmp_path: Path) -> None:
    energy = Energy(3.6e6, 1.0, 5, "counter")  # 0.2 kWh a step of a second with 10^6 tokens
    fields = {"flops_per_step": 1e12, "tokens_per_step": 10**6, "energy": energy}
    record = judge(tmp_path, prices=Prices(3.6, 0.5), **fields)
    assert record.metrics["cost_per_million_tokens"] == pytest.approx(0.001 + 0.1)
    assert record.measurements[0]["energy"]["source"] == "counter"
    assert "cost_per_million_tokens" not in judge(tmp_path, **fields).metrics
