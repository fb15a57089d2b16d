"""`workload=llama8b` and its sisters: training a Llama on one GPU within a budget of device and of host memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload
from workloads.llama import shapes
from workloads.offload.plan import trained_bytes


def _least_gib(model: str) -> float:
    return trained_bytes(shapes.MODELS[model], 2) / 2**30


@dataclass(frozen=True)
class OffloadParameters:
    """Steps of AdamW, everything in one type or with the optimizer's part in fp32.

    device_gib: what the allocator of the device may hold; host_gib: the pinned arena, the only host memory that state
    is kept in. On a CPU the device's budget is planned for and not enforced.
    sequences_per_step: what one step trains on; a planner divides it into rounds and chunks
    master_weights: keep the optimizer's states, and a copy of the weights, in fp32
    checkpoint: a Hugging Face folder to begin from; null: random weights from the seed
    data, tokenizer: tokens to train on, see `workloads.llama.text`; null: made-up ones
    profile: train one more step and keep a trace of it, with the ranges of `workloads.offload.engine` in it
    save_to: a folder to write such a checkpoint to at the end; null: none
    """

    device_gib: float = field(metadata={"min": 0})
    host_gib: float = field(metadata={"min": 0, "host_memory": True})
    model: shapes.ModelName = field(default="llama3_8b", metadata={"cpu_gib": _least_gib})
    sequence_length: int = field(default=8192, metadata={"min": 1})
    sequences_per_step: int = field(default=64, metadata={"min": 1})
    dtype: Literal["bf16", "fp32"] = "bf16"
    master_weights: bool = False
    warmup: int = field(default=1, metadata={"min": 0})
    steps: int = field(default=2, metadata={"min": 1})
    learning_rate: float = field(default=1e-4, metadata={"min": 0})
    data: str | None = field(default=None, metadata={"file": True})
    tokenizer: str | None = field(default=None, metadata={"file": True})
    checkpoint: str | None = field(default=None, metadata={"file": True})
    save_to: str | None = None
    profile: bool = False
    seed: int = 0


class Offload(Workload):
    """One training run under a plan of its own."""

    name = "offload"
    Parameters = OffloadParameters
    benchmark_version = "offload/2"
    exclusive = "node"  # another trial on the node would use its host memory and its links

    def run(self, parameters: OffloadParameters, rank: Rank) -> Measurement:
        from workloads.offload.run import measure

        return measure(parameters, rank)
