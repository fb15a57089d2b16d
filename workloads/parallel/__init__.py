"""`workload=parallel`: train a decoder on a gang of ranks, in the layouts of the search space."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Literal

from workloads.api.contract import BandEnds, Candidate, Estimate, Machine, Scalar, Workload
from workloads.api.recipes import unsupported_block_rate_reason
from workloads.estimator.estimate import find_band
from workloads.estimator.memory import peak_memory
from workloads.estimator.step import step_seconds
from workloads.hardware.precisions import peak_tflops
from workloads.layouts.layout import DEGREES, LESS_LAYERS, ContextMethod, Job, Layout, TorchSchedule
from workloads.layouts.rules import Rule, Site, Violation, find_violation
from workloads.layouts.trainers import OWN
from workloads.models.flops import attended_length, model_flops_per_token
from workloads.models.model import Model
from workloads.models.routing import Routing, check_imbalance, tokens_of_experts
from workloads.models.trained import load_trained_model
from workloads.parallel.points import Listing
from workloads.precision import unsupported_layer_rate_reason

# The parameters that are layout fields with the same name.
LAYOUT_PARAMETERS = (
    *(*DEGREES, "stages_per_rank", "schedule", "micro_batch", "checkpointing", "checkpointing_freq"),
    *(*LESS_LAYERS, "reshard_after_forward", "cp_method", "cuda_graph", "ep"),
)
EXPERT_PARAMETERS = ("imbalance", "auxiliary_loss", "z_loss", "bias_rate")
TORCH_VERSION = tuple(int(part) for part in version("torch").split(".")[:2])
BlockKind = Literal["pytorch", "manual"]


def degree() -> int:  # a whole number of at least 1, by default 1
    return field(default=1, metadata={"min": 1})


@dataclass(frozen=True)
class ParallelParameters:
    """A layout (`workloads.layouts.layout.Layout`) and the model to train in this layout.

    Attributes:
        model: name of the model to train, or path of its Hugging Face config.json.
        layers: the number of blocks to train, from the start of the model; None for all.
        sequence_length: tokens per sequence.
        global_batch: sequences per step over all ranks.
        document_tokens: mean length of the documents that are packed into a sequence; tokens attend only to their own
            document. 0 means one document per sequence.
        dp_replicate: data-parallel degree, the number of full replicas of the model.
        dp_shard: sharded data-parallel degree (FSDP2) within each replica.
        tp: tensor-parallel degree, with sequence parallelism.
        cp: context-parallel degree; each rank has a part of the sequence.
        cp_method: gather all ranks' keys and values before attention, or move them around a ring during attention.
        async_tp: split tensor-parallel collectives and overlap them with the GEMMs, over symmetric memory.
        cuda_graph: record the passes of a step once and replay them, on one GPU with state bf16.
        pp: pipeline-parallel degree.
        ep: expert-parallel degree: the number of `dp_shard`, `cp` and `tp` ranks that divide the experts of a mixture.
        stages_per_rank: pipeline stages per rank.
        first_stage_less_layers: how many layers fewer than the other stages the first stage has; negative for more.
        last_stage_less_layers: how many layers fewer than the other stages the last stage has; negative for more.
        schedule: order of the pipeline's micro-batches.
        micro_batch: sequences that a rank computes at once.
        checkpointing: activations that are recomputed in the backward pass. selective_up recomputes the up projection,
            selective also the gate projection.
        checkpointing_freq: every Nth block is checkpointed; full with 2 is torchtitan's selective_ac_option=2.
        reshard_after_forward: gather sharded weights again for the backward pass; false keeps them gathered for a step.
        tp_across_nodes: tensor parallelism may span nodes.
        compile: compile each block separately.
        dtype: data type of the GEMMs. fp8, mxfp8 and nvfp4 apply to the GEMMs in blocks. With block pytorch, they use
            torchao's layers, and fp8_tensorwise also casts weights and tensor-parallel activations before gathering
            them; block manual has its own kernels for fp8_tensorwise and fp8_blockwise. A data type is rejected if the
            device has no units for it, or the block no layer.
        state: fp32 keeps weights, gradients and optimizer states in fp32, reduces in fp32 and clips the norm of the
            gradients at 1.0, as torchtitan does; bf16 keeps all of them in bf16 and does not clip.
        block: pytorch compiles a plain block, in every layout; manual has its own backward pass, and needs tp and cp
            of 1. Results of different blocks are not ranked together, nor are results of different states.
        imbalance: the busiest expert's tokens divided by the mean, forced regardless of the scores: 1 is perfect
            balance; above 1, the loads follow Zipf's law. None: each token goes to its highest-scoring experts.
        auxiliary_loss: coefficient of the loss that balances experts; None disables this loss.
        z_loss: coefficient of the loss that keeps the router's logits small; None disables this loss.
        bias_rate: step of the bias that balances experts without a loss; None disables this bias.
        data: a file of tokens or text to train on, see `workloads.llama.data`; None: synthetic tokens.
        tokenizer: a tokenizer.json that encodes the text; None: one token per byte.
        warmup: untimed steps, which also train the model.
        steps: timed steps.
        learning_rate: AdamW's learning rate.
        gc_freq: steps between garbage collections, as in torchtitan; 0 leaves collections to Python.
        seed: seed of the random weights and tokens.
    """

    model: str = field(default="llama3_8b", metadata={"file": ".json"})
    layers: int | None = field(default=None, metadata={"min": 1})
    sequence_length: int = field(default=8192, metadata={"min": 1})
    global_batch: int = field(default=8, metadata={"min": 1})
    document_tokens: int = field(default=0, metadata={"min": 0})
    dp_replicate: int = degree()
    dp_shard: int = degree()
    tp: int = degree()
    cp: int = degree()
    cp_method: ContextMethod = "allgather"
    async_tp: bool = False
    cuda_graph: bool = False
    pp: int = degree()
    ep: int = degree()
    stages_per_rank: int = degree()
    first_stage_less_layers: int = 0
    last_stage_less_layers: int = 0
    schedule: TorchSchedule = "1f1b"
    micro_batch: int = degree()
    checkpointing: Literal["none", "selective_up", "selective", "full"] = "none"
    checkpointing_freq: int = degree()
    reshard_after_forward: bool = True
    tp_across_nodes: bool = False
    compile: bool = True
    dtype: Literal["bf16", "fp32", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"] = field(
        default="bf16", metadata={"unsupported_reason": unsupported_layer_rate_reason}
    )
    state: Literal["fp32", "bf16"] = "fp32"
    block: BlockKind = "pytorch"
    imbalance: float | None = field(default=None, metadata={"min": 1})
    auxiliary_loss: float | None = field(default=None, metadata={"min": 0})
    z_loss: float | None = field(default=None, metadata={"min": 0})
    bias_rate: float | None = field(default=None, metadata={"min": 0})
    data: str | None = field(default=None, metadata={"file": True})
    tokenizer: str | None = field(default=None, metadata={"file": True})
    warmup: int = field(default=2, metadata={"min": 2})
    steps: int = field(default=5, metadata={"min": 1})
    learning_rate: float = field(default=1e-5, metadata={"min": 0})
    gc_freq: int = field(default=50, metadata={"min": 0})
    seed: int = 0

    def __post_init__(self) -> None:
        try:
            shape = load_trained_model(self.model)
        except ValueError as error:
            raise ValueError(f"model={self.model}: {error}") from error
        if self.layers is not None and self.layers > shape.layers:
            raise ValueError(f"layers={self.layers}: {self.model} has {shape.layers}")
        given = [name for name in EXPERT_PARAMETERS if getattr(self, name) is not None]
        if given and not self.shape.experts:
            where = f" in its first {self.layers} layers" if shape.experts else ""
            value = f"{given[0]}={getattr(self, given[0])}"
            raise ValueError(f"{value}: {self.model} has no experts{where}; set {given[0]}=null")
        if self.imbalance is not None:
            check_imbalance(self.imbalance, shape)
        if shape.gpt_oss and self.document_tokens:
            raise ValueError(
                f"document_tokens={self.document_tokens}: attention with sinks has no documents; set it to 0"
            )
        if self.data is not None and self.document_tokens:
            raise ValueError(f"document_tokens={self.document_tokens}: sequences of data are one document; set it to 0")

    @property
    def shape(self) -> Model:
        model = load_trained_model(self.model)
        if self.layers is None:
            return model
        dense = tuple(layer for layer in model.dense_layers if layer < self.layers)
        experts = model.experts if len(dense) < self.layers else 0
        return replace(model, layers=self.layers, dense_layers=dense, experts=experts)

    @property
    def routing(self) -> Routing:
        losses = {name: getattr(self, name) or 0.0 for name in EXPERT_PARAMETERS if name != "imbalance"}
        return Routing(self.imbalance, **losses, seed=self.seed)

    @property
    def rank_imbalance(self) -> float:
        """The tokens forced on the busiest rank, divided by the mean; 1 for natural routing, where this is unknown."""
        if self.imbalance is None or self.ep == 1:
            return 1.0
        tokens = 10_000 * self.shape.experts
        loads = tokens_of_experts(tokens, self.shape.experts, self.imbalance, self.seed)
        share = self.shape.experts // self.ep
        return max(sum(loads[first : first + share]) for first in range(0, len(loads), share)) * self.ep / tokens

    @property
    def layout(self) -> Layout:
        layout = Layout(
            **{name: getattr(self, name) for name in LAYOUT_PARAMETERS},
            global_batch=self.global_batch,
            tp_overlap="async" if self.async_tp else "none",
        )
        return layout if layout.uses_fsdp(self.state) else replace(layout, sharding="none")

    @property
    def attended_length(self) -> float:
        """The length of a single-document sequence with the same attention cost."""
        return attended_length(self.sequence_length, self.document_tokens)

    @property
    def job(self) -> Job:
        """The job to estimate. All its documents have the same length, chosen to give the same attention cost."""
        return Job(
            model=self.shape,
            layout=self.layout,
            sequence_length=self.sequence_length,
            trainer=OWN,
            precision=self.dtype,
            state=self.state,
            compiled=self.compile,
            manual_backward=self.block == "manual",
            document_tokens=round(self.attended_length) if self.document_tokens else 0,
            dispatcher="allgather",
            expert_imbalance=self.rank_imbalance,
            expert_loads="natural" if self.imbalance is None else "equal" if self.imbalance == 1 else "unequal",
        )

    def find_violation(self, machine: Machine, rules: Iterable[Rule] | None = None) -> Violation | None:
        """Return the data type that the device lacks, or the first of the `rules` (by default, all) that is broken."""
        architecture, on_gpu = machine.architecture, machine.kind == "gpu"
        find = unsupported_block_rate_reason if self.block == "manual" else unsupported_layer_rate_reason
        if architecture and (reason := find(self.dtype, architecture)):
            return Violation("the device has the data type", f"dtype={self.dtype} is {reason}")
        site = Site(machine.world_size, machine.ranks_per_node, architecture=architecture, on_gpu=on_gpu)
        site = replace(site, tp_across_domains=self.tp_across_nodes, torch=TORCH_VERSION)
        return find_violation(self.job, site, rules)

    def estimate_speed(self, machine: Machine) -> dict[str, float]:
        """Estimate the layout's speed metrics, including the MFU if the device's peak is known."""
        job, cluster = self.job, machine.cluster
        step_s = step_seconds(job, cluster)
        tokens_per_s = job.layout.global_batch * job.sequence_length / step_s
        metrics = {"tokens_per_s": tokens_per_s, "step_time_ms": 1e3 * step_s}
        if peak := peak_tflops(cluster.device, job.precision):
            flops_per_token = model_flops_per_token(job.model, self.attended_length)
            metrics["mfu"] = tokens_per_s * flops_per_token / cluster.gpus / (1e12 * peak)
        return metrics


class Parallel(Workload):
    """One layout, trained for a few steps."""

    name = "parallel"
    Parameters = ParallelParameters
    work = (
        *("model", "layers", "sequence_length", "global_batch", "document_tokens", "dtype", "state", "block"),
        *(*EXPERT_PARAMETERS, "data", "tokenizer"),
    )
    ways = (*LAYOUT_PARAMETERS, "async_tp", "tp_across_nodes", "compile", "warmup", "steps", "gc_freq", "seed")
    measures = "tokens_per_step flops_per_step hardware_flops_per_step energy loss peak_device_gib"
    # New in 2: new tokens in each step, fp32 state and PyTorch's block by default, FSDP in torchtitan's units.
    # New in 3: initial weights as in torchtitan.
    benchmark_version = "parallel/3"
    max_world_size = None
    finals_rounds = 3
    has_estimates = True
    reports_steps = True
    can_scale = True

    def recorded_parameters(self, parameters: ParallelParameters) -> Mapping[str, Scalar]:
        recorded = dict(super().recorded_parameters(parameters))
        if parameters.shape.experts and parameters.imbalance is None:
            recorded["imbalance"] = "natural"  # so that a result names its routing
        return recorded

    def estimate(self, parameters: ParallelParameters, machine: Machine) -> Estimate:
        """Check whether the layout is valid and fits in memory, and estimate its speed."""
        description = str(parameters.layout)
        if violation := parameters.find_violation(machine):
            return Estimate(violation.reason, violation.rule, description=description)
        memory_gib = peak_memory(parameters.job, machine.cluster).needed_gib
        if machine.memory_gib is not None and memory_gib > machine.memory_gib:
            reason = f"needs {memory_gib:.1f} GiB of device memory, the device has {machine.memory_gib:.1f}"
            return Estimate(reason, "the layout fits into memory", {"memory_gib": memory_gib}, description)
        metrics = {"memory_gib": memory_gib, **parameters.estimate_speed(machine)}
        return Estimate(metrics=metrics, description=description)

    def find_band(self, parameters: ParallelParameters, machine: Machine) -> tuple[BandEnds, str]:
        band = find_band(parameters.job, machine.cluster)
        natural = parameters.job.expert_loads == "natural" and parameters.ep > 1
        assumed = ". Natural routing is planned as if each rank had equally many tokens; trials record rank_imbalance"
        return band.ends, band.meaning + assumed * natural

    def list_candidates(
        self, dimensions: Mapping[str, Sequence[Scalar]], constants: Mapping[str, Scalar], machine: Machine
    ) -> Iterator[Candidate]:
        return Listing(self, dimensions, constants, machine).candidates()

    def scale(self, parameters: ParallelParameters, factor: int) -> ParallelParameters:
        """Return the layout on `factor` times the devices, with replicas and batch scaled by the same factor."""
        copies, batch = parameters.dp_replicate * factor, parameters.global_batch * factor
        return replace(parameters, dp_replicate=copies, global_batch=batch)
