"""The cost model beside what H200s have measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from sweeper.config.catalogue import catalogue
from sweeper.preflight.devices import planned_target
from tests.conftest import REPOSITORY
from tests.support.planner import machine_of
from workloads.estimator.estimate import JobEstimate
from workloads.estimator.step import estimate_job
from workloads.models.model import MODELS
from workloads.parallel.estimates import build_job
from workloads.parallel.layout import Layout, Setting

MEASUREMENTS = pd.read_csv(REPOSITORY / "tests/samples/h200_layouts.csv", comment="#").to_dict("records")


def measured_layout(row: dict[str, Any]) -> tuple[Layout, Setting]:
    layout = Layout(**{name: value for name, value in row.items() if name in Layout.__dataclass_fields__})
    ranks = layout.world_size
    training = {name: row[name] for name in ("dtype", "state", "block")}
    return layout, Setting(MODELS["llama3_8b"], 8192, ranks, ranks, compiled=True, **training)


def measured_estimate(row: dict[str, Any]) -> JobEstimate:
    """On a machine without a measured matmul rate, with the attention kernel that ran."""
    layout, setting = measured_layout(row)
    job = replace(build_job(layout, setting), attention_kernel=row["attention_kernel"])
    ranks = layout.world_size
    return estimate_job(job, machine_of(planned_target(catalogue()["h200"], ranks), ranks).cluster)


def estimated_tokens_per_s(row: dict[str, Any]) -> float:
    """One GPU."""
    return measured_estimate(row).tokens_per_s_per_gpu


@pytest.mark.parametrize("row", MEASUREMENTS, ids=str)
def test_the_memory_estimate_is_within_5_percent_of_a_gpus_allocations(row: dict[str, Any]) -> None:
    assert measured_estimate(row).memory.allocated_gib == pytest.approx(row["gib"], rel=0.05)


@pytest.mark.parametrize("row", [row for row in MEASUREMENTS if row["tokens_per_s"] > 0], ids=str)
def test_the_estimated_speed_is_near_the_measured_one(row: dict[str, Any]) -> None:
    tolerance = 0.016 if measured_layout(row)[0].world_size == 4 else 0.055
    assert estimated_tokens_per_s(row) == pytest.approx(row["tokens_per_s"], rel=tolerance)


def test_the_layouts_estimated_to_be_the_fastest_and_the_slowest_on_four_gpus_were() -> None:
    rows = [row for row in MEASUREMENTS if measured_layout(row)[0].world_size == 4]
    estimates = [estimated_tokens_per_s(row) for row in rows]
    speeds = [row["tokens_per_s"] for row in rows]
    assert len(speeds) == 7
    assert speeds[estimates.index(max(estimates))] == max(speeds)
    assert speeds[estimates.index(min(estimates))] == min(speeds)
