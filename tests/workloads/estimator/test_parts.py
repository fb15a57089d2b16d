"""The parts of an estimate: collectives, pipelines, experts, attention, precisions, memory and efficiencies."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeper.preflight.clusters import build_cluster, find_topology
from tests.conftest import REPOSITORY, examples
from tests.support.planner_estimates import H100, cluster, job
from workloads.estimator.communication import (
    Group,
    _copies,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    bandwidth_gb_s,
    copied_bytes,
    copies_sum_s,
    pipeline_send_s,
)
from workloads.estimator.estimate import StepTime
from workloads.estimator.memory import saved_bytes
from workloads.estimator.operations import (
    LAUNCH_US,
    LAUNCHES_S,
    ROUTING_S,
    STREAM_PASSES,
    Product,
    attention_s,
    block_products,
    block_seconds,
    cast_s,
    head_s,
    pass_s,
    product_s,
)
from workloads.estimator.pipeline import rank_layers
from workloads.estimator.placed_job import PlacedJob, divided_weights, rank_weights
from workloads.estimator.step import STALL_S_PER_GIB, estimate_job
from workloads.layouts.layout import Dispatcher, Job, Layout
from workloads.layouts.trainers import nearest_efficiency
from workloads.models.hugging_face import load_model


def setting(work: Job, **topology: float) -> PlacedJob:
    return PlacedJob(work, cluster(work.layout.gpus, **topology))


def test_a_group_has_as_many_nics_as_ranks_in_a_node() -> None:
    eight, one = (bandwidth_gb_s(cluster(64), Group(ranks, stride)) for ranks, stride in ((64, 1), (8, 8)))
    assert eight == pytest.approx(min(8 * one, 450 * 0.78))
    assert one == pytest.approx(50 * 0.9)


def test_oversubscription_divides_the_network() -> None:
    plain, shared = (bandwidth_gb_s(cluster(64, oversubscription=n), Group(8, 8)) for n in (1, 4))
    assert plain == 4 * shared


def test_links_between_pairs_serve_whole_domains_only() -> None:
    pairs = cluster(8, wiring="pairs")
    assert bandwidth_gb_s(pairs, Group(2)) == pytest.approx(bandwidth_gb_s(pairs, Group(8)) / 7)


def test_a_rack_of_nvlink_needs_no_network() -> None:
    rack = replace(cluster(64), topology=find_topology("gb200_nvl72"))
    assert bandwidth_gb_s(rack, Group(64)) > 10 * bandwidth_gb_s(cluster(64), Group(8, 8))


@pytest.mark.parametrize("collective", [all_gather_s, all_reduce_s])
def test_collectives_grow_with_ranks_and_bytes(collective: object) -> None:
    assert callable(collective)
    times = [collective(cluster(n), Group(n), 1e6) for n in (1, 2, 8, 64, 512)]
    assert times[0] == 0 and times == sorted(times)
    assert collective(cluster(8), Group(8), 2e9) > collective(cluster(8), Group(8), 1e9)


def test_small_all_reduces_take_the_tree() -> None:
    ranks = 1024
    ring = 2 * (128 * 12e-6 + (ranks - 128) * 4e-6)
    assert all_reduce_s(cluster(ranks), Group(ranks), 8) < ring / 10


def test_an_all_to_all_across_nodes_is_slower() -> None:
    assert all_to_all_s(cluster(64), Group(64), 1e9, 9e8) > all_to_all_s(cluster(64), Group(8), 1e9, 0)


@given(
    layers=st.integers(8, 130),
    pp=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from([("1f1b", 1), ("interleaved", 1), ("zbv", 2), ("dualpipev", 2)]),
)
@examples(50)
def test_every_layer_is_on_one_rank(layers: int, pp: int, schedule: tuple[str, int]) -> None:
    name, stages = schedule
    layout = Layout(pp=pp, schedule=name, stages_per_rank=stages)  # type: ignore[arg-type]
    if layers < pp * stages:
        return
    ranks = rank_layers(replace(load_model("llama3_8b"), layers=layers), layout)
    assert len(ranks) == pp
    assert sum(some.number for rank in ranks for some in rank) == layers


@given(
    model=st.sampled_from(["llama3_8b", "mpt_30b", "gpt3_175b", "qwen3_30b_a3b", "deepseek_v4_flash"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 8]),
    sharding=st.sampled_from(["none", "zero1", "zero2", "fsdp1", "fsdp2", "megatron_fsdp"]),
    checkpointing=st.sampled_from(["none", "per_op", "selective", "core_attention", "norm_act", "full"]),
)
@examples(60)
def test_no_part_is_negative(model: str, tp: int, pp: int, cp: int, dp: int, sharding: str, checkpointing: str) -> None:
    work = job(model, tp=tp, pp=pp, cp=cp, dp_shard=dp, sharding=sharding, checkpointing=checkpointing)
    result = estimate_job(work, cluster(work.layout.gpus))
    assert min(vars(result.step).values()) >= 0 and result.step.products > 0
    assert len(result.stages) == pp and all(min(vars(stage).values()) >= 0 for stage in result.stages)
    assert result.mfu is not None and 0 < result.mfu < 0.9


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3", "nemotron_3_nano_30b_a3b"])
def test_products_have_two_flops_for_each_active_weight_and_token(name: str) -> None:
    work = setting(job(name, expert_imbalance=1.0))
    flops = sum(product.flops for product in block_products(work, 0))
    assert flops == 2 * work.tokens * (work.model.mixer_weights(0) + work.model.active_mlp_weights(0))


def test_parallel_streams_are_saved_sent_and_passed_over() -> None:
    model, layout = load_model("deepseek_v4_flash"), Layout(pp=4, dp_shard=2, ep=8, checkpointing="full")
    four, one = (setting(Job(replace(model, streams=streams), layout, 4096)) for streams in (4, 0))
    assert saved_bytes(four, 2) == 4 * saved_bytes(one, 2)
    assert pipeline_send_s(four) - 4 * pipeline_send_s(one) == pytest.approx(-3 * 4e-6)  # but for three latencies
    assert block_products(four, 2) == block_products(one, 2)
    passes = [pass_s(four, 2, backward=backward) - pass_s(one, 2, backward=backward) for backward in (False, True)]
    assert passes[1] / passes[0] == pytest.approx(STREAM_PASSES[1] / STREAM_PASSES[0])


def test_grouped_products_are_as_fast_as_measured_back_to_back_on_an_h200() -> None:
    errors: dict[str, list[float]] = {"bf16": [], "fp8_rowwise": []}
    for line in (REPOSITORY / "benchmarks/results/grouped_h200.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) != 8 or cells[3] not in errors:
            continue
        rows, k, n, experts = map(int, re.findall(r"\d+", cells[2]))
        placed = setting(replace(job("qwen3_30b_a3b", dp_shard=8, ep=8), precision=cells[3]))
        placed.cluster = replace(placed.cluster, device=build_cluster("h200", None, 8).device)
        product = Product("up", rows / experts, n, k, experts, grouped=True)
        measured_s = product.flops / float(cells[5].replace(",", "")) / 1e12
        errors[cells[3]].append(product_s(placed, product, placed.precision.dtype) / measured_s - 1)
    assert [len(some) for some in errors.values()] == [4, 4]
    for some in errors.values():
        assert abs(np.mean(some)) < 0.05 and max(np.abs(some)) < 0.1


def test_grouped_products_depend_on_sizes_as_measured_on_an_h100() -> None:
    """Forward plus both backward GEMMs of the 16 layers of `grouped_h100.md`, one by one and so at higher clocks."""
    errors: dict[str, list[float]] = {"bf16": [], "fp8_rowwise": []}
    for line in (REPOSITORY / "benchmarks/results/grouped_h100.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        sizes = re.fullmatch(r"(\d+) \S (\d+), (\d+), (\d+)", cells[1]) if len(cells) == 9 else None
        if sizes is None or cells[2] not in errors:
            continue
        hidden, width, experts, chosen = map(int, sizes.groups())
        placed = setting(replace(job("qwen3_30b_a3b", dp_shard=8, ep=8), precision=cells[2]))
        for n, k, rates in ((2 * width, hidden, cells[3:6]), (hidden, width, cells[6:])):
            product = Product("up", 16_384 * chosen / experts, n, k, experts, grouped=True)
            measured_s = sum(product.flops / float(rate.replace(",", "")) / 1e12 for rate in rates)
            errors[cells[2]].append(3 * product_s(placed, product, placed.precision.dtype) / measured_s - 1)
    assert [len(some) for some in errors.values()] == [16, 16]
    for some in errors.values():
        assert np.std(some) < 0.12


def test_an_input_of_several_projections_is_cast_once() -> None:
    placed = setting(replace(job("qwen3_30b_a3b", dp_shard=8, ep=8), precision="fp8_te_mxfp8"))
    up, down = (product for product in block_products(placed, 0) if product.grouped)
    rows = 8 * placed.tokens
    weights = replace(placed.precision, cast_bytes=0)
    for product, width, backward in ((up, 2048, False), (down, 768, False), (up, 2 * 768, True), (down, 2048, True)):
        whole_s, placed.precision = cast_s(placed, product, backward=backward), weights
        weights_s = cast_s(placed, product, backward=backward)
        placed.precision = replace(weights, cast_bytes=4)
        assert whole_s - weights_s == pytest.approx(placed.pass_s(4 * rows * width, 15_000))


def test_fused_experts_read_and_write_fewer_bytes_and_a_capacity_needs_no_counts() -> None:
    work = replace(job("qwen3_30b_a3b", dp_shard=8, ep=8), trainer="megatron", precision="fp8_te_mxfp8")
    plain, fused, padded = (
        setting(replace(work, **changes)) for changes in ({}, {"fused_experts": True}, {"expert_capacity": True})
    )
    width = plain.tokens * 8 * 768
    for backward, passes in ((False, 3), (True, 4)):  # 2 of the 6 backward passes are left, which read gate and up
        saved_s = pass_s(plain, 0, backward=backward) - pass_s(fused, 0, backward=backward)
        assert saved_s == pytest.approx(plain.pass_s(2 * passes * width))
        counts_s = pass_s(plain, 0, backward=backward) - pass_s(padded, 0, backward=backward)
        assert counts_s == pytest.approx(ROUTING_S)
    casts = [
        sum(cast_s(each, product, backward=False) for product in block_products(each, 0)) for each in (plain, fused)
    ]
    assert casts[0] - casts[1] == pytest.approx(plain.pass_s(2 * width, 15_000))


def test_a_low_precision_head_is_faster() -> None:
    work = replace(job(trainer="megatron"), precision="fp8_te_mxfp8")
    plain, low = (setting(replace(work, low_precision_head=is_low)) for is_low in (False, True))
    assert 0.5 < head_s(low) / head_s(plain) < 0.9


def test_attention_in_fp8_computes_all_pairs_backward_at_any_head_size() -> None:
    """GB200, cuDNN 9.22, under the load that an H200 carries with 0.86 and 0.89 of its cold rates."""
    rack = build_cluster("gb200", "gb200_nvl72", 8)

    def seconds(name: str, *, backward: bool, layer: int = 0) -> float:
        work = replace(job(name, dp_shard=8), trainer="megatron", attention_kernel="cudnn_fp8", sequence_length=4096)
        return attention_s(PlacedJob(work, rack), layer, backward=backward)

    windowed, full = (seconds("gpt_oss_120b", backward=True, layer=layer) for layer in (0, 1))
    assert windowed == full and seconds("gpt_oss_120b", backward=False) < 0.5 * seconds(
        "gpt_oss_120b", backward=False, layer=1
    )
    assert full == pytest.approx(2.080e-3 / 0.89 / 4, rel=0.15)  # measured for two sequences with 128 heads
    assert seconds("deepseek_v3", backward=True) == pytest.approx(1.22e-12 * 128 * 4096**2 / 2 / 0.89, rel=0.15)
    assert seconds("deepseek_v3", backward=False) == pytest.approx(0.332e-12 * 128 * 4096**2 / 2 / 0.86, rel=0.15)


def test_tensor_parallelism_divides_products() -> None:
    whole, divided = (setting(job(tp=tp, dp_shard=1)) for tp in (1, 4))
    sizes = [sum(product.flops for product in block_products(some, 0)) for some in (whole, divided)]
    assert sizes[0] == 4 * sizes[1]


def test_a_window_saves_as_much_attention_as_measured() -> None:  # by FlashAttention 2 on an H200: 0.474 of 3.636 ms
    work = setting(Job(load_model("gpt_oss_20b"), Layout(), 8192, attention_kernel="flash2"))
    saved = attention_s(work, 0, backward=False) / attention_s(work, 1, backward=False)
    assert saved == pytest.approx(0.474 / 3.636, rel=0.2)


def test_unfused_attention_is_slower() -> None:
    kernels = [job("gpt3_175b", attention_kernel=kernel, trainer="megatron") for kernel in ("cudnn", "unfused")]
    fused, unfused = (attention_s(setting(work), 0, backward=False) for work in kernels)
    assert unfused > 3 * fused


def test_experts_cost_more_the_less_even_they_are() -> None:
    even, uneven = (job("qwen3_30b_a3b", ep=8, expert_imbalance=factor) for factor in (1.0, 1.5))
    assert estimate_job(uneven, cluster()).step.total_s > estimate_job(even, cluster()).step.total_s


def test_experts_are_divided_by_fewer_ranks_than_the_other_weights() -> None:
    work = setting(job("qwen3_30b_a3b", ep=8, dp_shard=8))
    weights = rank_weights(work, 0, rank_layers(work.model, work.layout)[0])
    assert divided_weights(work, weights) == weights.shared / 8 + weights.experts
    states = estimate_job(work.job, cluster()).memory.optimizer_states * 2**30
    assert states == pytest.approx(8 * divided_weights(work, weights))


@pytest.mark.parametrize(("model", "is_summed"), [("llama3_8b", False), ("qwen3_30b_a3b", True)])
def test_only_ranks_with_copies_of_experts_add_up_their_gradients(model: str, is_summed: bool) -> None:
    work = setting(job(model, trainer="own", tp=8))
    weights = rank_weights(work, 0, rank_layers(work.model, work.layout)[0])
    assert any(copies_sum_s(work, weights, per_step=per_step) for per_step in (True, False)) == is_summed


@pytest.mark.parametrize(
    ("ranks", "order"), [(4, ("deepep", "allgather", "alltoall")), (32, ("deepep", "alltoall", "allgather"))]
)
def test_tokens_go_to_their_experts_at_the_cost_of_what_is_sent(ranks: int, order: tuple[Dispatcher, ...]) -> None:
    """A token has eight experts."""
    works = [job("qwen3_30b_a3b", ep=ranks, dp_shard=ranks, dispatcher=kind) for kind in order]
    times_s = [estimate_job(work, cluster(ranks, gpus_per_domain=32)).step.expert_parallel for work in works]
    assert 0 < times_s[0] < times_s[1] < times_s[2]


@pytest.mark.parametrize("places", [2, 4, 8, 16, 64])
def test_a_token_goes_to_the_places_of_its_groups_alone(places: int) -> None:
    """DeepSeek-V3 has eight groups of 32 experts, of which a token's eight experts are in four."""
    random, reached = np.random.default_rng(0), []
    for _ in range(2000):
        groups = random.choice(8, 4, replace=False)
        experts = random.choice(128, 8, replace=False)
        reached.append(len({(groups[expert // 32] * 32 + expert % 32) * places // 256 for expert in experts}))
    work = setting(job("deepseek_v3", ep=places, dp_shard=places, dispatcher="deepep", trainer="megatron"))
    assert _copies(work, places) == pytest.approx(np.mean(reached) * (places - 1) / places, rel=0.05)


@pytest.mark.parametrize(("slower", "faster"), [("bf16", "fp8_tensorwise"), ("fp8_rowwise", "fp8_tensorwise")])
def test_precisions_are_ordered_as_measured(slower: str, faster: str) -> None:
    times = [estimate_job(job(precision=name), cluster()).step.total_s for name in (slower, faster)]
    assert times[0] > times[1]


def test_a_device_without_units_for_a_type_is_refused() -> None:
    with pytest.raises(ValueError, match="h100 has no matrix units for fp4"):
        estimate_job(job(precision="nvfp4"), cluster())


def test_some_checkpointed_blocks_lie_between_none_and_all() -> None:
    counts = (0, 16, 32)
    results = [estimate_job(job(checkpointing="full", checkpointed_layers=n), cluster()) for n in counts]
    assert [r.step.total_s for r in results] == sorted(r.step.total_s for r in results)
    saved = [r.memory.activations for r in results]
    assert saved[1] == pytest.approx((saved[0] + saved[2]) / 2)
    without = estimate_job(job(checkpointed_layers=0), cluster())
    assert saved[0] == pytest.approx(without.memory.activations)


def test_an_optimizer_on_the_host_takes_longer_and_frees_memory() -> None:
    device, host = (estimate_job(job(offload_optimizer=offload), cluster()) for offload in (False, True))
    assert host.step.optimizer > device.step.optimizer
    assert host.memory.optimizer_states == 0 < device.memory.optimizer_states


def test_the_first_rank_of_1f1b_holds_the_most_activations() -> None:
    stages = estimate_job(job(pp=4, dp_shard=2), cluster()).stages
    sizes = [stage.activations for stage in stages]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_the_nearest_pair_lends_its_efficiency() -> None:
    table = {("nemo", "h100"): 0.9, ("torchtitan", "h100"): 1.1, ("torchtitan", "h200"): 1.0}
    assert nearest_efficiency("nemo", "h100", table) == 0.9
    assert nearest_efficiency("nemo", "a100", table) == 0.9
    assert nearest_efficiency("megatron-bridge", "h200", table) == 0.9
    assert nearest_efficiency("deepspeed", "h200", table) == 1.0
    assert nearest_efficiency("deepspeed", "b200", table) == 1.0


def test_a_power_cap_limits_the_mean_of_work_and_waiting() -> None:
    work = job(pp=4, dp_shard=2, global_batch=8)
    capped = cluster()
    uncapped = replace(capped, device=replace(H100, power_headroom=1.3))
    assert estimate_job(work, uncapped).step.total_s < estimate_job(work, capped).step.total_s


# Read and written by a gather and by a reduction of a weight, summed from FSDP2's code (torch 2.11 to 2.13). A pass
# repeats the gather, but not where a micro-batch finds the weights that the one before has left.
@pytest.mark.parametrize(
    ("ranks", "state", "gathered", "reduced"),
    [(1, "fp32", 6 + 4, 6 + 8 + 12), (2, "fp32", 6 / 2 + 4, 6 + 12 / 2), (4, "bf16", 4 / 4 + 4, 4 + 6 / 4)],
)
def test_copies_of_fsdp2_are_those_of_its_code(ranks: int, state: str, gathered: float, reduced: float) -> None:
    for checkpointing, gathers in (("none", 1), ("full", 2)):
        fields = {"tp": 8 // ranks, "global_batch": 1 << 30, "state": state, "checkpointing": checkpointing}
        work = job(dp_shard=ranks, trainer="own", **fields)
        assert copied_bytes(setting(work), ranks) == pytest.approx(gathers * gathered + reduced, rel=1e-6)


@pytest.mark.parametrize(("checkpointing", "collectives"), [("none", 8), ("selective", 10), ("full", 12)])
def test_recomputation_repeats_collectives(checkpointing: str, collectives: int) -> None:
    placed = setting(job(dp_shard=1, tp=8, checkpointing=checkpointing, trainer="own"))
    assert 4 * (2 + placed.repeated_collectives_share) == collectives


def test_a_blocks_seconds_follow_a_calibration() -> None:
    placed = setting(job())
    calibrated = PlacedJob(placed.job, replace(placed.cluster, device=replace(H100, copy_gb_s=1000)))
    assert block_seconds(calibrated, 0).forward.other > block_seconds(placed, 0).forward.other


def test_blocks_in_bf16_take_their_share_of_the_step_and_of_memory() -> None:
    gb200 = build_cluster("gb200", "gb200_nvl72", 8)
    work = job(precision="nvfp4_torchao", trainer="torchtitan", checkpointing="per_op")
    none, half, every = (estimate_job(replace(work, bf16_blocks=count), gb200) for count in (0, 16, 32))
    plain = estimate_job(replace(work, precision="bf16"), gb200)
    assert half.step.products == pytest.approx((none.step.products + every.step.products) / 2)
    assert every.step.products == pytest.approx(plain.step.products) and plain.step.products > 2 * none.step.products
    # torchtitan saves every second product in bf16, and none of torchao's NVFP4.
    sizes = [some.memory.activations for some in (none, half, every)]
    assert 1.5 * sizes[0] < sizes[1] < sizes[2] == pytest.approx(plain.memory.activations)


def test_blocking_launches_add_to_each_block_of_each_micro_batch() -> None:
    work = job("gpt3_175b", trainer="megatron-lm", tp=8, dp_shard=1, global_batch=4, checkpointing="full")
    free, blocked = (
        estimate_job(replace(work, waits_for_launches=waits), cluster(8), 1.0).step.total_s for waits in (False, True)
    )
    assert blocked - free == pytest.approx(4 * 96 * LAUNCHES_S * 4 / 3)


def test_measured_rates_of_grouped_gemms_updates_and_launches_replace_the_table_s() -> None:
    usual = cluster(8)
    work = job("qwen3_30b_a3b", trainer="megatron-core", ep=8, dp_shard=8, global_batch=8, sequence_length=4096)

    def step_of(**measured: Any) -> StepTime:
        return estimate_job(work, replace(usual, device=replace(usual.device, **measured)), 1.0).step

    table = step_of()
    assert step_of(grouped_tflops={"bf16": 100.0}).products > 2 * table.products
    assert step_of(update_gb_s=usual.device.memory_gb_s / 10).optimizer > 2 * table.optimizer
    assert step_of(launch_us=2 * LAUNCH_US).total_s > 1.3 * table.total_s
    assert step_of(launch_us=LAUNCH_US) == table


@pytest.mark.parametrize(("micro_batch", "measured_s"), [(1, 9.318), (2, 11.260)])
def test_a_layout_that_lacks_memory_stalls(micro_batch: int, measured_s: float) -> None:
    """The second layout has the better step without stalls (benchmarks/results/parallel_h100.md, `cp 2`)."""
    layout = {"cp": 2, "dp_shard": 1, "micro_batch": micro_batch, "global_batch": 16, "checkpointing": "selective"}
    estimate = estimate_job(job(attention_kernel="flash3", **layout), cluster(2))
    lacking_gib = estimate.memory.needed_gib - cluster(2).usable_gib
    assert estimate.step.stalls == pytest.approx(16 / micro_batch * STALL_S_PER_GIB * max(0.0, lacking_gib))
    assert (estimate.step.stalls > 0) == (micro_batch == 2)
    assert estimate.step.total_s == pytest.approx(measured_s, rel=0.1)
