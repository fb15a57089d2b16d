"""The search leaves out no layout that an estimate of all layouts puts among the best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sweeper.commands.plan.answer import ESTIMATOR
from sweeper.preflight.clusters import build_cluster
from tests.support.planner import flatten
from workloads.estimator.search import USABLE_MEMORY, find_layouts
from workloads.estimator.step import estimate_job
from workloads.layouts.enumeration import list_families
from workloads.layouts.layout import Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.hugging_face import load_model

SMALL_SPACES: list[tuple[str, str, str, int, int, dict[str, Any]]] = [
    ("llama3_8b", "own", "h100", 8, 16, {"cp": 1}),
    ("llama3_70b", "torchtitan", "h200", 16, 32, {"cp": 1, "tp": 8}),
    ("llama3_70b", "own", "h100_96gb", 32, 64, {"reshard_after_forward": True, "cp": 1, "micro_batch": 1, "tp": 4}),
    ("qwen3_30b_a3b", "megatron", "h100", 8, 16, {"cp": 1, "tp": 2, "micro_batch": 1}),
    ("llama3_8b", "deepspeed", "a100", 12, 24, {}),
]


@pytest.mark.parametrize(("model", "trainer", "device", "gpus", "batch", "fixed"), SMALL_SPACES)
def test_pruning_keeps_the_layouts_that_an_estimate_of_each_one_puts_first(
    model: str, trainer: str, device: str, gpus: int, batch: int, fixed: dict[str, Any]
) -> None:
    layout = Layout(global_batch=batch)
    template, target = Job(load_model(model), layout, 4096, trainer), build_cluster(device, None, gpus)
    options, fixed = TRAINERS[trainer].search, {**TRAINERS[trainer].fixed_degrees(), **fixed}
    estimates = [
        estimate_job(replace(template, layout=layout), target)
        for layout in flatten(list_families(template, target, options, fixed))
    ]
    usable_gib = USABLE_MEMORY * target.device.memory_gib
    fitting = sorted(e.step.total_s for e in estimates if e.memory.total_gib <= usable_gib)
    assert 0 < len(fitting) < len(estimates)
    for keep in (1, 20):
        result = find_layouts(template, target, ESTIMATOR, options, fixed, keep)
        assert [candidate.estimate.step.total_s for candidate in result.best] == pytest.approx(fitting[:keep])
        assert result.estimated + result.too_large + result.slower == len(estimates)
        assert result.estimated < len(fitting) or len(fitting) <= keep
