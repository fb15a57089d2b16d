"""The layout rules and the cost model: validity, memory, speed, and what a plan shows of them."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node, Target, planned_target
from tests.conftest import REPOSITORY, CommandResult
from tests.support.planner import machine_of
from workloads.api.contract import Machine
from workloads.llama.flops import model_flops_per_token
from workloads.llama.shapes import MODELS
from workloads.parallel import Parallel, ParallelParameters
from workloads.parallel.estimates import build_job, estimate_memory_gib, estimate_speed
from workloads.parallel.layout import BlockKind, Layout, Setting, State, rank_stages
from workloads.parallel.rules import find_violation
from workloads.planner.estimate import JobEstimate
from workloads.planner.pipeline import stage_layers
from workloads.planner.rules import DEGREES
from workloads.planner.step import estimate_job, estimate_step

H200 = machine_of(planned_target(catalogue()["h200"], 8), 8)
POWERS_OF_TWO = [1, 2, 4, 8]


def is_valid(layout: Layout, setting: Setting) -> bool:
    """The rules a second time, written as one condition."""
    shape, length = setting.shape, setting.sequence_length
    dp = layout.dp_replicate * layout.dp_shard
    microbatches = layout.global_batch / (layout.micro_batch * dp)
    is_split, is_v = layout.schedule in ("zero_bubble", "zbv", "dualpipev"), layout.schedule in ("zbv", "dualpipev")
    schedule_fits = (layout.schedule == "1f1b") == (layout.stages_per_rank == 1)
    schedule_fits = schedule_fits and (not is_v or layout.stages_per_rank == 2)
    is_pipeline, is_in_rounds = layout.pp > 1, layout.schedule in ("interleaved", "zero_bubble")
    uses_fsdp = dp * layout.cp > 1 or setting.state == "fp32"
    return (
        dp * layout.tp * layout.cp * layout.pp == setting.world_size
        and shape.heads % layout.tp == shape.kv_heads % layout.tp == 0
        and shape.intermediate_size % layout.tp == shape.vocabulary % layout.tp == 0
        and (length // layout.cp) % layout.tp == 0
        and layout.tp <= setting.ranks_per_node
        and (layout.cp == 1 or length % (2 * layout.cp) == 0)
        and microbatches == int(microbatches)
        and layout.pp * layout.stages_per_rank <= shape.layers
        and (schedule_fits if is_pipeline else (layout.stages_per_rank, layout.schedule) == (1, "1f1b"))
        and (not is_pipeline or microbatches >= layout.pp)
        and (not is_pipeline or not is_in_rounds or microbatches % max(1, microbatches // layout.pp) == 0)
        and (layout.schedule != "dualpipev" or microbatches >= 2 * layout.pp)
        and (layout.reshard_after_forward or layout.dp_shard * layout.cp > 1 or setting.state == "fp32")
        and (not is_split or not (layout.reshard_after_forward and uses_fsdp))
        and not (shape.tied and is_pipeline)
        and (setting.block == "pytorch" or (layout.tp == layout.cp == 1 and not is_split))
    )


@settings(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {name: st.sampled_from([1, 2, 3, 4]) for name in (*DEGREES, "stages_per_rank", "micro_batch")}
    ),
    st.sampled_from(["1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]),
    st.booleans(),
    st.sampled_from([6, 8, 12]),
    st.sampled_from(["llama_tiny", "llama3_1b", "llama3_8b", "qwen2_5_7b"]),
    st.sampled_from([512, 6000]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([("fp32", "pytorch"), ("bf16", "pytorch"), ("fp32", "manual")]),
)
def test_a_layout_is_valid_or_has_a_violated_rule_with_a_reason(
    degrees: dict[str, int],
    schedule: str,
    reshard_after_forward: bool,
    global_batch: int,
    model: str,
    length: int,
    ranks_per_node: int,
    training: tuple[State, BlockKind],
) -> None:
    layout = Layout(
        **degrees,
        schedule=schedule,  # type: ignore[arg-type]
        reshard_after_forward=reshard_after_forward,
        global_batch=global_batch,
    )
    state, block = training
    setting = Setting(MODELS[model], length, layout.world_size, ranks_per_node, state=state, block=block)
    violation = find_violation(layout, setting)
    assert (violation is None) == is_valid(layout, setting)
    assert violation is None or (violation.rule and violation.reason)


@pytest.mark.parametrize(
    ("layout", "training", "reason"),
    [
        (Layout(tp=2), {"dtype": "fp8_tensorwise"}, ""),
        (Layout(tp=2), {"dtype": "fp8_rowwise"}, ""),
        (Layout(tp=2), {"dtype": "mxfp8"}, "tp has to be 1"),
        (Layout(dp_shard=2), {"dtype": "nvfp4"}, ""),
        (Layout(dp_shard=2), {"dtype": "fp8_tensorwise", "block": "manual"}, "needs block pytorch"),
        (Layout(dp_shard=2), {"dtype": "fp32", "state": "bf16"}, "state has to be fp32"),
        (Layout(dp_replicate=2, reshard_after_forward=False), {"state": "fp32"}, ""),
        (Layout(dp_replicate=2, reshard_after_forward=False), {"state": "bf16"}, "shard no weights in state bf16"),
    ],
)
def test_a_training_is_valid_or_names_what_it_needs(layout: Layout, training: dict[str, Any], reason: str) -> None:
    setting = Setting(MODELS["llama3_8b"], 8192, layout.world_size, 8, **training)
    violation = find_violation(replace(layout, global_batch=4), setting)
    assert reason in violation.reason if violation else not reason


def test_fp8_sizes_of_a_rank_are_multiples_of_16() -> None:
    shape = replace(MODELS["llama3_8b"], intermediate_size=14344)
    setting = Setting(shape, 8192, 4, 8, dtype="fp8_tensorwise")
    violation = find_violation(Layout(tp=4, global_batch=4), setting)
    assert violation and "tp 4 leaves 3586 of intermediate size" in violation.reason


def test_every_valid_layout_of_eight_ranks_is_found() -> None:
    setting = Setting(MODELS["llama3_8b"], 8192, 8, 8)
    layouts = [Layout(*degrees, global_batch=16) for degrees in itertools.product(POWERS_OF_TWO, repeat=5)]
    valid = [layout for layout in layouts if find_violation(layout, setting) is None]
    # The ways to write 8 as a product of five powers of two.
    assert len(valid) == 35 == sum(is_valid(layout, setting) for layout in layouts)


@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_have_every_layer_once_and_differ_by_at_most_one(layers: int, stages: int) -> None:
    stage_ranges = stage_layers(layers, min(stages, layers))
    assert [layer for stage in stage_ranges for layer in stage] == list(range(layers))
    assert max(map(len, stage_ranges)) - min(map(len, stage_ranges)) <= 1


@given(st.sampled_from(["1f1b", "interleaved", "zbv"]), st.integers(1, 8), st.integers(1, 3))
def test_every_stage_is_on_one_rank_and_the_ends_of_a_v_are_on_the_first(
    schedule: str, pp: int, stages_per_rank: int
) -> None:
    layout = Layout(pp=pp, stages_per_rank=2 if schedule == "zbv" else stages_per_rank, schedule=schedule)  # type: ignore[arg-type]
    stages = [rank_stages(layout, rank) for rank in range(pp)]
    assert sorted(itertools.chain(*stages)) == list(range(layout.total_stages))
    assert schedule != "zbv" or stages[0] == [0, layout.total_stages - 1]


@pytest.mark.parametrize(
    ("fields", "setting", "reason"),
    [
        ({"tp": 2, "async_tp": True}, {}, ""),
        ({"dp_shard": 2, "async_tp": True}, {}, "tp 1 has no collectives"),
        ({"tp": 2, "async_tp": True}, {"compiled": False}, "compile has to be true"),
        ({"tp": 2, "async_tp": True}, {"on_gpu": False}, "on a CPU it has to be false"),
        ({"tp": 2, "async_tp": True}, {"ranks_per_node": 1, "tp_across_nodes": True}, "GPUs of one node"),
        ({"cuda_graph": True}, {"state": "bf16"}, ""),
        ({"cuda_graph": True}, {}, "state has to be bf16"),
        ({"cuda_graph": True}, {"state": "bf16", "on_gpu": False}, "on a CPU it has to be false"),
        ({"dp_shard": 2, "cuda_graph": True}, {"state": "bf16"}, "it needs one rank, these are 2"),
        ({"dp_shard": 2}, {"document_tokens": 512}, ""),
        ({"cp": 2}, {"document_tokens": 512}, "cp has to be 1"),
        ({"dp_shard": 2}, {"document_tokens": 512, "block": "manual"}, "needs block pytorch"),
        ({"dp_shard": 2}, {"document_tokens": 512, "dtype": "fp32"}, "half precision"),
        ({"dp_shard": 2}, {"document_tokens": 512, "dtype": "fp32", "on_gpu": False}, ""),
        ({"dp_shard": 2, "cp_method": "ring"}, {}, "cp_method has to be allgather"),
        ({"cp": 2, "cp_method": "ring"}, {}, ""),
    ],
)
def test_what_a_layout_cannot_do_is_refused_with_the_reason(
    fields: dict[str, Any], setting: dict[str, Any], reason: str
) -> None:
    fields = {"global_batch": 16} | fields
    setting = {"ranks_per_node": 2, "compiled": True} | setting
    layout = Layout(**fields)
    violation = find_violation(layout, Setting(MODELS["llama3_8b"], 8192, layout.world_size, **setting))
    assert (violation is None) == (not reason)
    assert violation is None or reason in violation.reason


def memory_gib(model: str = "llama3_8b", world_size: int = 8, **fields: object) -> float:
    training = {name: fields.pop(name) for name in ("state", "block") if name in fields}
    setting = Setting(MODELS[model], 8192, world_size, 8, **training)  # type: ignore[arg-type]
    layout = Layout(global_batch=16, **fields)  # type: ignore[arg-type]
    assert find_violation(layout, setting) is None
    return estimate_memory_gib(layout, setting, H200)


def test_sharding_a_model_takes_less_memory_of_each_rank() -> None:
    one_rank_gib, copies_gib = memory_gib(world_size=1), memory_gib(dp_replicate=8)
    assert copies_gib >= one_rank_gib > 120  # sixteen bytes a parameter
    for degree in ("dp_shard", "tp", "pp"):
        assert memory_gib(**{degree: 8}) < memory_gib(**{degree: 4, "dp_replicate": 2}) < copies_gib
    full_gib, selective_gib = (memory_gib(dp_shard=8, checkpointing=kind) for kind in ("full", "selective"))
    assert full_gib < selective_gib < memory_gib(dp_shard=8)
    assert memory_gib(dp_shard=8) < memory_gib(dp_shard=8, reshard_after_forward=False) < copies_gib
    assert memory_gib(cp=8, cp_method="ring") < memory_gib(cp=8)
    assert memory_gib(dp_shard=8, micro_batch=1) < memory_gib(dp_shard=8, micro_batch=2)


def test_fp32_state_takes_twice_the_memory_of_a_parameter_and_more_time() -> None:
    """8B: 16 bytes a parameter instead of 8, and gradients that are reduced and kept in fp32."""
    parameters = MODELS["llama3_8b"].parameters
    for layout, least_bytes in ({"dp_shard": 8}, 6 / 8), ({"dp_shard": 8, "reshard_after_forward": False}, 2 + 6 / 8):
        added_gib = memory_gib(**layout) - memory_gib(**layout, state="bf16")
        assert least_bytes * parameters / 2**30 < added_gib < (least_bytes + 1) * parameters / 2**30
    setting, layout = Setting(MODELS["llama3_8b"], 8192, 8, 8), Layout(dp_shard=8, global_batch=16)
    fp32_s, bf16_s = (step_s(layout, replace(setting, state=state), H200) for state in ("fp32", "bf16"))
    assert 1 < fp32_s / bf16_s < 1.1


def step_s(layout: Layout, setting: Setting, machine: Machine) -> float:
    return estimate_step(build_job(layout, setting), machine.cluster).total_s


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


def test_a_machine_has_the_memory_bandwidth_of_its_hardware() -> None:
    node = Node("n", 8, "a CPU", 2, "H200", ("NVIDIA H200",) * 2)
    target = Target(catalogue()["h200"], "NVIDIA H200", (node,))
    assert machine_of(target, 2).cluster.device.memory_gb_s == 4800
    unknown = Target(replace(catalogue()["h200"], bandwidth_tb_s=None), "a GPU", (node,))
    assert machine_of(unknown, 2).cluster.device.memory_gb_s == math.inf


def planned_machine(name: str) -> Machine:
    """Eight devices of one node, of which nothing was measured."""
    return machine_of(planned_target(catalogue()[name], 8), 8)


def test_ranks_of_a_node_have_the_links_among_themselves_alone_without_a_switch() -> None:
    target = planned_target(catalogue()["mi300x"], 8)
    for ranks, links in ((2, 1), (4, 3), (8, 7)):
        topology = machine_of(target, ranks).cluster.topology
        assert (topology.gpus_per_domain, topology.link_gb_s) == (ranks, pytest.approx(links * 64))
    assert machine_of(planned_target(catalogue()["h200"], 8), 2).cluster.topology.link_gb_s == 450


def with_topology(machine: Machine, **changes: Any) -> Machine:
    cluster = machine.cluster
    return replace(machine, cluster=replace(cluster, topology=replace(cluster.topology, **changes)))


def with_memory_gb_s(machine: Machine, memory_gb_s: float) -> Machine:
    device = replace(machine.cluster.device, memory_gb_s=memory_gb_s)
    return replace(machine, cluster=replace(machine.cluster, device=device))


def test_a_layout_of_small_groups_is_estimated_slower_where_gpus_have_links_in_pairs() -> None:
    """Eight MI300X have seven links each: a pair uses one of them, a group of eight all."""
    setting = Setting(MODELS["llama3_8b"], 8192, 8, 8)

    def layout_s(machine: Machine, **degrees: int) -> float:
        return step_s(Layout(global_batch=16, **degrees), setting, machine)

    mi300x = planned_machine("mi300x")
    switched = with_topology(mi300x, wiring="switch")
    for degrees in ({"dp_shard": 8}, {"tp": 8}):
        assert layout_s(mi300x, **degrees) == layout_s(switched, **degrees)
    for degrees in ({"tp": 2, "dp_replicate": 4}, {"tp": 2, "dp_shard": 4}, {"tp": 4, "dp_shard": 2}):
        assert layout_s(mi300x, **degrees) > layout_s(switched, **degrees)
        assert layout_s(mi300x, **degrees) > layout_s(mi300x, dp_shard=8)


def test_a_layout_fits_that_needs_less_than_what_the_driver_reports() -> None:
    """By the vendor's 141 GB, taken as 141e9 bytes, 127.4 GiB fit on an H200; its driver reports 139.7 GiB."""
    layout = {"tp": 4, "pp": 2, "stages_per_rank": 1, "micro_batch": 1, "global_batch": 32}
    parameters = ParallelParameters(model="llama3_70b", sequence_length=8192, state="bf16", **layout)  # type: ignore[arg-type]
    estimate = Parallel().estimate(parameters, planned_machine("h200"))
    assert 127.4 < estimate.metrics["memory_gib"] < 135.5 and not estimate.unsupported_reason
    assert Parallel().estimate(parameters, planned_machine("h100")).rule == "the layout fits into memory"


def test_more_work_and_slower_links_are_estimated_to_take_longer() -> None:
    setting = Setting(MODELS["llama3_8b"], 8192, 8, 8)

    def layout_s(machine: Machine = H200, **fields: object) -> float:
        return step_s(Layout(global_batch=16, **fields), setting, machine)  # type: ignore[arg-type]

    selective_s, full_s = (layout_s(dp_shard=8, checkpointing=kind) for kind in ("selective", "full"))
    assert layout_s(dp_shard=8) < selective_s < full_s
    two_nodes = with_topology(H200, gpus_per_domain=4)
    assert layout_s(two_nodes, tp=8) > 1.5 * layout_s(tp=8)  # a ring over the four NICs of each node
    interleaved_s, zero_bubble_s, zbv_s, dualpipev_s = (
        layout_s(pp=8, stages_per_rank=2, schedule=schedule)
        for schedule in ("interleaved", "zero_bubble", "zbv", "dualpipev")
    )
    assert zero_bubble_s < interleaved_s < layout_s(pp=8)
    assert zbv_s < dualpipev_s < zero_bubble_s
    assert layout_s(tp=8, async_tp=True) < layout_s(tp=8)
    assert layout_s(cp=8, cp_method="ring") < layout_s(cp=8)
    assert layout_s(two_nodes, cp=8, cp_method="ring") > layout_s(cp=8, cp_method="ring")
    assert layout_s(dp_replicate=8) < layout_s(with_memory_gb_s(H200, 2400.0), dp_replicate=8)
    unknown_memory = with_memory_gb_s(H200, math.inf)
    stays_gathered: dict[str, object] = {"dp_shard": 8, "reshard_after_forward": False}
    assert layout_s(unknown_memory, **stays_gathered) < layout_s(**stays_gathered)


def on_nodes(machine: Machine, nodes: int) -> Machine:
    ranks = nodes * machine.ranks_per_node
    return replace(machine, world_size=ranks, cluster=replace(machine.cluster, gpus=ranks))


def test_the_mfu_of_documents_counts_the_attention_within_them_alone() -> None:
    layout, setting = Layout(dp_shard=8, global_batch=16), Setting(MODELS["llama3_8b"], 8192, 8, 8)
    packed = replace(setting, document_tokens=512)
    whole, within = (estimate_speed(layout, kind, H200) for kind in (setting, packed))
    estimate = estimate_job(build_job(layout, setting), H200.cluster)
    assert whole["mfu"] == pytest.approx(estimate.mfu) and within["tokens_per_s"] > whole["tokens_per_s"]
    flops = model_flops_per_token(MODELS["llama3_8b"], packed.attended_length)
    assert within["mfu"] == pytest.approx(within["tokens_per_s"] * flops / 8 / 989e12)


def test_scaling_adds_copies_and_sequences_and_never_beats_linear() -> None:
    workload, parameters = Parallel(), ParallelParameters(dp_shard=8, micro_batch=2, global_batch=64)
    one_node_tokens_per_s = workload.estimate(parameters, H200).metrics["tokens_per_s"]
    previous_efficiency = 1.0
    for nodes in (2, 4, 64, 1024):
        estimate = workload.estimate(workload.scale(parameters, nodes), on_nodes(H200, nodes))
        efficiency = estimate.metrics["tokens_per_s"] / one_node_tokens_per_s / nodes
        assert not estimate.unsupported_reason and 0.5 < efficiency <= previous_efficiency
        previous_efficiency = efficiency


# ── the command line ──


def test_a_plan_shows_tried_and_excluded_points_and_the_projection(
    run_cli: Callable[..., CommandResult], tmp_path: Path
) -> None:
    result = run_cli("workload=parallel", "gpus=2", "plan=true", "projection.nodes=1,16", "price_per_hour=2.5")
    assert result.code == 0, result.err
    tried, excluded = (
        int(n.replace(",", "")) for n in re.findall(r"(?m)^([\d,]+) (?:valid|excluded) points", result.out)
    )
    assert 0 < tried < 100 and tried + excluded == 2**5 * 2 * 3 * 3 * 3 * 2
    assert "the degrees multiply to the number of ranks" in result.out
    assert "fixed    model=llama_tiny sequence_length=64" in result.out
    assert "dp_shard 2, micro-batch 4 x 1" in result.out and "of linear" in result.out and "assumptions:" in result.out
    table = pd.read_csv(next(tmp_path.glob("sweeps/*/plan.csv")))
    assert (
        table.points.sum() == tried + excluded
        and (table.unsupported_reason.isna().sum() == tried)
        and not list(tmp_path.glob("sweeps/*/study.journal"))
    )


def test_a_plan_can_be_made_for_gpus_that_this_machine_does_not_have(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=parallel", "model=llama3_70b", "gpus=16", "hardware=h200", "plan=true", "space.tp=8")
    assert result.code == 0, result.err
    assert "16 x h200, planned" in result.out and "the layout fits into memory" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpus=2", "space.tp=2", "space.dp_shard=2"], "“the degrees multiply to the number of ranks”"),
        ([*(f"space.{name}=1" for name in DEGREES), "space.micro_batch=3"], "not a multiple of micro-batch 3"),
        (["gpus=2", "workload.strategy=balanced", "model=llama3_70b"], "Available: llama3_8b, qwen2_5_7b"),
        (
            ["gpus=12", "hardware=h100", "plan=true", "workload.strategy=memory_optimized"],
            "gpus=12: workload.strategy=memory_optimized has tp=4 x pp=2 for llama3_8b on nvidia",
        ),
        (["gpus=2", "hardware=h200"], "hardware=h200: not in the cluster"),
        (["gpus=2", "projection.nodes=2,x"], "projection.nodes=2,x: must be numbers of nodes"),
        (
            ["gpus=16", "hardware=h100", "plan=true", "projection.nodes=1,2"],
            "projection.nodes=1: copies of a trial of 16 GPUs fill multiples of 2 nodes of 8, such as",
        ),
        (["workload=matmul", "projection.nodes=2"], "projection.nodes: matmul cannot project to more nodes"),
        (["gpus=2", "space.learning_rate=interval(0.1,0.2)"], "every point is estimated before"),
    ],
)
def test_an_impossible_layout_is_refused_before_anything_starts(
    run_cli: Callable[..., CommandResult], arguments: list[str], message: str
) -> None:
    result = run_cli("workload=parallel", *arguments)
    assert result.code == 2 and message in result.err and len(result.err.splitlines()) <= 2
