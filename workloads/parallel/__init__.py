"""`workload=parallel`: a decoder in training over a gang of ranks, and which layout of it is the fastest."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from workloads.api.contract import Estimate, Machine, Measurement, Rank, Workload
from workloads.llama import shapes
from workloads.parallel.layout import Checkpointing, Layout, Schedule, Setting, why_illegal


def degree() -> int:
    """A whole number from one on; one by default."""
    return field(default=1, metadata={"min": 1})


@dataclass(frozen=True)
class ParallelParameters:
    """A layout (`workloads.parallel.layout.Layout`), and what is trained in it.

    global_batch: sequences in a step, of all ranks together
    tensor_across_nodes: whether tensor parallelism may span nodes
    compile: each block by itself
    dtype: fp8 is of the products of blocks (torchao's recipes), on bf16 weights
    """

    model: shapes.ModelName = "llama3_8b"
    sequence_length: int = field(default=8192, metadata={"min": 1})
    global_batch: int = field(default=8, metadata={"min": 1})
    replicate: int = degree()
    shard: int = degree()
    tensor: int = degree()
    context: int = degree()
    pipeline: int = degree()
    stages: int = degree()
    schedule: Schedule = "1f1b"
    micro_batch: int = degree()
    checkpointing: Checkpointing = "none"
    reshard: bool = True
    tensor_across_nodes: bool = False
    compile: bool = True
    dtype: Literal["bf16", "fp32", "fp8_tensorwise", "fp8_rowwise"] = "bf16"
    warmup: int = field(default=2, metadata={"min": 2})
    steps: int = field(default=5, metadata={"min": 1})
    learning_rate: float = field(default=1e-4, metadata={"min": 0})
    seed: int = 0

    @property
    def layout(self) -> Layout:
        names = Layout.__dataclass_fields__
        return Layout(**{name: getattr(self, name) for name in names})

    def setting(self, world_size: int, ranks_per_node: int) -> Setting:
        shape = shapes.MODELS[self.model]
        across, compiled = self.tensor_across_nodes, self.compile
        return Setting(shape, self.sequence_length, world_size, ranks_per_node, across, compiled, self.dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number that is kept."""
        return 4 if self.dtype == "fp32" else 2


class Parallel(Workload):
    """One layout, trained for a few steps."""

    name = "parallel"
    Parameters = ParallelParameters
    benchmark_version = "parallel/1"
    max_world_size = None
    has_estimates = True
    can_scale = True

    def estimate(self, parameters: ParallelParameters, machine: Machine) -> Estimate:
        """Whether the layout is legal and should fit, and how fast it should be."""
        from workloads.parallel import estimate

        layout = parameters.layout
        setting = parameters.setting(machine.world_size, machine.ranks_per_node)
        rule, why = why_illegal(layout, setting)
        if why:
            return Estimate(why, rule, description=str(layout))
        needs = estimate.memory(layout, setting, parameters.element_bytes)
        seconds = estimate.step_s(layout, setting, parameters.element_bytes, machine)
        tokens = parameters.global_batch * parameters.sequence_length
        metrics = {"memory_gib": needs.total, "tokens_per_s": tokens / seconds}
        if machine.memory_gib is not None and needs.total > machine.memory_gib:
            why = f"needs {needs.total:.1f} GiB of a device, it has {machine.memory_gib:.1f}"
            return Estimate(why, "it fits into memory", metrics, str(layout))
        return Estimate(metrics=metrics, description=str(layout))

    def scale(self, parameters: ParallelParameters, factor: int) -> ParallelParameters:
        """The same on so many times the devices: as many more copies, and a batch as many times as large."""
        return replace(
            parameters, replicate=parameters.replicate * factor, global_batch=parameters.global_batch * factor
        )

    def run(self, parameters: ParallelParameters, rank: Rank) -> Measurement:
        from workloads.parallel.run import measure

        return measure(parameters, rank)
