"""`workload=llama8b` and others: train a Llama on the GPUs of a host within device and host memory budgets."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import BandEnds, Candidate, Machine, Scalar, Workload
from workloads.api.recipes import RECIPES, unsupported_block_rate_reason
from workloads.models.model import MODELS, Model, ModelName
from workloads.models.routing import Routing, check_imbalance
from workloads.offload.plan import Distribution, count_training_state_bytes

OffloadModelName = Literal[
    ModelName, "llama3_405b", "ml_dataflow_15b", "qwen3_moe_tiny", "olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b"
]


def _count_min_cpu_gib(model: str) -> float:
    return count_training_state_bytes(MODELS[model], 2, 2) / 2**30  # bf16 weights and gradients, int8 optimizer states


def find_placement_problem(distribution: str | None, world_size: int, ranks_per_node: int) -> tuple[str, str] | None:
    """Return why these ranks cannot train a model together, and the rule that they break; None if they can."""
    if ranks_per_node < world_size:
        reason = "offload trains on the GPUs of one host; set gpus= to at most those of one host"
        return reason, "all GPUs are of one host"
    if distribution and world_size == 1:
        reason = "distribution= divides a model among several GPUs: set gpus=2 or more, or distribution=null"
        return reason, "a model is divided among several GPUs"
    return None


def infeasible_reason(dtype: str, sequence_length: int, architecture: str, shape: Model) -> str:
    """Return why a device cannot train in this data type or with these sequences; empty if it can."""
    if reason := unsupported_block_rate_reason(dtype, architecture):
        return f"dtype={dtype} is {reason}"
    if shape.experts and RECIPES[dtype].is_scaled and not architecture.startswith("sm90"):
        return f"dtype={dtype}: PyTorch groups products with scales of rows on sm90 alone; set dtype=bf16"
    multiple = RECIPES[dtype].multiples[2]  # weight gradients sum over tokens
    if sequence_length % multiple:
        return f"sequence_length={sequence_length}: dtype={dtype} needs a multiple of {multiple}"
    return ""


@dataclass(frozen=True)
class OffloadParameters:
    """Parameters of an offloaded training run with AdamW.

    Attributes:
        device_gib: the limit of each device's allocator. On a CPU, the limit is planned for but not enforced.
        host_gib: the total limit of all GPUs' pinned arenas, the only host memory that stores training state.
        distribution: how GPUs divide the work (`workloads.offload.plan.Distribution`); None: the planner chooses.
        model: the model to train. A model with experts must have only routed experts, in every block.
        sequence_length: tokens per sequence.
        sequences_per_step: sequences per step; the planner divides them into rounds and chunks.
        dtype: data type of weights, gradients and activations. With fp8_tensorwise and fp8_blockwise
            (`workloads.llama.fp8_quantize`) these are bf16, and the operands of the blocks' matrix products are fp8;
            embedding, attention, head and routers stay in bf16. Experts do not support fp8_blockwise.
        master_weights: keep an fp32 copy of the weights, which AdamW updates. With dtype=fp32, no copy is needed.
        optimizer_states: data type of AdamW's momentum and variance. int8: one byte per number and an fp32 scale per
            block of 256, rounded by torchao (`pip install 'gpu-sweeper[precision]'`). None: fp32 with master weights,
            otherwise the data type of the weights.
        rounding: how AdamW rounds bf16 weights; None: to nearest. stochastic: at random, so that the mean is exact.
        imbalance: the busiest expert's tokens divided by the mean, forced regardless of the scores: 1 is perfect
            balance; above 1, the loads follow Zipf's law. None: each token goes to its highest-scoring experts.
        warmup: untimed steps, which also train the model.
        warmup_rounds: the maximum number of rounds in a warm-up step, which ends with an update; None: all rounds. One
            round compiles every kernel of a large step.
        steps: timed steps.
        learning_rate: AdamW's learning rate.
        data: a file of tokens or text to train on, see `workloads.llama.data`; None: synthetic tokens.
        tokenizer: a tokenizer.json that encodes the text; None: one token per byte.
        checkpoint: a Hugging Face folder to start from; None: random weights from `seed`.
        save_to: a folder to which a Hugging Face checkpoint is written at the end; None: none is written.
        profile: run one more step under PyTorch's profiler and keep its trace, including the ranges of
            `workloads.offload.engine`.
        seed: seed of the random weights and tokens.
    """

    device_gib: float = field(metadata={"min": 0})
    host_gib: float = field(metadata={"min": 0, "host_memory": "trial"})
    model: OffloadModelName = field(default="llama3_8b", metadata={"cpu_gib": _count_min_cpu_gib})
    distribution: Distribution | None = None
    sequence_length: int = field(default=8192, metadata={"min": 1})
    sequences_per_step: int = field(default=64, metadata={"min": 1})
    dtype: Literal["bf16", "fp32", "fp8_tensorwise", "fp8_blockwise"] = field(
        default="bf16", metadata={"unsupported_reason": unsupported_block_rate_reason}
    )
    master_weights: Literal["none", "fp32"] = "none"
    optimizer_states: Literal["fp32", "bf16", "int8"] | None = None
    rounding: Literal["nearest", "stochastic"] | None = None
    imbalance: float | None = field(default=None, metadata={"min": 1})
    warmup: int = field(default=1, metadata={"min": 0})
    warmup_rounds: int | None = field(default=None, metadata={"min": 1})
    steps: int = field(default=2, metadata={"min": 1})
    learning_rate: float = field(default=1e-4, metadata={"min": 0})
    data: str | None = field(default=None, metadata={"file": True})
    tokenizer: str | None = field(default=None, metadata={"file": True})
    checkpoint: str | None = field(default=None, metadata={"file": True})
    save_to: str | None = None
    profile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        if shape.experts and self.dtype == "fp8_blockwise":
            reason = "has experts, whose products have no scales of blocks; set dtype=fp8_tensorwise or bf16"
            raise ValueError(f"dtype={self.dtype}: {self.model} {reason}")
        if self.rounding == "stochastic" and (self.dtype == "fp32" or self.master_weights == "fp32"):
            raise ValueError("rounding=stochastic: weights in fp32 are not rounded; set rounding=nearest")
        if self.imbalance is not None:
            if not shape.experts:
                raise ValueError(f"imbalance={self.imbalance:g}: {self.model} has no experts; set imbalance=null")
            check_imbalance(self.imbalance, shape)

    @property
    def shape(self) -> Model:
        return MODELS[self.model]

    @property
    def routing(self) -> Routing:
        return Routing(self.imbalance, seed=self.seed)


class Offload(Workload):
    """Training on the GPUs of a host with the fastest plan within the memory budgets."""

    name = "offload"
    Parameters = OffloadParameters
    work = (
        *("model", "sequence_length", "sequences_per_step"),
        *("dtype", "master_weights", "optimizer_states", "rounding", "imbalance"),
    )
    ways = ("distribution", "warmup", "warmup_rounds", "steps", "save_to", "profile", "seed")
    measures = "tokens_per_step flops_per_step hardware_flops_per_step energy loss peak_device_gib peak_host_gib"
    measures += " copied_gib_per_step exchanged_gib_per_step copy_wait_share optimizer_share"
    benchmark_version = "offload/2"
    reports_steps = True
    max_world_size = None
    finalists = 0  # trials take minutes
    finals_rounds = 3
    estimates_plans = True
    exclusive = "node"  # another trial on the node would use the node's host memory and links

    def recorded_parameters(self, parameters: OffloadParameters) -> Mapping[str, Scalar]:
        recorded = dict(super().recorded_parameters(parameters))
        if parameters.shape.experts and parameters.imbalance is None:
            recorded["imbalance"] = "natural"  # so that a result names its routing
        return recorded

    def list_candidates(
        self, dimensions: Mapping[str, Sequence[Scalar]], constants: Mapping[str, Scalar], machine: Machine
    ) -> Iterator[Candidate]:
        from workloads.offload.catalogue_rates import list_candidates

        return list_candidates(dimensions, constants, machine)

    def find_band(self, parameters: OffloadParameters, machine: Machine) -> tuple[BandEnds, str]:
        # benchmarks/results: offload_h200_cells.csv, offload_gang_h100.md and offload_70b_h200.md; the rate of the head
        # and the cost of collectives were chosen after seeing these rows
        return BandEnds(0.15, 0.15), "the largest error of 21 trials on H200s and H100s; other GPUs were not compared"

    def preview(self, parameters: OffloadParameters, machine: Machine) -> str:
        reason = infeasible_reason(parameters.dtype, parameters.sequence_length, machine.architecture, parameters.shape)
        return f"infeasible: {reason}" if reason else ""
