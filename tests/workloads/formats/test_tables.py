"""This project's own trainer, unknown trainers, and the tables of names agree with the planner."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.formats import example
from tests.support.planner_estimates import cluster
from workloads.api.contract import Machine
from workloads.api.registry import load
from workloads.command.layouts import estimate_layout
from workloads.formats import megatron, torchtitan
from workloads.formats.files import render
from workloads.formats.own import own_support
from workloads.layouts.layout import ExpertLoads
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import MODELS, TRAINED_MODELS


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tp": 2}, ""),  # programs pad a vocabulary
        ({"pp": 4, "stages_per_rank": 2, "schedule": "interleaved", "micro_batch": 2, "dp_shard": 2}, "multiple of 4"),
    ],
)
def test_a_program_of_an_unknown_trainer_follows_the_rules_of_other_trainers(
    layout: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for models in (MODELS, TRAINED_MODELS):
        monkeypatch.setitem(models, "odd", replace(MODELS["llama3_8b"], vocabulary=50_257))
    sizes: dict[str, Any] = {"global_batch": "24", "sequence_length": "1024", "dtype": "bf16"}
    settings = load("command").Settings(run="x", model="odd", layout=layout, **sizes)  # type: ignore[attr-defined]
    estimate = estimate_layout(settings, {}, Machine("gpu", "sm90", 8, 8, 80.0, cluster=cluster(8)))
    assert (reason in estimate.unsupported_reason) if reason else not estimate.unsupported_reason


def test_own_sweeps_have_what_the_planner_says_of_this_project_s_trainer() -> None:
    values = own_support().values
    runs = {name: some for name, some in TRAINERS["own"].runs.items() if name not in ("dispatcher", "expert_overlap")}
    assert {name: set(values[name]) for name in runs} == {name: set(some) for name, some in runs.items()}


@pytest.mark.parametrize("loads", ["equal", "natural"])
def test_own_sweeps_route_tokens_as_planned(loads: ExpertLoads) -> None:
    text = render(replace(example("own", MODELS["qwen3_30b_a3b"]), expert_loads=loads), 8).text
    assert ("space.imbalance=1 " in text) == (loads == "equal")


def test_what_follows_from_a_job_is_written_of_settings_of_the_table() -> None:
    for module in (megatron, torchtitan):
        of_fields, written = ({name.key for name in module.NAMES if getattr(name, way)} for way in ("field", "write"))
        assert module.WRITTEN.keys() <= written
        assert {name.key for name in module.NAMES if name.write is None} <= of_fields
