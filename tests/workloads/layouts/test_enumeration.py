"""A search offers this project's trainer only layouts that it runs."""

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.planner import flatten
from tests.support.planner_estimates import cluster, job
from workloads.layouts.enumeration import list_families
from workloads.layouts.layout import SPLIT_SCHEDULES
from workloads.layouts.rules import Site, find_violation
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import MODELS, TRAINED_MODELS

WORDS: dict[str, list[Any]] = {
    "schedule": ["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"],
    "checkpointing": ["none", "selective", "full"],
    "reshard_after_forward": [False, True],
    "tp_overlap": ["none", "async"],
    "cp_method": ["allgather", "ring"],
    "tp": [1, 2, 4],
    "pp": [1, 2, 4],
}


@given(
    model=st.sampled_from(sorted(TRAINED_MODELS)),
    gpus=st.sampled_from([1, 4, 6, 8, 16]),
    fixed=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in WORDS.items()}),
    precision=st.sampled_from(["bf16", "fp8_tensorwise", "fp8_rowwise", "mxfp8"]),
    state=st.sampled_from(["fp32", "bf16"]),
    sequence_length=st.sampled_from([4096, 8192, 8200]),
)
@examples(100)
def test_every_offered_layout_is_one_that_the_trainer_runs(
    model: str, gpus: int, fixed: dict[str, Any], precision: str, state: Any, sequence_length: int
) -> None:
    work = replace(
        job("llama3_8b", trainer="own", global_batch=96),
        model=MODELS[model],
        precision=precision,
        state=state,
        sequence_length=sequence_length,
        compiled=fixed.get("schedule") not in SPLIT_SCHEDULES,
    )
    target = cluster(gpus)
    target = replace(target, device=replace(target.device, peak_tflops={}))  # any precision
    for offered in flatten(islice(list_families(work, target, TRAINERS["own"].search, fixed), 200)):
        assert find_violation(replace(work, layout=offered), Site(gpus, 8)) is None


@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_a_schedule_that_splits_the_backward_pass_is_offered_as_it_runs(schedule: str) -> None:
    work = replace(job("llama3_8b", trainer="own", global_batch=96), compiled=False)
    families = list(list_families(work, cluster(8), TRAINERS["own"].search, {"schedule": schedule}))
    pipelines = [family for family in families if family.template.pp > 1]
    assert pipelines and all(family.reshardings == (False,) for family in pipelines)
    assert not any("selective" in family.checkpointings for family in pipelines)
    violation = find_violation(replace(work, layout=pipelines[0].template, compiled=True), cluster(8))
    assert violation is not None and "compiled" in violation.reason
