"""The cost model of a layout: what takes more memory or more time."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from sweeper.config.catalogue import catalogue
from sweeper.config.hardware import Node, Target
from sweeper.preflight.devices import planned_target
from tests.support.planner import machine_of
from workloads.api.contract import Machine
from workloads.estimator import operations
from workloads.estimator.estimate import StepTime
from workloads.estimator.memory import peak_memory
from workloads.estimator.own_trainer import keeps_weights
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.step import estimate_job, step_seconds
from workloads.layouts.layout import Checkpointing
from workloads.llama.model import Block, rope_table
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS
from workloads.parallel import Parallel, ParallelParameters
from workloads.parallel.stage import CheckpointedBlock

H200 = machine_of(planned_target(catalogue()["h200"], 8), 8)


def memory_gib(model: str = "llama3_8b", world_size: int = 8, **fields: object) -> float:
    parameters = training(model=model, **fields)
    assert parameters.find_violation(replace(H200, world_size=world_size)) is None
    return peak_memory(parameters.job, H200.cluster).needed_gib


def training(**fields: Any) -> ParallelParameters:
    return ParallelParameters(**{"compile": False, "global_batch": 16, **fields})


def test_sharding_a_model_takes_less_memory_of_each_rank() -> None:
    one_rank_gib, copies_gib = memory_gib(world_size=1), memory_gib(dp_replicate=8)
    assert copies_gib >= one_rank_gib > 120  # sixteen bytes a parameter
    for degree in ("dp_shard", "tp", "pp"):
        assert memory_gib(**{degree: 8}) < memory_gib(**{degree: 4, "dp_replicate": 2}) < copies_gib
    full_gib, selective_gib = (memory_gib(dp_shard=8, checkpointing=kind) for kind in ("full", "selective"))
    assert full_gib < selective_gib < memory_gib(dp_shard=8)
    every_second_gib = memory_gib(dp_shard=8, checkpointing="full", checkpointing_freq=2)
    assert every_second_gib == pytest.approx((full_gib + memory_gib(dp_shard=8)) / 2, rel=0.05)
    assert memory_gib(dp_shard=8) < memory_gib(dp_shard=8, reshard_after_forward=False) < copies_gib
    assert memory_gib(cp=8, cp_method="ring") < memory_gib(cp=8)
    assert memory_gib(dp_shard=8, micro_batch=1) < memory_gib(dp_shard=8, micro_batch=2)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, True),
        ({"micro_batch": 2}, False),  # all of a step
        ({"checkpointing": "selective"}, False),  # a block saves less than its weights take
        ({"sequence_length": 2048}, False),
        ({"reshard_after_forward": False}, False),
        ({"pp": 2}, False),
    ],
)
def test_weights_stay_gathered_between_micro_batches_where_that_takes_no_memory(
    fields: dict[str, Any], kept: bool
) -> None:
    job = training(dp_shard=8, state="bf16", block="manual", **fields).job
    assert keeps_weights(PlacedJob(job, H200.cluster)) == kept


def test_fp32_state_takes_twice_the_memory_of_a_parameter_and_more_time() -> None:
    """8B: 16 bytes a parameter instead of 8, and gradients that are reduced and kept in fp32."""
    parameters = MODELS["llama3_8b"].parameters
    for layout, least_bytes in ({"dp_shard": 8}, 6 / 8), ({"dp_shard": 8, "reshard_after_forward": False}, 2 + 6 / 8):
        added_gib = memory_gib(**layout) - memory_gib(**layout, state="bf16")
        assert least_bytes * parameters / 2**30 < added_gib < (least_bytes + 1) * parameters / 2**30
    fp32_s, bf16_s = (step_s(H200, dp_shard=8, state=state) for state in ("fp32", "bf16"))
    assert 1 < fp32_s / bf16_s < 1.1


def step_s(machine: Machine, **fields: Any) -> float:
    return step_seconds(training(**fields).job, machine.cluster)


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
    mi300x = planned_machine("mi300x")
    switched = with_topology(mi300x, wiring="switch")
    for degrees in ({"dp_shard": 8}, {"tp": 8}):
        assert step_s(mi300x, **degrees) == step_s(switched, **degrees)
    for degrees in ({"tp": 2, "dp_replicate": 4}, {"tp": 2, "dp_shard": 4}, {"tp": 4, "dp_shard": 2}):
        assert step_s(mi300x, **degrees) > step_s(switched, **degrees)
        assert step_s(mi300x, **degrees) > step_s(mi300x, dp_shard=8)


def test_a_layout_fits_that_needs_less_than_what_the_driver_reports() -> None:
    """By the vendor's 141 GB, taken as 141e9 bytes, 127.4 GiB fit on an H200; its driver reports 139.7 GiB."""
    layout = {"tp": 4, "pp": 2, "stages_per_rank": 1, "micro_batch": 1, "global_batch": 32}
    parameters = ParallelParameters(model="llama3_70b", sequence_length=8192, state="bf16", **layout)  # type: ignore[arg-type]
    estimate = Parallel().estimate(parameters, planned_machine("h200"))
    assert 127.4 < estimate.metrics["memory_gib"] < 135.5 and not estimate.unsupported_reason
    assert Parallel().estimate(parameters, planned_machine("h100")).rule == "the layout fits into memory"


def test_more_work_and_slower_links_are_estimated_to_take_longer() -> None:
    def layout_s(machine: Machine = H200, **fields: Any) -> float:
        return step_s(machine, **fields)

    selective_s, full_s = (layout_s(dp_shard=8, checkpointing=kind) for kind in ("selective", "full"))
    assert layout_s(dp_shard=8) < selective_s < full_s
    assert layout_s(dp_shard=8) < layout_s(dp_shard=8, checkpointing="full", checkpointing_freq=2) < full_s
    two_nodes = with_topology(H200, gpus_per_domain=4)
    assert layout_s(two_nodes, tp=8) > 1.5 * layout_s(tp=8)  # a ring over the four NICs of each node
    interleaved_s, zero_bubble_s, zbv_s, dualpipev_s = (
        layout_s(pp=8, stages_per_rank=2, schedule=schedule)
        for schedule in ("interleaved", "zero_bubble", "zbv", "dualpipev")
    )
    assert zero_bubble_s < interleaved_s < layout_s(pp=8)
    assert zbv_s == dualpipev_s < interleaved_s
    assert layout_s(tp=8, async_tp=True) < layout_s(tp=8)
    assert layout_s(cp=8, cp_method="ring") < layout_s(cp=8)
    assert layout_s(two_nodes, cp=8, cp_method="ring") > layout_s(cp=8, cp_method="ring")
    assert layout_s(dp_replicate=8) < layout_s(with_memory_gb_s(H200, 2400.0), dp_replicate=8)
    unknown_memory = with_memory_gb_s(H200, math.inf)
    stays_gathered: dict[str, object] = {"dp_shard": 8, "reshard_after_forward": False}
    assert layout_s(unknown_memory, **stays_gathered) < layout_s(**stays_gathered)


def test_a_pipeline_of_experts_keeps_whole_weights_and_gradients_with_resharding_too() -> None:
    fields: dict[str, object] = {"model": "qwen3_30b_a3b", "dp_shard": 4, "pp": 2, "checkpointing": "full"}
    resharded_gib, gathered_gib = (memory_gib(reshard_after_forward=kind, **fields) for kind in (True, False))
    rank_weights = MODELS["qwen3_30b_a3b"].parameters / 2
    assert resharded_gib == gathered_gib > rank_weights * (2 + 4 + 3 * 4 / 4) / 2**30


def test_experts_beside_tensor_parallelism_are_divided_by_expert_parallelism_alone() -> None:
    def estimate(**fields: Any) -> tuple[float, StepTime]:
        fields |= {"model": "qwen3_30b_a3b", "checkpointing": "full", "micro_batch": fields.get("tp", 1)}
        return memory_gib(**fields), estimate_job(training(**fields).job, H200.cluster).step

    whole_gib, whole = estimate(dp_shard=4, tp=2)  # copies on two ranks, which add up their gradients
    parts_gib, parts = estimate(dp_shard=4, tp=2, ep=8)
    alone_gib, alone = estimate(dp_shard=8, ep=8)
    assert whole_gib > 1.5 * alone_gib and parts_gib == pytest.approx(alone_gib, rel=0.1)
    assert whole.data_parallel > 2 * parts.data_parallel and whole.expert_parallel == 0
    assert parts.expert_parallel == pytest.approx(alone.expert_parallel)  # a rank has as many tokens
    assert parts.tensor_parallel == whole.tensor_parallel > alone.tensor_parallel == 0


def on_nodes(machine: Machine, nodes: int) -> Machine:
    ranks = nodes * machine.ranks_per_node
    return replace(machine, world_size=ranks, cluster=replace(machine.cluster, gpus=ranks))


def test_the_mfu_of_documents_counts_the_attention_within_them_alone() -> None:
    plain, packed = (training(dp_shard=8, document_tokens=tokens) for tokens in (0, 512))
    whole, within = (kind.estimate_speed(H200) for kind in (plain, packed))
    estimate = estimate_job(plain.job, H200.cluster)
    assert whole["mfu"] == pytest.approx(estimate.mfu) and within["tokens_per_s"] > whole["tokens_per_s"]
    flops = model_flops_per_token(MODELS["llama3_8b"], packed.attended_length)
    assert within["mfu"] == pytest.approx(within["tokens_per_s"] * flops / 8 / 989e12)


def test_a_recipe_with_several_data_types_is_estimated_without_an_mfu_and_by_what_its_block_gathers() -> None:
    kinds = [training(dp_shard=8, dtype="fp8_tensorwise", block=block) for block in ("pytorch", "manual")]
    assert "mfu" not in kinds[0].estimate_speed(H200)
    # torchao's layers cast before they are gathered, the own block after it.
    assert [PlacedJob(kind.job, H200.cluster).gathered_bytes for kind in kinds] == [1, 2]
    steps = [estimate_job(kind.job, H200.cluster).step for kind in kinds]
    assert steps[1].data_parallel > steps[0].data_parallel


def test_scaling_adds_copies_and_sequences_and_never_beats_linear() -> None:
    workload, parameters = Parallel(), ParallelParameters(dp_shard=8, micro_batch=2, global_batch=64)
    one_node_tokens_per_s = workload.estimate(parameters, H200).metrics["tokens_per_s"]
    previous_efficiency = 1.0
    for nodes in (2, 4, 64, 1024):
        estimate = workload.estimate(workload.scale(parameters, nodes), on_nodes(H200, nodes))
        efficiency = estimate.metrics["tokens_per_s"] / one_node_tokens_per_s / nodes
        assert not estimate.unsupported_reason and 0.5 < efficiency <= previous_efficiency
        previous_efficiency = efficiency


def count_backward_products(checkpointing: Checkpointing, *, compiles_checkpoint: bool) -> int:
    """Return the number of matrix products in the backward pass of a small block, compiled as the trainer does it."""
    counts = {"forward": 0, "backward": 0}

    def counter(direction: str) -> Any:
        def compile_graph(graph: Any, _: object) -> Any:
            counts[direction] = sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes)
            return make_boxed_func(graph.forward)

        return compile_graph

    shape = replace(MODELS["llama3_8b"], hidden_size=64, heads=4, kv_heads=2, head_size=16, intermediate_size=128)
    inner: Any = Block(shape, 0)
    block: Any = CheckpointedBlock(inner, checkpointing)
    backend = aot_autograd(
        fw_compiler=counter("forward"),
        bw_compiler=counter("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    (block if compiles_checkpoint else inner).compile(backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(2, 32, 64, requires_grad=True)
    block(x, rope_table(shape, 32, torch.device("cpu"))).sum().backward()
    return counts["backward"] + (0 if compiles_checkpoint else counts["forward"])  # the compiled forward pass is whole


@pytest.mark.parametrize(("checkpointing", "tp"), [("selective", 1), ("full", 1), ("full", 2)])
def test_the_plan_repeats_the_products_that_a_compiled_block_repeats(
    checkpointing: Checkpointing, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "product_s", lambda *_: 1.0)
    placed = PlacedJob(training(checkpointing=checkpointing, tp=tp, compile=True).job, H200.cluster)
    once = operations.Seconds(products=operations.products_of_s(placed, 0))
    planned = 2 * once.products + operations.recomputed(placed, 0, once).products
    # With tensor parallelism, the trainer compiles the block without its full recomputation (`apply._apply_layout`).
    assert planned == count_backward_products(checkpointing, compiles_checkpoint=tp == 1)
