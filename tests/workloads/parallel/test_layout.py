"""Layouts on paper: which are legal, what they need, how fast they should be, and what is said of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.config.hardware import Node, Target, catalogue
from sweeper.planning.cost_model import ASSUMED_SHARE_OF_PEAK, build_machine
from tests.conftest import REPOSITORY, Done
from workloads.api.contract import Machine
from workloads.llama.shapes import MODELS
from workloads.parallel import Parallel, ParallelParameters
from workloads.parallel.estimate import RUNTIME_GIB, memory, step_s
from workloads.parallel.layout import DEGREES, Layout, Setting, stage_layers, why_illegal

H200 = Machine("gpu", "sm90", 8, 8, 131.0, {"bf16": 690.0}, link_gb_s=450.0, memory_gb_s=4800.0)
POWERS = [1, 2, 4, 8]


def legal(layout: Layout, setting: Setting) -> bool:
    """The rules once more, written as one condition."""
    shape, length = setting.shape, setting.sequence_length
    data = layout.replicate * layout.shard
    batches = layout.global_batch / (layout.micro_batch * data)
    schedule_fits = (layout.schedule == "1f1b") == (layout.stages == 1)
    in_line = layout.pipeline > 1
    return (
        data * layout.tensor * layout.context * layout.pipeline == setting.world_size
        and shape.heads % layout.tensor == shape.kv_heads % layout.tensor == 0
        and shape.intermediate_size % layout.tensor == shape.vocabulary % layout.tensor == 0
        and (length // layout.context) % layout.tensor == 0
        and layout.tensor <= setting.ranks_per_node
        and (layout.context == 1 or length % (2 * layout.context) == 0)
        and batches == int(batches)
        and layout.pipeline * layout.stages <= shape.layers
        and (schedule_fits if in_line else (layout.stages, layout.schedule) == (1, "1f1b"))
        and (not in_line or batches >= layout.pipeline)
        and (not in_line or layout.schedule == "1f1b" or batches % max(1, batches // layout.pipeline) == 0)
        and (layout.reshard or layout.shard * layout.context > 1)
        and (layout.schedule != "zero_bubble" or not (layout.reshard and data * layout.context > 1))
        and not (shape.tied and in_line)
    )


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries({name: st.sampled_from([1, 2, 3, 4]) for name in (*DEGREES, "stages", "micro_batch")}),
    st.sampled_from(["1f1b", "interleaved", "zero_bubble"]),
    st.booleans(),
    st.sampled_from([6, 8, 12]),
    st.sampled_from(["llama_tiny", "llama3_1b", "llama3_8b", "qwen2_5_7b"]),
    st.sampled_from([512, 6000]),
    st.sampled_from([1, 2, 8]),
)
def test_what_is_legal_is_what_the_rules_allow_and_the_rest_has_a_reason(
    numbers: dict[str, int], schedule: str, reshard: bool, batch: int, model: str, length: int, per_node: int
) -> None:
    layout = Layout(**numbers, schedule=schedule, reshard=reshard, global_batch=batch)  # type: ignore[arg-type]
    setting = Setting(MODELS[model], length, layout.world_size, per_node)
    rule, reason = why_illegal(layout, setting)
    assert (not reason) == (not rule) == legal(layout, setting)


def test_enumerating_finds_every_legal_layout_of_eight_ranks() -> None:
    setting = Setting(MODELS["llama3_8b"], 8192, 8, 8)
    every = [Layout(*degrees, global_batch=16) for degrees in itertools.product(POWERS, repeat=5)]
    found = [layout for layout in every if not why_illegal(layout, setting)[0]]
    # Ways to write 8 as a product of five powers of two.
    assert len(found) == 35 == sum(legal(layout, setting) for layout in every)


@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_have_all_layers_once_and_about_as_many(layers: int, stages: int) -> None:
    each = stage_layers(layers, min(stages, layers))
    assert [n for stage in each for n in stage] == list(range(layers))
    assert max(map(len, each)) - min(map(len, each)) <= 1


def needs(model: str = "llama3_8b", world: int = 8, **layout: object) -> float:
    setting = Setting(MODELS[model], 8192, world, 8)
    made = Layout(global_batch=16, **layout)  # type: ignore[arg-type]
    assert not why_illegal(made, setting)[0]
    return memory(made, setting, 2).total


def test_dividing_a_model_takes_less_memory_of_each_rank() -> None:
    whole, copies = needs(world=1), needs(replicate=8)
    assert copies >= whole > 60  # eight bytes a parameter
    for degree in ("shard", "tensor", "pipeline"):
        assert needs(**{degree: 8}) < needs(**{degree: 4, "replicate": 2}) < copies
    assert needs(shard=8, checkpointing="full") < needs(shard=8, checkpointing="selective") < needs(shard=8)
    assert needs(shard=8) < needs(shard=8, reshard=False) < copies
    assert needs(shard=8, micro_batch=1) < needs(shard=8, micro_batch=2)


MEASURED = pd.read_csv(REPOSITORY / "tests/samples/h200_layouts.csv", comment="#").to_dict("records")


def laid_out(measured: dict[str, Any]) -> tuple[Layout, Setting]:
    layout = Layout(**{name: value for name, value in measured.items() if name in Layout.__dataclass_fields__})
    ranks = layout.world_size
    return layout, Setting(MODELS["llama3_8b"], 8192, ranks, ranks, compiled=True, dtype=measured["dtype"])


def foreseen_tokens_per_s(measured: dict[str, Any]) -> float:
    """Of a GPU, as a machine is seen on which no product was measured."""
    layout, setting = laid_out(measured)
    ranks = layout.world_size
    machine = replace(H200, world_size=ranks, ranks_per_node=ranks, matrix_tflops={"bf16": ASSUMED_SHARE_OF_PEAK * 989})
    return layout.global_batch * 8192 / step_s(layout, setting, 2, machine) / ranks


@pytest.mark.parametrize("measured", MEASURED, ids=str)
def test_the_memory_estimate_is_what_a_gpu_allocated(measured: dict[str, Any]) -> None:
    assert memory(*laid_out(measured), 2).total - RUNTIME_GIB == pytest.approx(measured["gib"], rel=0.05)


@pytest.mark.parametrize("measured", [each for each in MEASURED if each["tokens_per_s"] > 0], ids=str)
def test_the_foreseen_speed_is_near_what_gpus_reached(measured: dict[str, Any]) -> None:
    within = 0.016 if laid_out(measured)[0].world_size == 4 else 0.055
    assert foreseen_tokens_per_s(measured) == pytest.approx(measured["tokens_per_s"], rel=within)


def test_the_layouts_foreseen_to_be_the_fastest_on_four_gpus_were() -> None:
    """Two are foreseen alike; what else there is comes after them."""
    on_four = [each for each in MEASURED if laid_out(each)[0].world_size == 4]
    foreseen, speeds = [foreseen_tokens_per_s(each) for each in on_four], [each["tokens_per_s"] for each in on_four]
    firsts = [speed for speed, said in zip(speeds, foreseen, strict=True) if said == pytest.approx(max(foreseen))]
    assert len(speeds) == 7 and len(firsts) == 2
    assert max(firsts) == max(speeds) and min(firsts) > 0.99 * max(speeds)
    assert speeds[foreseen.index(min(foreseen))] == min(speeds)


def test_a_machines_memory_is_the_hardwares() -> None:
    node = Node("n", 8, "a CPU", 2, "H200", ("NVIDIA H200",) * 2)
    target = Target(catalogue()["h200"], "NVIDIA H200", (node,))
    assert build_machine(target, 2, 25.0, {}).memory_gb_s == 4800
    unknown = Target(replace(catalogue()["h200"], bandwidth_tb_s=None), "a GPU", (node,))
    assert build_machine(unknown, 2, 25.0, {}).memory_gb_s is None


def test_on_paper_more_work_and_slower_links_take_longer() -> None:
    setting = Setting(MODELS["llama3_8b"], 8192, 8, 8)

    def seconds(machine: Machine = H200, **layout: object) -> float:
        return step_s(Layout(global_batch=16, **layout), setting, 2, machine)  # type: ignore[arg-type]

    assert seconds(shard=8) < seconds(shard=8, checkpointing="selective") < seconds(shard=8, checkpointing="full")
    across = replace(H200, ranks_per_node=4, network_gb_s=25.0)
    assert seconds(across, tensor=8) > 3 * seconds(tensor=8)
    assert seconds(pipeline=8, stages=2, schedule="interleaved") < seconds(pipeline=8)
    assert seconds(replicate=8) < seconds(replace(H200, memory_gb_s=2400.0), replicate=8)
    assert seconds(replace(H200, memory_gb_s=None), shard=8, reshard=False) < seconds(shard=8, reshard=False)
    assert seconds(pipeline=8, stages=2, schedule="zero_bubble") < seconds(pipeline=8, stages=2, schedule="interleaved")


def test_growing_adds_copies_and_sequences_and_never_beats_linear() -> None:
    workload, one = Parallel(), ParallelParameters(shard=8, micro_batch=2, global_batch=64)
    alone = workload.estimate(one, H200).metrics["tokens_per_s"]
    before = 1.0
    for nodes in (2, 4, 64, 1024):
        grown = workload.estimate(workload.scale(one, nodes), replace(H200, world_size=8 * nodes))
        share = grown.metrics["tokens_per_s"] / alone / nodes
        assert not grown.unsupported_reason and 0.5 < share <= before
        before = share


# ── as a user sees it ──


def test_a_plan_shows_what_would_be_tried_what_not_and_how_it_would_grow(
    say: Callable[..., Done], tmp_path: Path
) -> None:
    done = say("workload=parallel", "gpus=2", "plan=true", "nodes=1,16", "price_per_hour=2.5")
    assert done.code == 0, done.err
    tried, excluded = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) points (?:may be tried|left out)", done.out)
    )
    assert 0 < tried < 100 and tried + excluded == 41_472
    assert "the degrees multiply to the number of ranks" in done.out
    assert "fixed    model=llama_tiny sequence_length=64" in done.out
    assert "shard 2, micro-batch 4 x 1" in done.out and "of linear" in done.out and "assumed:" in done.out
    written = next(tmp_path.glob("sweeps/*/plan.csv")).read_text().splitlines()
    assert len(written) == 1 + 41_472 and not list(tmp_path.glob("sweeps/*/study.journal"))


def test_a_plan_is_made_for_gpus_that_are_not_here(say: Callable[..., Done]) -> None:
    done = say("workload=parallel", "model=llama70b", "gpus=16", "hardware=h200", "plan=true", "space.tensor=8")
    assert done.code == 0, done.err
    assert "16 x h200, on paper" in done.out and "it fits into memory" in done.out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["gpus=2", "space.tensor=2", "space.shard=2"], "“the degrees multiply to the number of ranks”"),
        ([*(f"space.{name}=1" for name in DEGREES), "space.micro_batch=3"], "no multiple of micro-batch 3"),
        (["gpus=2", "strategy=balanced", "model=llama70b"], "it has llama3_8b, qwen2_5_7b"),
        (["gpus=2", "hardware=h200"], "hardware=h200: there is none"),
        (["gpus=2", "nodes=2,x"], "nodes=2,x: numbers of nodes"),
        (["workload=matmul", "nodes=2"], "nodes: matmul does not foresee how it would grow"),
        (["gpus=2", "space.learning_rate=interval(0.1,0.2)"], "every point is looked at before"),
    ],
)
def test_what_no_layout_can_do_is_said_before_anything_starts(
    say: Callable[..., Done], words: list[str], wanted: str
) -> None:
    done = say("workload=parallel", *words)
    assert done.code == 2 and wanted in done.err and len(done.err.splitlines()) <= 2
