"""The points of a space of layouts: all of them, and what is left out of a large one."""

from collections import Counter
from typing import Any

import pytest

from sweeper.config.catalogue import catalogue
from sweeper.preflight.devices import planned_target
from tests.support.planner import machine_of
from workloads.api.contract import Machine, Workload
from workloads.layouts.enumeration import divisors
from workloads.parallel import Parallel, points

CONSTANTS: dict[str, Any] = {"model": "llama3_8b", "global_batch": 24}


def machine(gpus: int) -> Machine:
    return machine_of(planned_target(catalogue()["h200"], gpus), gpus)


def space(gpus: int) -> dict[str, Any]:
    degrees = dict.fromkeys(("dp_replicate", "dp_shard", "tp", "cp", "pp"), divisors(gpus))
    return {
        **degrees,
        "stages_per_rank": (1, 2),
        "schedule": ("1f1b", "interleaved"),
        "micro_batch": (1, 3),
        "checkpointing": ("none", "full"),
        "reshard_after_forward": (True, False),
    }


def test_points_that_are_excluded_together_are_those_that_each_rule_excludes_one_by_one() -> None:
    dimensions = {name: values for name, values in space(6).items() if name not in ("dp_replicate", "checkpointing")}
    together = list(Parallel().list_candidates(dimensions, CONSTANTS, machine(6)))
    one_by_one = list(Workload.list_candidates(Parallel(), dimensions, CONSTANTS, machine(6)))
    counts = Counter[str]()
    for candidate in together:
        counts[candidate.estimate.rule] += candidate.count
    assert counts == Counter(candidate.estimate.rule for candidate in one_by_one)
    valid = [candidate.point for candidate in together if not candidate.estimate.unsupported_reason]
    assert sorted(map(str, (sorted(point.items()) for point in valid))) == sorted(
        str(sorted(candidate.point.items())) for candidate in one_by_one if not candidate.estimate.unsupported_reason
    )
    assert len(together) < len(one_by_one) / 10


def test_of_a_large_space_the_fastest_layouts_are_listed_and_the_others_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def list_all() -> tuple[list[float], int, int]:
        candidates = list(Parallel().list_candidates(space(8), CONSTANTS, machine(8)))
        rates = [c.estimate.metrics["tokens_per_s"] for c in candidates if not c.estimate.unsupported_reason]
        left_out = sum(c.count for c in candidates if c.estimate.rule == points.SLOWER_RULE)
        return sorted(rates, reverse=True), sum(c.count for c in candidates), left_out

    rates, total, left_out = list_all()
    monkeypatch.setattr(points, "LISTED", 10)
    fewer, same_total, slower = list_all()
    assert left_out == 0 and slower > 0
    assert fewer[:10] == rates[:10] and 10 <= len(fewer) < len(rates) and same_total == total


def test_degrees_that_are_fixed_count_in_the_product() -> None:
    dimensions = {"tp": (1, 2, 4), "dp_shard": (1, 2, 4)}
    candidates = list(Parallel().list_candidates(dimensions, CONSTANTS | {"pp": 2}, machine(8)))
    assert [c.point for c in candidates if c.point] == [
        {"tp": 1, "dp_shard": 4},
        {"tp": 2, "dp_shard": 2},
        {"tp": 4, "dp_shard": 1},
    ]
    assert candidates[-1].count == 6 and candidates[-1].estimate.rule == points.WORLD_SIZE_RULE
