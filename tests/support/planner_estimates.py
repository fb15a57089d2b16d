"""Jobs and clusters for tests of the planner."""

from dataclasses import replace
from typing import Any

from sweeper.preflight.clusters import find_topology
from workloads.hardware.cluster import Cluster, Device
from workloads.layouts.layout import Job, Layout
from workloads.models.hugging_face import load_model

H100 = Device(
    name="h100",
    peak_tflops={"bf16": 989, "fp16": 989, "fp8": 1979},
    memory_gib=79.1,
    memory_gb_s=3350,
    power_w=700,
    sustained_tflops={"bf16": 690, "fp8": 1300},
    architecture="sm90",
)


def cluster(gpus: int = 8, **changes: Any) -> Cluster:
    """Return H100s with eight NICs of 400 Gb/s a node; `changes` are of the topology."""
    return Cluster(H100, replace(find_topology("dgx_h100"), **changes), gpus)


def job(model: str = "llama3_8b", **changes: Any) -> Job:
    """Return a job on sequences of 8192 tokens; `changes` are of its layout, or of the job where it has the field."""
    of_job = {key: changes.pop(key) for key in list(changes) if key in Job.__dataclass_fields__}
    layout = Layout(**{"dp_shard": 8, "global_batch": 64, **changes})
    return Job(**{"model": load_model(model), "layout": layout, "sequence_length": 8192, **of_job})
