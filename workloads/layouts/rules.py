"""The rules that make a layout valid: what every trainer needs, and what this project's own one does.

A rule is a row of `RULES`. A rule that only some trainers have names them in its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from workloads.hardware.cluster import Cluster
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import DEGREES, SPLIT_SCHEDULES, V_SCHEDULES, Job
from workloads.layouts.trainers import OWN, TRAINERS, find_trainer

PLAIN_PRECISIONS = ("bf16", "fp32")
OWN_PRECISIONS = (*PLAIN_PRECISIONS, "fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4")  # those of `workload=parallel`
VARLEN_TORCH = SPLIT_LOSS_TORCH = (2, 13)


@dataclass(frozen=True)
class Site:
    """The ranks on which a layout is to run, as far as rules depend on it.

    Attributes:
        domain: ranks of a node, or of a larger domain that links connect.
        peak_tflops: of each device by data type; empty where it is not known.
        tp_across_domains: tensor parallel may leave a domain.
        torch: the version that runs the layout; None where the layout is planned for another machine.
    """

    ranks: int
    domain: int
    device: str = ""
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    tp_across_domains: bool = False
    on_gpu: bool = True
    torch: tuple[int, ...] | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Site:
        """Return the site of a plan."""
        device = cluster.device
        return cls(cluster.gpus, cluster.topology.gpus_per_domain, device.name, device.peak_tflops)

    def lacks_torch(self, needed: tuple[int, ...]) -> bool:
        return self.torch is not None and self.torch < needed

    @property
    def torch_name(self) -> str:
        return ".".join(map(str, self.torch or ()))


Check = Callable[[Job, Site], str]


class Rule(NamedTuple):
    """A row: the rule's name, and a check that returns the reason why a job breaks it, or nothing.

    Attributes:
        trainers: those that have the rule; None for all.
        is_tradable: a search checks it for each value of checkpointing and resharding, which trade memory for time.
            Weights that nothing shards are not among them: a search reshards them in every layout.
    """

    name: str
    check: Check
    trainers: frozenset[str] | None = None
    is_tradable: bool = False


@dataclass(frozen=True)
class Violation:
    """A rule that a job breaks, and the reason with its numbers."""

    rule: str
    reason: str


def find_violation(job: Job, place: Cluster | Site, rules: Iterable[Rule] | None = None) -> Violation | None:
    """Return the first rule that the job breaks, of its trainer's rules if none are given; None for a valid job."""
    site = place if isinstance(place, Site) else Site.of(place)
    for rule in rules_of(job.trainer) if rules is None else rules:
        if reason := rule.check(job, site):
            return Violation(rule.name, reason)
    return None


@cache
def rules_of(trainer: str) -> tuple[Rule, ...]:
    """Return the rules that a trainer has."""
    name = find_trainer(trainer).name
    return tuple(rule for rule in RULES if rule.trainers is None or name in rule.trainers)


def _first(*reasons: tuple[bool, str]) -> str:
    """Return the first reason that applies; empty where none does."""
    return next((reason for applies, reason in reasons if applies), "")


def _check_ranks(job: Job, site: Site) -> str:
    if job.layout.gpus == site.ranks:
        return ""
    degrees = " x ".join(f"{name} {getattr(job.layout, name)}" for name in DEGREES)
    return f"{degrees} = {job.layout.gpus} ranks, but there are {site.ranks}"


def _check_tp(job: Job, site: Site) -> str:
    model, tp = job.model, job.layout.tp
    sizes = {
        "heads": model.heads,
        "hidden size": model.hidden_size,
        "intermediate size": model.intermediate_size,
        "tokens of a sequence on a rank": job.sequence_length // job.layout.cp,
    }
    return next((f"tp {tp} does not divide {size} {name}" for name, size in sizes.items() if size % tp), "")


def _check_kv_heads(job: Job, site: Site) -> str:
    kv_heads, tp = job.model.kv_heads, job.layout.tp
    return f"tp {tp} does not divide {kv_heads} key-value heads" if kv_heads % tp else ""


def _check_vocabulary(job: Job, site: Site) -> str:
    vocabulary, tp = job.model.vocabulary, job.layout.tp
    return f"tp {tp} does not divide {vocabulary} tokens of the vocabulary" if vocabulary % tp else ""


def _check_domain(job: Job, site: Site) -> str:
    if job.layout.tp <= site.domain or site.tp_across_domains:
        return ""
    if site.torch:
        return f"tp {job.layout.tp} does not fit in a node of {site.domain}, and tp_across_nodes is false"
    return f"tp {job.layout.tp} does not fit in a domain of {site.domain} GPUs that links connect"


def _check_cp(job: Job, site: Site) -> str:
    parts = 2 * job.layout.cp  # a rank has one part from the front and one from the back, so that all do equal work
    if job.layout.cp == 1 or job.sequence_length % parts == 0:
        return ""
    return f"cp {job.layout.cp} needs a sequence length divisible by {parts}, {job.sequence_length} is not"


def _check_cp_method(job: Job, site: Site) -> str:
    if job.layout.cp > 1 or job.layout.cp_method == "allgather":
        return ""
    return "cp 1 divides no sequence: cp_method has to be allgather"


def _check_batch(job: Job, site: Site) -> str:
    layout = job.layout
    if layout.global_batch % (layout.micro_batch * layout.dp) == 0:
        return ""
    product = f"micro-batch {layout.micro_batch} x data parallel {layout.dp}"
    return f"global batch {layout.global_batch} is not a multiple of {product}"


def _check_stages(job: Job, site: Site) -> str:
    layout, is_1f1b = job.layout, job.layout.schedule == "1f1b"
    if layout.stages > job.model.layers:
        return f"{layout.stages} stages, but the model has {job.model.layers} layers"
    if layout.pp == 1:
        is_default = layout.stages_per_rank == 1 and is_1f1b
        return "" if is_default else "pp 1 is not a pipeline: it needs stages_per_rank 1 and schedule 1f1b"
    if layout.schedule in V_SCHEDULES and layout.stages_per_rank != 2:
        return f"schedule {layout.schedule} needs stages_per_rank 2"
    is_matched = is_1f1b == (layout.stages_per_rank == 1)
    return "" if is_matched else f"schedule {layout.schedule} needs stages_per_rank {'1' if is_1f1b else 'above 1'}"


def _check_layers_per_stage(job: Job, site: Site) -> str:
    sizes, layout = job.layout.layers_per_stage, job.layout
    if sizes is None:
        return ""
    count = f"pp {layout.pp} x stages_per_rank {layout.stages_per_rank} = {layout.stages} stages"
    total = f"layers_per_stage adds up to {sum(sizes)}; it needs {job.model.layers} layers, 1 or more in a stage"
    return _first(
        (len(sizes) != layout.stages, f"layers_per_stage has {len(sizes)} numbers, but {count}"),
        (sum(sizes) != job.model.layers or min(sizes) < 1, total),
    )


def _check_microbatches(job: Job, site: Site) -> str:
    layout, count = job.layout, job.layout.microbatches
    if layout.pp == 1 or (count >= layout.pp and (layout.schedule != "dualpipev" or count >= layout.stages)):
        return ""
    if count < layout.pp:
        return f"{count} micro-batches do not fill a pipeline of {layout.pp} ranks"
    return f"schedule dualpipev needs {layout.stages} micro-batches, one for each stage"


def _check_multiple(job: Job, multiple: int) -> str:
    schedule, count = job.layout.schedule, job.layout.microbatches
    if job.layout.pp == 1 or count % multiple == 0:
        return ""
    return f"schedule {schedule} needs a multiple of {multiple} micro-batches, {count} is not"


def _check_rounds(job: Job, site: Site) -> str:
    """Check what PyTorch's looped schedules need."""
    layout = job.layout
    is_looped = layout.schedule in ("interleaved", "zero_bubble")
    return _check_multiple(job, max(1, layout.microbatches // layout.pp)) if is_looped else ""


def _check_interleaved(job: Job, site: Site) -> str:
    """Check what Megatron-LM's interleaved schedule needs (schedules.py)."""
    return _check_multiple(job, job.layout.pp) if job.layout.schedule == "interleaved" else ""


def _check_experts(job: Job, site: Site) -> str:
    ep, experts, ranks = job.layout.ep, job.model.experts, job.layout.gpus // job.layout.pp
    if ep == 1:
        return ""
    return _first(
        (not experts, f"ep {ep}: the model has no experts"),
        (experts % ep != 0, f"ep {ep} does not divide {experts} experts"),
        (ranks % ep != 0, f"ep {ep} does not divide the {ranks} GPUs of a pipeline rank"),
    )


def _check_sharding(job: Job, site: Site) -> str:
    layout = job.layout
    if layout.sharding == "none" and layout.dp_shard > 1:
        return f"dp_shard {layout.dp_shard} shards states, but sharding is none"
    return ""


def _check_resharding(job: Job, site: Site) -> str:
    if job.layout.reshard_after_forward or job.layout.is_sharded:
        return ""
    return "dp_shard 1 and cp 1 shard no weights: reshard_after_forward has to be true"


def _check_own_resharding(job: Job, site: Site) -> str:
    if job.state == "fp32" or job.layout.reshard_after_forward or job.layout.is_sharded:
        return ""
    return "dp_shard 1 and cp 1 shard no weights in state bf16: reshard_after_forward has to be true"


def _check_dtype(job: Job, site: Site) -> str:
    dtype = matrix_dtype(job.precision)
    if not site.peak_tflops or dtype in site.peak_tflops:
        return ""
    return f"{job.precision}: {site.device} has no {dtype} units or no known peak for them"


def matrix_dtype(precision: str) -> str:
    """Return the data type of a recipe's matrix products, as a device's peaks name it: `fp8` of `fp8_tensorwise`."""
    name = precision.split("_")[0]
    return {"mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}.get(name, name)


def _check_own_precision(job: Job, site: Site) -> str:
    if job.precision in OWN_PRECISIONS:
        return ""
    return f"precision={job.precision}: workload=parallel does not train in it. Available: {', '.join(OWN_PRECISIONS)}"


def _check_checkpointing(job: Job, site: Site) -> str:
    freq, layers = job.layout.checkpointing_freq, job.model.layers
    if freq == 1:
        return ""
    return _first(
        (job.layout.checkpointing == "none", "checkpointing none recomputes no block: checkpointing_freq has to be 1"),
        (freq > layers, f"checkpointing_freq {freq} recomputes none of {layers} blocks"),
    )


def _check_split_backward(job: Job, site: Site) -> str:
    """Check what PyTorch needs to split a backward pass, first for inputs and then for weights."""
    layout, schedule = job.layout, job.layout.schedule
    if schedule not in SPLIT_SCHEDULES:
        return ""
    is_resharded = layout.uses_fsdp(job.state) and layout.reshard_after_forward
    needed = "false" if layout.is_sharded or job.state == "fp32" else "false, with dp_shard above 1"
    return _first(
        (
            site.lacks_torch(SPLIT_LOSS_TORCH),
            f"{schedule} does not split this loss's backward pass before torch 2.13, this is {site.torch_name}",
        ),
        (
            job.compiled,
            f"{schedule} splits the backward pass, which a compiled block does not support: compile has to be false",
        ),
        (
            layout.checkpointing == "selective",
            f"{schedule} goes through a block twice, which selective checkpointing does not support",
        ),
        (
            is_resharded,
            f"{schedule} computes wrong gradients where weights are gathered again: reshard_after_forward has to be "
            f"{needed}",
        ),
    )


def _check_tied_head(job: Job, site: Site) -> str:
    if job.model.tied and job.layout.pp > 1:
        return "the model's head is its embedding: both have to be in one stage, so pp has to be 1"
    return ""


def _check_low_precision(job: Job, site: Site) -> str:
    """Check what torchao's layers support: tokens and sizes on a rank, and tensor parallelism in fp8 alone."""
    layout, model, dtype = job.layout, job.model, job.precision
    if dtype in PLAIN_PRECISIONS:
        return ""
    if layout.schedule in SPLIT_SCHEDULES:
        return f"{layout.schedule} splits the backward pass, which a layer in {dtype} does not support"
    if layout.tp > 1 and not dtype.startswith("fp8"):
        return f"dtype {dtype} has no tensor parallel layers here: tp has to be 1"
    multiple = PRECISIONS[dtype].multiple
    tokens = layout.micro_batch * job.sequence_length // layout.cp
    if tokens % multiple:
        return f"{dtype} needs tokens in multiples of {multiple}, a micro-batch leaves {tokens} on a rank"
    sizes_on_rank = {
        "hidden size": model.hidden_size,
        "heads": model.heads * model.head_size // layout.tp,
        "keys and values": 2 * model.kv_heads * model.head_size // layout.tp,
        "intermediate size": model.intermediate_size // layout.tp,
    }
    reasons = (
        f"{dtype} needs sizes in multiples of {multiple}, tp {layout.tp} leaves {size} of {name}"
        for name, size in sizes_on_rank.items()
        if size % multiple
    )
    return next(reasons, "")


def _check_async_tp(job: Job, site: Site) -> str:
    """Check what PyTorch's asynchronous tensor parallelism (`async_tp`, in a plan `tp_overlap=async`) needs."""
    tp = job.layout.tp
    if job.layout.tp_overlap == "none":
        return ""
    return _first(
        (tp == 1, "tp 1 has no collectives: async_tp has to be false"),
        (not job.compiled, "async_tp is a pass of the compiler: compile has to be true"),
        (not site.on_gpu, "async_tp copies between the memories of GPUs: on a CPU it has to be false"),
        (
            tp > site.domain,
            f"async_tp maps the memory of GPUs of one node: tp {tp} does not fit in {site.domain}",
        ),
    )


def _check_cuda_graph(job: Job, site: Site) -> str:
    """Check that a recording holds: it has no collectives, and nothing of FSDP, which allocates weights anew."""
    if not job.layout.cuda_graph:
        return ""
    return _first(
        (not site.on_gpu, "cuda_graph records the launches of a GPU: on a CPU it has to be false"),
        (job.layout.gpus > 1, f"cuda_graph has no collectives: it needs one rank, these are {job.layout.gpus}"),
        (
            job.layout.uses_fsdp(job.state),
            "cuda_graph does not record FSDP, which casts fp32 weights: state has to be bf16",
        ),
    )


def _check_documents(job: Job, site: Site) -> str:
    """Check what attention within documents supports."""
    if not job.document_tokens:
        return ""
    return _first(
        (job.layout.cp > 1, "document_tokens needs whole sequences: cp has to be 1"),
        (job.manual_backward, "block manual attends to whole sequences: document_tokens needs block pytorch"),
        (
            site.on_gpu and site.lacks_torch(VARLEN_TORCH),
            f"document_tokens needs the varlen_attn of torch 2.13, this is {site.torch_name}",
        ),
        (
            site.on_gpu and job.precision == "fp32",
            "document_tokens needs half precision on a GPU: dtype has to be bf16 or lower",
        ),
    )


def _check_state(job: Job, site: Site) -> str:
    if job.state == "bf16" and job.precision == "fp32":
        return "state bf16 keeps weights in bf16, and dtype fp32 multiplies fp32 ones: state has to be fp32"
    return ""


def _check_block(job: Job, site: Site) -> str:
    """Check that a rank has whole weights and whole sequences, which the manual backward pass is written for."""
    tp, cp, schedule, dtype = job.layout.tp, job.layout.cp, job.layout.schedule, job.precision
    if not job.manual_backward:
        return ""
    return _first(
        (tp * cp > 1, f"block manual has whole weights and sequences: tp {tp} and cp {cp} have to be 1"),
        (
            schedule in SPLIT_SCHEDULES,
            f"{schedule} splits the backward pass, and that of block manual is one: block has to be pytorch",
        ),
        (
            dtype not in PLAIN_PRECISIONS,
            f"block manual has no layers of torchao: dtype {dtype} needs block pytorch",
        ),
    )


ONLY_OWN = frozenset({OWN})
OTHERS = frozenset(TRAINERS) - ONLY_OWN
RULES = (
    Rule("the degrees multiply to the number of ranks", _check_ranks),
    Rule("tp divides heads, sizes and sequence", _check_tp),
    Rule("tp divides heads, sizes and sequence", _check_kv_heads),
    Rule("tp divides heads, sizes and sequence", _check_vocabulary, ONLY_OWN),
    Rule("tp stays within a node", _check_domain),
    Rule("cp divides the sequence", _check_cp),
    Rule("cp divides the sequence", _check_cp_method, ONLY_OWN),
    Rule("micro-batches divide the global batch", _check_batch),
    Rule("stages and schedule agree", _check_stages),
    Rule("layers_per_stage divides the layers", _check_layers_per_stage),
    Rule("micro-batches fill the pipeline", _check_microbatches),
    Rule("micro-batches fill the pipeline", _check_interleaved, OTHERS),
    Rule("micro-batches fill the pipeline", _check_rounds),
    Rule("ep divides the experts", _check_experts),
    Rule("only sharded states are sharded", _check_sharding),
    Rule("only sharded weights stay gathered", _check_resharding, OTHERS),
    Rule("only sharded weights stay gathered", _check_own_resharding, ONLY_OWN),
    Rule("the device has the data type", _check_dtype),
    Rule("the trainer has the precision", _check_own_precision, ONLY_OWN),
    Rule("checkpointing_freq selects blocks", _check_checkpointing, ONLY_OWN, is_tradable=True),
    Rule("a split backward pass is supported", _check_split_backward, ONLY_OWN, is_tradable=True),
    Rule("a tied head shares a stage with the embedding", _check_tied_head, ONLY_OWN),
    Rule("fp8 is supported", _check_low_precision, ONLY_OWN),
    Rule("asynchronous tensor parallel is supported", _check_async_tp, ONLY_OWN),
    Rule("a CUDA graph is supported", _check_cuda_graph, ONLY_OWN),
    Rule("document masks are supported", _check_documents, ONLY_OWN),
    Rule("state and products agree", _check_state, ONLY_OWN),
    Rule("the manual block is supported", _check_block, ONLY_OWN),
)
COMMON_RULES = tuple(rule for rule in RULES if rule.trainers != ONLY_OWN)  # of a program that is not known
