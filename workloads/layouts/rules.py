"""The rules that a valid layout follows: rules for all trainers, and rules for particular trainers.

A rule is a row in `RULES`. If a rule applies to only some trainers, its row names them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from workloads.hardware.cluster import Cluster
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import DEGREES, SPLIT_SCHEDULES, V_SCHEDULES, Job
from workloads.layouts.trainers import OWN, TRAINERS, find_trainer, is_own

PLAIN_PRECISIONS = ("bf16", "fp32")
BLOCK_PRECISIONS = {  # of `workload=parallel`: torchao's layers, and a block with its own kernels
    "pytorch": (*PLAIN_PRECISIONS, "fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"),
    "manual": (*PLAIN_PRECISIONS, "fp8_tensorwise", "fp8_blockwise"),
}
VARLEN_TORCH = SPLIT_LOSS_TORCH = (2, 13)


@dataclass(frozen=True)
class Site:
    """The properties of a layout's ranks that rules depend on."""

    ranks: int
    domain: int  # ranks in a node, or in a larger domain connected by links
    device: str = ""
    # The peak of each device by data type; empty if unknown.
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    tp_across_domains: bool = False  # tensor parallelism may span several domains
    on_gpu: bool = True
    # The torch version that runs the layout; None if the layout is planned for another machine.
    torch: tuple[int, ...] | None = None
    architecture: str = ""  # `workloads.api.recipes` defines it; empty in plans, which assume that kernels exist

    @classmethod
    def of(cls, cluster: Cluster) -> Site:
        device = cluster.device
        return cls(cluster.gpus, cluster.topology.gpus_per_domain, device.name, device.peak_tflops)

    def find_older_torch(self, needed: tuple[int, ...]) -> str:
        """Return the version of torch if it is older than needed, else ""."""
        return ".".join(map(str, self.torch)) if self.torch is not None and self.torch < needed else ""


class Rule(NamedTuple):
    """A rule: a name, and a check that yields the reasons why a job breaks the rule."""

    name: str
    check: Callable[[Job, Site], Iterator[str]]
    trainers: frozenset[str] | None = None  # the trainers that have the rule; None for all
    # A search checks the rule for each value of checkpointing and resharding, which trade memory for time. This does
    # not include the resharding of unsharded weights, which a search sets in every layout.
    is_tradable: bool = False


@dataclass(frozen=True)
class Violation:
    rule: str
    reason: str


def find_violation(job: Job, place: Cluster | Site, rules: Iterable[Rule] | None = None) -> Violation | None:
    """Return the first of the `rules` (by default, all rules for the job's trainer) that the job breaks, or None."""
    site = place if isinstance(place, Site) else Site.of(place)
    for rule in rules_of(job.trainer) if rules is None else rules:
        for reason in rule.check(job, site):
            return Violation(rule.name, reason)
    return None


def find_common_violation(job: Job, place: Cluster | Site) -> Violation | None:
    """Return the first rule that a job of an unknown trainer breaks. Megatron has the strictest of the common rules."""
    return find_violation(replace(job, trainer="megatron"), place, [rule for rule in RULES if rule.trainers is None])


@cache
def rules_of(trainer: str) -> tuple[Rule, ...]:
    name = find_trainer(trainer).name
    return tuple(rule for rule in RULES if rule.trainers is None or name in rule.trainers)


def _is_megatron(job: Job) -> bool:
    return find_trainer(job.trainer).core == "megatron"


def _check_ranks(job: Job, site: Site) -> Iterator[str]:
    if job.layout.gpus != site.ranks:
        degrees = " x ".join(f"{name} {getattr(job.layout, name)}" for name in DEGREES)
        yield f"{degrees} = {job.layout.gpus} ranks, but there are {site.ranks}"


def _check_tp(job: Job, site: Site) -> Iterator[str]:
    model, tp = job.model, job.layout.tp
    sizes = {
        "heads": model.heads,
        "hidden size": model.hidden_size,
        "intermediate size": model.intermediate_size,
        "tokens of a sequence on a rank": job.sequence_length // job.layout.cp,
        "tokens of the vocabulary": model.vocabulary if is_own(job) else 0,  # others pad it
    }
    yield from (f"tp {tp} does not divide {size} {name}" for name, size in sizes.items() if size % tp)
    if not (trainer := find_trainer(job.trainer)).divides_kv_heads(model.kv_heads, tp):
        multiple = ", nor is it a multiple of them" if trainer.shares_kv_heads else ""
        yield f"tp {tp} does not divide {model.kv_heads} key-value heads{multiple}"


def _check_domain(job: Job, site: Site) -> Iterator[str]:
    if job.layout.tp > site.domain and not site.tp_across_domains:
        place = f"a domain of {site.domain} GPUs that links connect"
        if site.torch:
            place = f"a node of {site.domain}, and tp_across_nodes is false"
        yield f"tp {job.layout.tp} does not fit in {place}"


def _check_cp(job: Job, site: Site) -> Iterator[str]:
    parts = 2 * job.layout.cp  # a rank has one part from the front and one from the back, so all ranks do equal work
    if job.layout.cp > 1 and job.sequence_length % parts:
        yield f"cp {job.layout.cp} needs a sequence length divisible by {parts}, {job.sequence_length} is not"
    if is_own(job) and job.layout.cp == 1 and job.layout.cp_method != "allgather":
        yield "cp 1 divides no sequence: cp_method has to be allgather"


def _check_batch(job: Job, site: Site) -> Iterator[str]:
    layout = job.layout
    if layout.global_batch % (layout.micro_batch * layout.dp):
        product = f"micro-batch {layout.micro_batch} x data parallel {layout.dp}"
        yield f"global batch {layout.global_batch} is not a multiple of {product}"


def _check_stages(job: Job, site: Site) -> Iterator[str]:
    layout, is_single = job.layout, job.layout.stages_per_rank == 1
    # Primus's zero_bubble.yaml has one stage per rank; PyTorch's InterleavedZeroBubble has several.
    needs_single = layout.schedule in (("1f1b", "zero_bubble") if job.trainer == "primus" else ("1f1b",))
    if layout.stages > job.model.layers:
        yield f"{layout.stages} stages, but the model has {job.model.layers} layers"
    if layout.pp == 1:
        if not (is_single and layout.schedule == "1f1b"):
            yield "pp 1 is not a pipeline: it needs stages_per_rank 1 and schedule 1f1b"
    elif layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        yield f"schedule {layout.schedule} needs stages_per_rank 2"
    elif needs_single != is_single:
        yield f"schedule {layout.schedule} needs stages_per_rank {'1' if needs_single else 'above 1'}"


def _check_less_layers(job: Job, site: Site) -> Iterator[str]:
    layout, (first, last) = job.layout, job.layout.less_layers
    layers, given = job.model.layers, f"first_stage_less_layers {first} and last_stage_less_layers {last}"
    by_rank = _is_megatron(job) and not {first, last} <= {0, 1}  # Megatron-LM has other settings for 0 and 1
    halves = first % layout.stages_per_rank or last % layout.stages_per_rank
    if layout.pp == 1 and (first or last):
        yield "pp 1 is not a pipeline: first_stage_less_layers and last_stage_less_layers have to be 0"
    elif (layers + first + last) // layout.stages <= max(0, first, last):
        yield f"{given} leave a stage without layers: {layers} layers in {layout.stages} stages"
    elif (first or last) and _is_megatron(job) and (layers + first + last) % layout.stages:
        yield f"{given} do not leave the other stages equally many of {layers} layers, as {job.trainer} needs"
    elif by_rank and (layout.schedule in V_SCHEDULES or halves):
        yield f"{given} do not divide into {layout.stages_per_rank} stages on a rank, as {job.trainer} needs"


def _check_microbatches(job: Job, site: Site) -> Iterator[str]:
    """Check the number of micro-batches, also for whole rounds of PyTorch's looped schedules and of Megatron-LM's
    interleaved schedule (pipeline_parallel/schedules.py, 0.16.1 to 0.20)."""
    layout, count = job.layout, job.layout.microbatches
    if layout.pp == 1:
        return
    if count < layout.pp:
        yield f"{count} micro-batches do not fill a pipeline of {layout.pp} ranks"
    if layout.schedule == "dualpipev" and count < layout.stages:
        yield f"schedule dualpipev needs {layout.stages} micro-batches, one for each stage"
    multiple = layout.pp if _is_megatron(job) and layout.schedule == "interleaved" else max(1, count // layout.pp)
    if layout.schedule in ("interleaved", "zero_bubble") and count % multiple:
        yield f"schedule {layout.schedule} needs a multiple of {multiple} micro-batches, {count} is not"


def _check_experts(job: Job, site: Site) -> Iterator[str]:
    layout, ep, experts = job.layout, job.layout.ep, job.model.experts
    ranks, sharing = layout.gpus // layout.pp, layout.dp_shard * layout.cp * layout.tp
    if ep > 1 and not experts:
        yield f"ep {ep}: the model has no experts"
    if experts % ep:
        yield f"ep {ep} does not divide {experts} experts"
    if ranks % ep:
        yield f"ep {ep} does not divide the {ranks} GPUs of a pipeline rank"
    divides = job.trainer in ONLY_OWN | TITAN or (_is_megatron(job) and layout.sharding not in ("none", "fsdp2"))
    if divides and sharing % ep:
        yield f"ep {ep} has to be a divisor of dp_shard x cp x tp = {sharing}"
    spans_cp = find_trainer(job.trainer).name == "prime-rl"  # experts span all ranks of `cp` and some of `dp_shard`
    if spans_cp and ep > 1 and (ep % layout.cp or sharing // layout.tp % ep):
        yield f"ep {ep} has to be a multiple of cp {layout.cp} and a divisor of dp_shard x cp = {sharing // layout.tp}"


def _check_positions(job: Job, site: Site) -> Iterator[str]:
    if job.model.positions == "learned" and job.model.max_positions < job.sequence_length:
        yield f"sequence_length={job.sequence_length} is above the model's {job.model.max_positions} learned positions"


def _check_divided_sequence(job: Job, site: Site) -> Iterator[str]:
    """Check that tensor parallelism divides the sequence, in Megatron-LM only if the model or the overlap needs it."""
    needs = not _is_megatron(job) or job.model.experts > 0 or job.layout.tp_overlap == "async"
    if needs and job.layout.tp > 1 and not job.layout.sequence_parallel:
        yield f"tp {job.layout.tp} of {job.trainer} divides the sequence here: sequence_parallel has to be true"


def _check_titan_replicas(job: Job, site: Site) -> Iterator[str]:
    """Check layouts without shards, which use DDP (models/llama3/infra/parallelize.py, 0.2.2). With tp or pp, mixed
    precision is then off (`maybe_enable_amp` of distributed/utils.py)."""
    layout, state = job.layout, job.state
    if layout.is_sharded or layout.tp * layout.pp == 1:
        return
    if layout.dp_replicate > 1:
        yield "dp_replicate without dp_shard or cp is DDP, which torchtitan does not combine with tp or pp"
    if state != "bf16" and job.precision != "fp32":
        yield f"tp and pp compute in fp32 where nothing is sharded: dp_shard or cp above 1, or state=bf16, not {state}"


def _check_titan(job: Job, site: Site) -> Iterator[str]:
    """Check the sequence (`seq_len_divisor` of parallel_dims.py), and that rounding up twice gives the number of stages
    again (`pipeline_llm`)."""
    layout, tp, cp = job.layout, job.layout.tp, job.layout.cp
    layers = job.model.layers + sum(layout.less_layers)
    if tp * cp > 1 and job.sequence_length % (2 * tp * cp):
        yield f"tp {tp} x cp {cp} needs a sequence length divisible by {2 * tp * cp}, {job.sequence_length} is not"
    if layout.tp_overlap == "async" and not job.compiled:
        yield "tp_overlap=async is a pass of the compiler: compiled has to be true"
    if layout.pp > 1 and math.ceil(layers / math.ceil(layers / layout.stages)) != layout.stages:
        yield f"no number of layers on a stage gives {layout.stages} stages"
    if layout.pp > 1 and job.model.qk_norm == "head":
        yield "torchtitan 0.2.2 has no pipeline for models with norms of queries and keys: pp has to be 1"


def _check_megatron(job: Job, site: Site) -> Iterator[str]:
    """Check that stages are even, also with one layer fewer on each end (`canonical_layout`), that the layers of the
    ends can be counted by rank or as one fewer, and the limits of shardings and of recomputed modules."""
    layout, less, layers = job.layout, job.layout.less_layers, job.model.layers
    if not any(less) and layers % layout.stages and (layers + 2) % layout.stages:
        yield f"{layers} layers do not divide into {layout.stages} stages (pp x stages_per_rank)"
    if layout.sharding == "megatron_fsdp" and not layout.reshard_after_forward:
        yield "reshard_after_forward=false has no setting with sharding=megatron_fsdp"
    if layout.sharding == "fsdp2":  # megatron/training/arguments.py, `validate_args`
        unlike = {name: getattr(layout, name) > 1 for name in find_trainer(job.trainer).alone.get("fsdp2", ())}
        unlike |= {"a tied head": job.model.tied, "precision=fp16": job.precision == "fp16"}
        yield from (f"sharding=fsdp2 does not run with {name}" for name, is_set in unlike.items() if is_set)
    if layout.checkpointing == "norm_act" and not job.model.experts:
        yield f"checkpointing=norm_act is not of a dense model: {job.trainer} recomputes activations in experts alone"


def _check_sharding(job: Job, site: Site) -> Iterator[str]:
    cp = job.layout.cp if job.trainer in ONLY_OWN | TITAN else 1  # FSDP2 shards over both
    if job.layout.sharding == "none" and job.layout.dp_shard * cp > 1:
        yield f"dp_shard {job.layout.dp_shard}{f' x cp {cp}' * (cp > 1)} shards states, but sharding is none"
    is_wrapped = is_own(job) and job.state == "fp32"  # by FSDP, also on a single rank (`Layout.uses_fsdp`)
    if not (job.layout.reshard_after_forward or job.layout.is_sharded or is_wrapped):
        state = " in state bf16" if is_own(job) else ""
        yield f"dp_shard 1 and cp 1 shard no weights{state}: reshard_after_forward has to be true"


def _check_dtype(job: Job, site: Site) -> Iterator[str]:
    dtype = PRECISIONS[job.precision].dtype
    if site.peak_tflops and dtype not in site.peak_tflops:
        known = ", ".join(name for name in PRECISIONS if name in site.peak_tflops)
        yield f"precision={job.precision}: {site.device} has no {dtype} units or no known peak for them. It has {known}"


def _check_own_precision(job: Job, site: Site) -> Iterator[str]:
    block = "manual" if job.manual_backward else "pytorch"
    if job.precision not in BLOCK_PRECISIONS[block]:
        available = ", ".join(BLOCK_PRECISIONS[block])
        yield f"precision={job.precision}: block {block} does not train in it. Available: {available}"


def _check_checkpointing(job: Job, site: Site) -> Iterator[str]:
    freq, layers = job.layout.checkpointing_freq, job.model.layers
    if freq > 1 and job.layout.checkpointing == "none":
        yield "checkpointing none recomputes no block: checkpointing_freq has to be 1"
    if freq > 1 and freq > layers:
        yield f"checkpointing_freq {freq} recomputes none of {layers} blocks"


def _check_selective_up(job: Job, site: Site) -> Iterator[str]:
    if job.layout.checkpointing != "selective_up":
        return
    model = job.model
    if model.experts or model.mlp_matrices < 3:
        yield "selective_up needs gated MLPs, and the model has experts or no gate: use selective"
    if model.intermediate_size in (model.hidden_size, model.linear("qkv")[1]):
        yield "selective_up does not know gate from other GEMMs of its size: use selective"
    if job.layout.tp > 1 and not job.manual_backward:
        yield "selective_up does not divide the GEMM of gate and up among tp ranks: tp has to be 1"
    if job.precision not in PLAIN_PRECISIONS and not job.manual_backward:
        yield f"selective_up does not divide {job.precision} GEMMs of torchao's layers: use selective"


def _check_split_backward(job: Job, site: Site) -> Iterator[str]:
    layout, schedule = job.layout, job.layout.schedule
    if schedule not in SPLIT_SCHEDULES:
        return
    if older := site.find_older_torch(SPLIT_LOSS_TORCH):
        yield f"{schedule} does not split this loss's backward pass before torch 2.13, this is {older}"
    if job.compiled:
        yield f"{schedule} splits the backward pass, which a compiled block does not support: compile has to be false"
    if layout.checkpointing in ("selective_up", "selective"):
        yield f"{schedule} goes through a block twice, which selective checkpointing does not support"
    if layout.uses_fsdp(job.state) and layout.reshard_after_forward:
        needed = "false" if layout.is_sharded or job.state == "fp32" else "false, with dp_shard above 1"
        wrong = f"{schedule} computes wrong gradients where weights are gathered again"
        yield f"{wrong}: reshard_after_forward has to be {needed}"


def _check_tied_head(job: Job, site: Site) -> Iterator[str]:
    if job.model.tied and job.layout.pp > 1:
        yield "the model's head is its embedding: both have to be in one stage, so pp has to be 1"


def _check_low_precision(job: Job, site: Site) -> Iterator[str]:
    """Check the limits of low-precision layers on schedules, tensor parallelism, and the tokens and sizes per rank."""
    layout, model, dtype = job.layout, job.model, job.precision
    if dtype in PLAIN_PRECISIONS:
        return
    if layout.schedule in SPLIT_SCHEDULES:
        yield f"{layout.schedule} splits the backward pass, which a layer in {dtype} does not support"
    if layout.tp > 1 and not dtype.startswith("fp8"):
        yield f"dtype {dtype} has no tensor parallel layers here: tp has to be 1"
    multiple = PRECISIONS[dtype].multiple
    tokens = layout.micro_batch * job.sequence_length // layout.cp
    if tokens % multiple:
        yield f"{dtype} needs tokens in multiples of {multiple}, a micro-batch leaves {tokens} on a rank"
    sizes_on_rank = {
        "hidden size": model.hidden_size,
        "heads": model.heads * model.head_size // layout.tp,
        "keys and values": 2 * model.kv_heads * model.head_size // layout.tp,
        "intermediate size": model.intermediate_size // layout.tp,
    }
    for name, size in sizes_on_rank.items():
        if size % multiple:
            yield f"{dtype} needs sizes in multiples of {multiple}, tp {layout.tp} leaves {size} of {name}"


def _check_async_tp(job: Job, site: Site) -> Iterator[str]:
    """Check the limits of PyTorch's asynchronous tensor parallelism (`async_tp`; `tp_overlap=async` in a plan)."""
    tp = job.layout.tp
    if job.layout.tp_overlap == "none":
        return
    if tp == 1:
        yield "tp 1 has no collectives: async_tp has to be false"
    if not job.compiled:
        yield "async_tp is a pass of the compiler: compile has to be true"
    if not site.on_gpu:
        yield "async_tp copies between the memories of GPUs: on a CPU it has to be false"
    if tp > site.domain:
        yield f"async_tp maps the memory of GPUs of one node: tp {tp} does not fit in {site.domain}"


def _check_cuda_graph(job: Job, site: Site) -> Iterator[str]:
    """Check that a recording stays valid: it must not contain collectives or FSDP, which reallocates weights."""
    if not job.layout.cuda_graph:
        return
    if not site.on_gpu:
        yield "cuda_graph records the launches of a GPU: on a CPU it has to be false"
    if job.layout.gpus > 1:
        yield f"cuda_graph has no collectives: it needs one rank, these are {job.layout.gpus}"
    if job.layout.uses_fsdp(job.state):
        yield "cuda_graph does not record FSDP, which casts fp32 weights: state has to be bf16"


def _check_documents(job: Job, site: Site) -> Iterator[str]:
    if not job.document_tokens:
        return
    if job.layout.cp > 1:
        yield "document_tokens needs whole sequences: cp has to be 1"
    if job.manual_backward:
        yield "block manual attends to whole sequences: document_tokens needs block pytorch"
    if site.on_gpu and (older := site.find_older_torch(VARLEN_TORCH)):
        yield f"document_tokens needs the varlen_attn of torch 2.13, this is {older}"
    if site.on_gpu and job.precision == "fp32":
        yield "document_tokens needs half precision on a GPU: dtype has to be bf16 or lower"


def _check_state(job: Job, site: Site) -> Iterator[str]:
    if job.state == "bf16" and (dtype := PRECISIONS[job.precision].dtype) in ("fp16", "fp32"):
        yield f"state bf16 keeps weights in bf16, and dtype {dtype} multiplies {dtype} ones: state has to be fp32"


def _check_block(job: Job, site: Site) -> Iterator[str]:
    """Check that a rank has whole weights and whole sequences, as the manual backward pass requires."""
    tp, cp, schedule = job.layout.tp, job.layout.cp, job.layout.schedule
    if not job.manual_backward:
        return
    if tp * cp > 1:
        yield f"block manual has whole weights and sequences: tp {tp} and cp {cp} have to be 1"
    if schedule in SPLIT_SCHEDULES:
        yield f"{schedule} splits the backward pass, and that of block manual is one: block has to be pytorch"


def _check_sinks(job: Job, site: Site) -> Iterator[str]:
    """Check that attention with sinks has a kernel: FlashAttention 4 (workloads/attention/kernels.toml), or a CPU."""
    if job.model.gpt_oss and not re.match(r"(cpu|sm(9|10)\d)\b|$", site.architecture):
        needs = "needs FlashAttention 4, for NVIDIA GPUs of compute capability 9.x or 10.x"
        yield f"the model's attention with sinks {needs}; this device is {site.architecture.split()[0]}"


def _check_own_model(job: Job, site: Site) -> Iterator[str]:
    """Check the limits of blocks with experts, or with norms of queries and keys."""
    model, schedule = job.model, job.layout.schedule
    part = "experts" if model.experts else "norms of queries and keys" if model.qk_norm else ""
    if not part:
        return
    if job.manual_backward:
        yield f"block manual has no {part}: block has to be pytorch"
    if model.gpt_oss and job.layout.cp > 1:
        yield f"cp {job.layout.cp} does not divide attention with sinks and windows here: cp has to be 1"
    if not model.experts:
        return
    if job.layout.tp_overlap == "async":
        yield "async_tp was not run with experts: it has to be false"
    if job.precision not in PLAIN_PRECISIONS:
        yield f"experts have no products in {job.precision} here: dtype has to be bf16"
    if job.precision == "fp32" and site.on_gpu:
        yield "grouped products of a GPU are in bf16: dtype has to be bf16"
    if schedule in SPLIT_SCHEDULES:
        yield f"{schedule} splits the backward pass, which grouped products do not support"


ONLY_OWN = frozenset({OWN})
TITAN = frozenset({"torchtitan"})
MEGATRON = frozenset(name for name, trainer in TRAINERS.items() if trainer.core == "megatron")
RULES = (
    Rule("the degrees multiply to the number of ranks", _check_ranks),
    Rule("the device has the attention kernel", _check_sinks, ONLY_OWN),
    Rule("tp divides heads, sizes and sequence", _check_tp),
    Rule("tp stays within a node", _check_domain),
    Rule("cp divides the sequence", _check_cp),
    Rule("micro-batches divide the global batch", _check_batch),
    Rule("stages and schedule agree", _check_stages),
    Rule("each stage has a layer", _check_less_layers),
    Rule("micro-batches fill the pipeline", _check_microbatches),
    Rule("ep divides the experts", _check_experts),
    Rule("positions cover the sequence", _check_positions),
    Rule("tp divides the sequence", _check_divided_sequence, ONLY_OWN | TITAN | MEGATRON),
    Rule("replicas are alone", _check_titan_replicas, TITAN),
    Rule("torchtitan has the settings", _check_titan, TITAN),
    Rule("Megatron-LM has the settings", _check_megatron, MEGATRON),
    Rule("what is sharded agrees", _check_sharding),
    Rule("the device has the data type", _check_dtype),
    Rule("state and products agree", _check_state),
    Rule("the trainer has the precision", _check_own_precision, ONLY_OWN),
    Rule("checkpointing_freq selects blocks", _check_checkpointing, ONLY_OWN, is_tradable=True),
    Rule("the GEMM of gate and up can be divided", _check_selective_up, ONLY_OWN, is_tradable=True),
    Rule("a split backward pass is supported", _check_split_backward, ONLY_OWN, is_tradable=True),
    Rule("a tied head shares a stage with the embedding", _check_tied_head, ONLY_OWN | TITAN),
    Rule("fp8 is supported", _check_low_precision, ONLY_OWN),
    Rule("asynchronous tensor parallel is supported", _check_async_tp, ONLY_OWN),
    Rule("a CUDA graph is supported", _check_cuda_graph, ONLY_OWN),
    Rule("document masks are supported", _check_documents, ONLY_OWN),
    Rule("the manual block is supported", _check_block, ONLY_OWN),
    Rule("the model's blocks are supported", _check_own_model, ONLY_OWN),
)
