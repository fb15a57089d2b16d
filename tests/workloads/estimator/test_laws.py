"""Laws that estimates of any valid job obey, on layouts and clusters drawn at random."""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks import planner_memory
from sweeper.preflight.clusters import build_cluster, known_topologies
from tests.conftest import examples
from tests.support.planner_estimates import H100
from workloads.estimator.memory import peak_memory, stage_memories
from workloads.estimator.placed_job import PlacedJob
from workloads.estimator.step import estimate_job, step_bound_s
from workloads.hardware.cluster import Cluster, Device, Topology
from workloads.layouts.layout import Job, Layout
from workloads.layouts.rules import find_violation
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import MODELS

GB200 = replace(
    H100, name="gb200", peak_tflops={"bf16": 2500, "fp8": 5000}, memory_gib=185, memory_gb_s=8000, sustained_tflops={}
)
L40S = replace(
    H100, name="l40s", peak_tflops={"bf16": 362, "fp8": 733}, memory_gib=44, memory_gb_s=864, sustained_tflops={}
)
DEGREES = st.sampled_from([1, 2, 4, 8])


def few_examples(count: int) -> settings:
    """Return settings for draws of which most break a rule of layouts."""
    return settings(examples(count), suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def jobs(draw: st.DrawFn, *, is_plain: bool = False) -> tuple[Job, Cluster]:
    """Draw a valid job on a cluster; a plain one has neither a pipeline nor ring attention."""
    pp = 1 if is_plain else draw(DEGREES)
    chunks = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    sharding = draw(st.sampled_from(["none", "zero1", "zero2", "fsdp1", "fsdp2", "megatron_fsdp"]))
    dp_shard, dp_replicate = 1 if sharding == "none" else draw(st.sampled_from([2, 3, 8, 64])), draw(DEGREES)
    micro_batch, microbatches = draw(st.sampled_from([1, 2])), pp * draw(st.sampled_from([1, 3]))
    layout = Layout(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        tp=draw(DEGREES),
        cp=draw(DEGREES),
        pp=pp,
        ep=draw(DEGREES),
        stages_per_rank=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        micro_batch=micro_batch,
        global_batch=micro_batch * microbatches * dp_replicate * dp_shard,
        sharding=sharding,
        checkpointing=draw(st.sampled_from(["none", "per_op", "core_attention", "norm_act", "full"])),
        reshard_after_forward=draw(st.booleans()),
        cp_method="allgather" if is_plain else draw(st.sampled_from(["allgather", "ring"])),
    )
    job = Job(
        model=draw(st.sampled_from(sorted(MODELS.items())))[1],
        layout=layout,
        sequence_length=draw(st.sampled_from([2048, 8192, 131072])),
        trainer=draw(st.sampled_from(sorted(TRAINERS))),
        precision=draw(st.sampled_from(["bf16", "fp8_rowwise", "fp8_te_delayed"])),
        state=draw(st.sampled_from(["fp32", "amp", "bf16", "int8"])),
    )
    device: Device = draw(st.sampled_from([H100, GB200, L40S]))
    topology: Topology = draw(st.sampled_from(sorted(known_topologies().items())))[1]
    cluster = Cluster(device, topology, layout.gpus)
    assume(find_violation(job, cluster) is None)
    return job, cluster


@few_examples(30)
@given(jobs())
def test_parts_are_never_negative_and_the_mfu_is_below_one(pair: tuple[Job, Cluster]) -> None:
    estimate = estimate_job(*pair)
    assert all(seconds >= 0 for seconds in vars(estimate.step).values())
    assert all(gib >= 0 for stage in estimate.stages for gib in vars(stage).values())
    is_mixed = pair[0].precision != "bf16"  # attention and the head of a recipe in fp8 stay in bf16
    assert estimate.mfu is None if is_mixed else 0 < estimate.mfu < 1
    assert step_bound_s(*pair) <= estimate.step.total_s * (1 + 1e-9)


@few_examples(30)
@given(jobs())
def test_the_largest_of_all_ranks_is_found_without_the_others(pair: tuple[Job, Cluster]) -> None:
    job, cluster = pair
    others = ("zero_bubble", "zbv") if job.layout.stages_per_rank == 2 else ()
    for schedule in (job.layout.schedule, *others):
        setting = PlacedJob(replace(job, layout=replace(job.layout, schedule=schedule)), cluster)
        largest_gib = max(stage.total_gib for stage in stage_memories(setting))
        assert peak_memory(setting.job, setting.cluster).total_gib == largest_gib


@few_examples(30)
@given(jobs(), st.floats(1.05, 20.0))
def test_faster_links_and_networks_are_never_slower_and_latency_never_helps(
    pair: tuple[Job, Cluster], factor: float
) -> None:
    job, cluster = pair
    step_s = estimate_job(job, cluster).step.total_s * (1 + 1e-9)
    for key in ("link_gb_s", "network_gb_s"):
        faster = replace(cluster.topology, **{key: factor * getattr(cluster.topology, key)})
        assert estimate_job(job, replace(cluster, topology=faster)).step.total_s <= step_s
    for key in ("link_latency_s", "network_latency_s", "oversubscription"):
        slower = replace(cluster.topology, **{key: factor * getattr(cluster.topology, key)})
        assert estimate_job(job, replace(cluster, topology=slower)).step.total_s * (1 + 1e-9) >= step_s / (1 + 1e-9)


@few_examples(20)
@given(jobs())
def test_more_replicas_do_not_gain_tokens_per_gpu(pair: tuple[Job, Cluster]) -> None:
    job, cluster = pair
    assume(cluster.topology.wiring != "pairs")  # there more ranks of a domain use more of its links
    layout = replace(job.layout, dp_replicate=2 * job.layout.dp_replicate, global_batch=2 * job.layout.global_batch)
    larger = replace(job, layout=layout)
    few, many = estimate_job(job, cluster), estimate_job(larger, replace(cluster, gpus=layout.gpus))
    assert many.tokens_per_s_per_gpu <= few.tokens_per_s_per_gpu * (1 + 1e-9)


@few_examples(20)
@given(jobs(is_plain=True), st.floats(1.05, 4.0))
def test_a_device_with_more_bandwidth_and_faster_products_is_never_slower(
    pair: tuple[Job, Cluster], factor: float
) -> None:
    job, cluster = pair
    # Not of all jobs: attention hides a ring's messages and FSDP's gathers, each as if it hid nothing else, and another
    # rank of a pipeline becomes the slowest, whose optimizer has more weights.
    step_s = estimate_job(job, cluster).step.total_s
    device = cluster.device
    peaks, rates = (
        {key: factor * rate for key, rate in some.items()} for some in (device.peak_tflops, device.sustained_tflops)
    )
    for faster in (
        replace(device, memory_gb_s=factor * device.memory_gb_s),
        replace(device, peak_tflops=peaks, sustained_tflops=rates),
    ):
        assert estimate_job(job, replace(cluster, device=faster)).step.total_s <= step_s * (1 + 1e-9)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("trainer", ["own", "torchtitan"])
def test_no_layout_exceeds_the_bound(trainer: str) -> None:
    if trainer == "torchtitan" and not find_spec("torchtitan"):
        pytest.skip("needs torchtitan 0.2.2")
    command = [sys.executable, planner_memory.__file__, "--trainer", trainer]
    last = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert " layouts: 0 exceed the bound" in last
    assert int(last.split()[0]) >= 100


@pytest.mark.parametrize(
    ("state", "layout", "tracked_gib"),  # as printed by `benchmarks/planner_memory.py --trainer torchtitan`
    [
        ("amp", "dp_replicate 8, micro-batch 1 x 1", 35.83),
        ("fp32", "dp_replicate 4 x dp_shard 2, micro-batch 1 x 2, full checkpointing", 20.85),
        ("fp32", "dp_shard 8, micro-batch 1 x 2, full checkpointing", 7.18),
        ("bf16", "dp_shard 2 x tp 4, micro-batch 1 x 2, weights stay gathered", 3.36),
    ],
)
def test_the_bound_covers_what_the_tracker_counts(state: str, layout: str, tracked_gib: float) -> None:
    jobs = [job for name, job in planner_memory.list_jobs("torchtitan") if (name, job.state) == ("llama3_8b", state)]
    (job,) = (job for job in jobs if str(job.layout) == layout)
    assert tracked_gib < peak_memory(job, build_cluster("h100", None, 8)).allocated_gib < 1.1 * tracked_gib
