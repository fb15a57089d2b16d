"""A job that every trainer's file expresses, and the samples of logs."""

from pathlib import Path

from workloads.layouts.layout import Job, Layout
from workloads.models.model import Model

LOGS = Path(__file__).parents[1] / "samples" / "logs"
LLAMA = Model(32, 4096, 32, 8, 128, 14336, 128256)
JOB_FIELDS = ("model", "precision", "state", "document_tokens", "fused_loss")


def example(trainer: str, model: Model = LLAMA, **values: object) -> Job:
    """Return a job of 8 GPUs that every trainer's file expresses, with some values changed."""
    of_job = {name: values.pop(name) for name in (*JOB_FIELDS, "compiled") if name in values}
    sharding = "fsdp2" if trainer in ("own", "torchtitan") else "zero1"
    layout = {"dp_shard": 4, "tp": 2, "sharding": sharding, "global_batch": 16, **values}
    state = "bf16" if trainer == "own" else "fp32"
    return Job(model, Layout(**layout), 8192, trainer, **({"state": state} | of_job))  # type: ignore[arg-type]
