"""Read and write jobs as Megatron-LM settings (core_v0.16.1), named as in Megatron-LM's logs and in Primus."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from workloads.api.errors import UserInputError
from workloads.api.validation import check_known
from workloads.formats import names
from workloads.layouts.layout import LESS_LAYERS, Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import Model
from workloads.suggestions import suggest
from workloads.tables import read_toml

TABLES: dict[str, Any] = read_toml(__file__, "megatron.toml")
FP8_RECIPES: dict[str, tuple[str, str]] = {name: tuple(theirs) for name, theirs in TABLES["fp8_recipes"].items()}
FP4_RECIPES = {"nvfp4": "nvfp4"}  # used with `fp4: e2m1`
FSDP_STRATEGIES = {"zero2": "optim_grads", "megatron_fsdp": "optim_grads_params"}
# megatron/core/transformer/transformer_config.py, `recompute_modules`. Megatron recomputes activations only in experts.
RECOMPUTED_MODULES = {"core_attention": ["core_attn"], "norm_act": ["layernorm", "moe_act"]}
ALGORITHMS = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved", "zero-bubble": "zero_bubble", "zbv-formatted": "zbv"}
ALGORITHMS |= {"v-half": "v_half", "v-min": "v_min"}  # in Primus's pipeline
V_SETUPS = {"zbv": "zb", "v_half": "half", "v_min": "min"}  # Primus's `zero_bubble_v_schedule_mem_setup`
MOMENT_BYTES = {"fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "uint8": 1}  # others have 4
POSITIONS = {"rope": "rope", "learned_absolute": "learned", "none": "none"}
EXPERT_SIZES = ("experts", "experts_per_token", "expert_intermediate_size", "shared_expert_intermediate_size")
ABSENT: names.Settings = TABLES["absent"]
DEFAULT_KV_RANK = 32  # megatron/training/arguments.py, `--kv-lora-rank`
# Megatron pads a vocabulary to a multiple of at most this number times `tp`, for fast GEMM sizes.
LARGEST_VOCABULARY_MULTIPLE = 128
# One layer fewer on the first and the last stage, and numbers of layers on the first and the last rank.
COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
RANK_LAYERS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _vocabulary_multiple(job: Job) -> int:
    """Return the power of two, up to 128, that pads the vocabulary the least; the largest if several do."""
    multiples = [2**power for power in range(LARGEST_VOCABULARY_MULTIPLE.bit_length())]
    return min(reversed(multiples), key=lambda multiple: -job.model.vocabulary % (multiple * job.layout.tp))


def _moe_layer_freq(job: Job) -> str | None:
    kinds = groupby(job.model.has_experts(layer) for layer in range(job.model.layers))
    pattern = "+".join(f"[{int(has_experts)}]*{len(list(layers))}" for has_experts, layers in kinds)
    return f"({pattern})" if job.model.dense_layers else None


def _recompute(job: Job) -> dict[str, Any]:
    layout, stages = job.layout, job.layout.pp * job.layout.stages_per_rank
    if layout.checkpointing in RECOMPUTED_MODULES:
        return {"granularity": "selective", "modules": RECOMPUTED_MODULES[layout.checkpointing]}
    if layout.checkpointing != "full":
        return {}
    if layout.checkpointed_layers is None:
        return {"granularity": "full", "method": "uniform", "num_layers": 1}
    # With `block`, the number is per stage (megatron/core/transformer/transformer_block.py).
    return {"granularity": "full", "method": "block", "num_layers": layout.checkpointed_layers // stages}


def _divide_layers(key: str, job: Job) -> int | None:
    """Return a setting of stages of unequal sizes, or None. The two kinds of these settings exclude each other."""
    less = job.layout.less_layers
    is_counted, per_rank = {*less} <= {0, 1}, (job.model.layers + sum(less)) // job.layout.pp
    values = zip(COUNTED_ENDS if is_counted else RANK_LAYERS, less, strict=True)
    return {name: is_counted or per_rank - count for name, count in values if count}.get(key)


# Conditions for writing some settings, and functions for the settings that no field gives; see the table.
CONDITIONS: dict[str, Callable[[Job], bool]] = {
    "queries share keys": lambda job: job.model.kv_heads != job.model.heads,
    "experts": lambda job: job.model.experts > 0,
    "cp": lambda job: job.layout.cp > 1,
    "gradients are reduced": lambda job: job.layout.sharding != "fsdp2" and job.layout.dp * job.layout.cp > 1,
    "products of bf16": lambda job: job.precision not in ("fp16", "fp32"),
}
WRITTEN: dict[str, Callable[[Job], Any]] = {
    "ffn_hidden_size": lambda job: job.model.intermediate_size or job.model.expert_intermediate_size,
    "max_position_embeddings": lambda job: max(job.model.max_positions, job.sequence_length),
    "vocab_size": lambda job: job.model.vocabulary - 1,
    "make_vocab_size_divisible_by": _vocabulary_multiple,
    "normalization": lambda job: "RMSNorm" if job.model.positions == "rope" else "LayerNorm",
    "rotary_base": lambda job: round(job.model.rope_theta),
    "use_rope_scaling": lambda job: job.model.rope_factor is not None or None,
    "rope_scaling_factor": lambda job: job.model.rope_factor,
    "moe_layer_freq": _moe_layer_freq,
    **{key: partial(_divide_layers, key) for key in (*COUNTED_ENDS, *RANK_LAYERS)},
    "sequence_parallel": lambda job: job.layout.tp > 1 and job.layout.sequence_parallel,
    "num_distributed_optimizer_instances": lambda job: job.layout.dp_replicate,
    "data_parallel_sharding_strategy": lambda job: FSDP_STRATEGIES[job.layout.sharding],
    "recompute_granularity": lambda job: _recompute(job).get("granularity"),
    "recompute_modules": lambda job: _recompute(job).get("modules"),
    "recompute_method": lambda job: _recompute(job).get("method"),
    "recompute_num_layers": lambda job: _recompute(job).get("num_layers"),
    "fp8": lambda job: FP8_RECIPES.get(job.precision, (None,))[0],
    "fp8_recipe": lambda job: FP8_RECIPES.get(job.precision, (None,))[-1],
    "fp4": lambda job: "e2m1" if job.precision in FP4_RECIPES else None,
    "fp4_recipe": lambda job: FP4_RECIPES.get(job.precision),
}
NAMES = names.read_table(TABLES["names"], WRITTEN, CONDITIONS)


def _list_obstacles(job: Job) -> Iterator[str]:
    layout, model = job.layout, job.model
    stages, count = layout.stages, layout.checkpointed_layers
    if model.mlp_bias and not model.qkv_bias:
        yield "mlp_bias=true cannot be written without qkv_bias=true: biases are of the projections alone, or of all"
    if model.qk_norm == "all":
        yield "the model's qk_norm=all cannot be written: norms of queries and keys are of each head"
    if model.experts and model.dense_layers and not model.intermediate_size:
        yield "dense_layers needs intermediate_size"
    if layout.sharding == "none" and layout.offload_optimizer:
        yield "offload_optimizer=true needs the distributed optimizer: set dp_shard above 1 and sharding=zero1"
    if count is not None and (layout.checkpointing != "full" or not count or count % stages):
        whole = f"full checkpointing of as many in each of {stages} stages"
        yield f"checkpointed_layers={count} cannot be written: {whole} can"


def support(trainer: str, *obstacles: names.Obstacles, name: str = "", **values: Sequence[object]) -> names.Support:
    supported = {**TRAINERS[trainer].runs, **TABLES["supported"], **values}
    return names.Support(name or trainer, supported, (_list_obstacles, *obstacles))


FIELDS = names.fields_of_keys(NAMES, TABLES["fields"])
KNOWN = {*(name.key for name in NAMES), *FIELDS}


def read_settings(
    given: names.Settings,
    trainer: str,
    gpus: int | None,
    model: Model | None = None,
    defaults: names.Settings | None = None,
) -> names.FileReading:
    """Return the job that settings describe, using a program's `defaults`. `model` overrides the settings' sizes.

    Raises UserInputError for a value that no job can have, or if `gpus` is needed but missing.
    """
    settings = names.FileSettings(given, defaults)
    sizes = _read_sizes(settings, model, trainer) | _read_kinds(settings)
    model = model or read_model(settings)
    layers = model.layers if model else settings.get("num_layers")
    degrees = names.read_names(settings, NAMES, ("tp", "cp", "pp"))
    dp = settings.get("data_parallel_size") or names.data_parallel_size(settings.get("world_size") or gpus, degrees)
    sharding = _read_sharding(settings)
    instances = "data_parallel_replicate_degree" if sharding == "fsdp2" else "num_distributed_optimizer_instances"
    replicas = settings.get(instances) or 1
    per_stage, stages = settings.get("num_layers_per_virtual_pipeline_stage"), 1
    virtual = ("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size")
    if degrees["pp"] > 1 and (count := next((settings[name] for name in virtual if settings.get(name)), None)):
        stages = int(count)
    elif degrees["pp"] > 1 and per_stage and layers:
        stages = math.ceil(layers / degrees["pp"] / per_stage)
    if text := settings.get("pipeline_model_parallel_layout"):
        stages = _count_stages(text, degrees["pp"])
    schedule = "interleaved" if stages > 1 else "1f1b"
    if settings.get("patch_zero_bubble") and settings.get("enable_zero_bubble", True):
        setup = settings.get("zero_bubble_v_schedule_mem_setup") or V_SETUPS["v_half"]  # Primus's default
        folded = next((name for name, theirs in V_SETUPS.items() if theirs == setup), "zbv")
        schedule = folded if settings.get("zero_bubble_v_schedule") else "zero_bubble"
    if settings.get("patch_primus_pipeline"):
        name = settings.get("pp_algorithm", "1f1b-interleaved")
        check_known(str(name), ALGORITHMS, f"pp_algorithm={name}: no layout has this schedule")
        schedule = ALGORITHMS[name] if name != "1f1b-interleaved" or stages > 1 else "1f1b"
    fields = ("ep", "micro_batch", "global_batch", "sequence_parallel", "tp_overlap", "cp_method", "offload_optimizer")
    others = names.read_names(settings, NAMES, ("expert_overlap",))
    # The backend of `flex` is read so that it counts as taken: DeepEP and HybridEP are estimated alike.
    kind, _ = settings.get("moe_token_dispatcher_type"), settings.get("moe_flex_dispatcher_backend")
    is_deepep = settings.get("moe_enable_deepep") or kind == "flex"
    # The default of Megatron-LM's arguments.py.
    is_default = kind is None and trainer == "megatron" and settings.get("num_experts")
    others["dispatcher"] = "deepep" if is_deepep else "allgather" if kind == "allgather" or is_default else "alltoall"
    if settings.get("grad_reduce_in_bf16") or settings.get("main_grads_dtype") == "bf16":
        others["gradient_bytes"] = 2
    kinds = [str(settings.get(name)) for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    if settings.get("use_precision_aware_optimizer") and {*kinds} & {*MOMENT_BYTES}:
        others["moment_bytes"] = sum(MOMENT_BYTES.get(kind, 4) for kind in kinds)
    if settings.get("cross_entropy_loss_fusion") and settings.get("cross_entropy_fusion_impl") == "te":
        others["fused_loss"] = True
    read = degrees | names.read_names(settings, NAMES, (*fields, "reshard_after_forward"))
    read["global_batch"] = read["global_batch"] or read["micro_batch"] * dp
    read["reshard_after_forward"] |= sharding != "fsdp2"
    read |= {"dp_replicate": replicas, "dp_shard": dp // replicas, "sharding": sharding}
    read |= {"stages_per_rank": stages, "schedule": schedule, **_read_less_layers(settings, degrees["pp"], layers)}
    layout = Layout(**read, **_read_checkpointing(settings, degrees["pp"] * stages, layers))
    ramp = settings.get("rampup_batch_size")
    return names.FileReading(
        trainer=trainer,
        layout=names.canonical_layout(layout, layers),
        sequence_length=settings.get("seq_length") or 0,
        model=model,
        precision=_read_precision(settings),
        notes=(f"rampup_batch_size={ramp}: the batch grows to the global batch",) if ramp else (),
        others=others,
        sizes=sizes,
        taken=settings.list_taken(FIELDS),
        left=settings.list_left(),
    )


def _count_stages(layout: Any, pp: int) -> int:
    """Return how many stages a rank has, from a list of each stage's layers or from text such as Et*4|(t*4|)*14tmL."""
    repeated = re.sub(r"\(([^()]*)\)\*(\d+)", lambda part: part[1] * int(part[2]), str(layout))
    count = len(layout) if isinstance(layout, list) else repeated.count("|") + 1
    if count % pp:
        raise UserInputError(f"pipeline_model_parallel_layout: {count} stages are not a multiple of pp {pp}")
    return count // pp


def _read_sizes(settings: names.FileSettings, model: Model | None, trainer: str) -> dict[str, Any]:
    fields = ("layers", "hidden_size", "heads", "kv_heads", "head_size", "intermediate_size")
    experts = EXPERT_SIZES if settings.find("num_experts") else ()
    sizes = {name.field: settings.find(name.key) for name in NAMES if name.field in (*fields, *experts)}
    if experts or not settings.find("ffn_hidden_size"):
        del sizes["intermediate_size"]
    if not settings.find("group_query_attention"):
        del sizes["kv_heads"]
    sizes["prediction_layers"] = settings.find("mtp_num_layers")
    sizes["vocabulary"] = settings.find("vocab_size") or settings.find("padded_vocab_size")
    if is_latent := settings.find("multi_latent_attention"):  # its head sizes are not `kv_channels`
        of_model = model.kv_rank if model and trainer != "megatron" else 0  # recipes leave it to the model's own file
        rank = settings.find("kv_lora_rank") or of_model or DEFAULT_KV_RANK
        sizes |= {"kv_rank": rank, "head_size": 0, "kv_heads": 0}
    for name, size in sizes.items():
        if isinstance(size, str):
            raise UserInputError(f"{name}={size}: not a whole number")
    whole = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}
    whole |= {"kv_rank": 0} if is_latent is False else {}
    # Layers with linear attention follow from a pattern such as M-M*-, or are all layers except every Nth.
    pattern = settings.find("hybrid_override_pattern") or settings.find("hybrid_layer_pattern")
    frequency, layers = settings.find("linear_attention_freq"), settings.find("num_layers")
    if pattern:
        letters = str(pattern).split("/")[0].replace("|", "")
        return whole | {"linear_layers": tuple(layer for layer, letter in enumerate(letters) if letter == "M")}
    if isinstance(frequency, int) and frequency and layers:
        return whole | {"linear_layers": tuple(layer for layer in range(layers) if (layer + 1) % frequency)}
    return whole


def _read_kinds(settings: names.FileSettings) -> dict[str, Any]:
    """Return other properties of the model. A property is unknown if its setting is neither given nor has a default."""
    kinds: dict[str, Any] = {}
    is_gated, untied = settings.find("swiglu"), settings.find("untie_embeddings_and_output_weights")
    if is_gated is not None and not settings.find("quick_geglu"):
        kinds["activation"] = "swiglu" if is_gated else "squared_relu" if settings.find("squared_relu") else "gelu"
    if untied is not None:
        kinds["tied"] = not untied
    if (position := settings.find("position_embedding_type")) in POSITIONS and not settings.find(
        "use_rotary_position_embeddings"
    ):
        kinds["positions"] = POSITIONS[position]
    if settings.find("num_experts") == 0:
        kinds["experts"] = 0
    shares_keys, heads = settings.find("group_query_attention"), settings.find("num_attention_heads")
    if shares_keys is False and heads and not settings.find("multi_latent_attention"):
        kinds["kv_heads"] = heads
    return kinds


def _read_sharding(settings: names.Settings) -> str:
    if settings.get("use_torch_fsdp2"):
        return "fsdp2"
    if settings.get("use_megatron_fsdp") or settings.get("use_custom_fsdp"):
        strategy = settings.get("data_parallel_sharding_strategy", "no_shard")
        ours = {theirs: name for name, theirs in FSDP_STRATEGIES.items()} | {"optim": "zero1", "no_shard": "none"}
        check_known(str(strategy), ours, f"data_parallel_sharding_strategy={strategy}: not known here")
        return ours[strategy]
    return "zero1" if settings.get("use_distributed_optimizer") else "none"


def _read_less_layers(settings: names.Settings, pp: int, layers: int | None) -> dict[str, int]:
    given = [settings.get(key) for key in RANK_LAYERS]
    less = [int(bool(settings.get(key))) for key in COUNTED_ENDS]
    if layers and any(given) and pp > 1:
        ends = [count for count in given if count]
        per_rank = (layers - sum(ends)) // (pp - len(ends)) if pp > len(ends) else max(ends)
        less = [per_rank - count if count else 0 for count in given]
    return dict(zip(LESS_LAYERS, less, strict=True))


def _read_checkpointing(settings: names.Settings, stages: int, layers: int | None) -> dict[str, Any]:
    granularity = "selective" if settings.get("recompute_activations") else settings.get("recompute_granularity")
    if granularity is None:
        return {"checkpointing": "none"}
    if granularity == "selective":
        modules = settings.get("recompute_modules") or ["core_attn"]
        modules = [modules] if isinstance(modules, str) else modules
        for ours, theirs in RECOMPUTED_MODULES.items():
            if set(modules) <= set(theirs):
                return {"checkpointing": ours}
        raise UserInputError(f"recompute_modules={','.join(modules)}: no layout has these. Known: core_attn, layernorm")
    for key, known in (("recompute_granularity", ("full", "selective")), ("recompute_method", ("uniform", "block"))):
        if (value := settings.get(key)) not in (None, *known):
            raise UserInputError(f"{key}={value}: not known here. {suggest(str(value), known)}")
    if settings.get("recompute_method") == "block":
        count = settings.get("recompute_num_layers")
        total = (1 if count is None else count) * stages
        if not total:
            return {"checkpointing": "none"}
        return {"checkpointing": "full", "checkpointed_layers": min(total, layers) if layers else total}
    return {"checkpointing": "full"}


def _read_precision(settings: names.Settings) -> str:
    plain = {name: settings.get(name) for name in ("bf16", "fp16")}
    if settings.get("fp4"):
        recipe = settings.get("fp4_recipe") or "nvfp4"
        check_known(str(recipe), FP4_RECIPES, f"fp4_recipe={recipe}: unknown precision")
        return FP4_RECIPES[recipe]
    if number_format := settings.get("fp8"):
        recipe = settings.get("fp8_recipe") or "delayed"
        for name, (_, theirs) in FP8_RECIPES.items():
            if theirs == recipe:
                return name
        raise UserInputError(f"fp8_recipe={recipe} ({number_format}): unknown precision")
    return next((name for name, is_set in plain.items() if is_set), "fp32")


def read_model(settings: names.Settings) -> Model | None:
    """Return the model, or None if the settings do not give all of its sizes."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(size := settings.get(name), int) or size < 1 for name in sizes):
        return None
    fields = (
        *("layers", "hidden_size", "heads", "kv_heads", "head_size", "tied", "mlp_bias", "intermediate_size"),
        *("rope_theta", "norm_eps", "qk_norm"),
    )
    read = names.read_names(settings, NAMES, (*fields, *EXPERT_SIZES))
    is_gated, experts, hidden_size = bool(settings.get("swiglu")), read["experts"], read["hidden_size"]
    default = int(4 * hidden_size * 2 / 3) // 64 * 64 if is_gated else 4 * hidden_size
    feed_forward = read["intermediate_size"] or default
    positions = POSITIONS.get(settings.get("position_embedding_type", ""), "none")
    dense_layers = _read_dense_layers(settings, read["layers"]) if experts else ()
    read |= {
        "kv_heads": (settings.get("group_query_attention") and read["kv_heads"]) or read["heads"],
        "head_size": read["head_size"] or hidden_size // read["heads"],
        "intermediate_size": 0 if experts and not dense_layers else feed_forward,
        "vocabulary": settings["vocab_size"] + (settings.get("tokenizer_type", "NullTokenizer") == "NullTokenizer"),
        "activation": "swiglu" if is_gated else "squared_relu" if settings.get("squared_relu") else "gelu",
        "qkv_bias": read["mlp_bias"] or bool(settings.get("add_qkv_bias")),
        "positions": positions,
        "max_positions": settings.get("max_position_embeddings", 0) if positions == "learned" else 0,
        "experts_per_token": read["experts_per_token"] if experts else 0,
        "expert_intermediate_size": (read["expert_intermediate_size"] or feed_forward) if experts else 0,
        "dense_layers": dense_layers,
        "rope_factor": float(settings.get("rope_scaling_factor") or 8) if settings.get("use_rope_scaling") else None,
    }
    return Model(**read)


def _read_dense_layers(settings: names.Settings, layers: int) -> tuple[int, ...]:
    """Return the layers without experts, given ([0]*3+[1]*58), for example, or N if every Nth layer has experts."""
    text = str(settings.get("moe_layer_freq") or 1)
    kinds = [kind for kind, count in re.findall(r"([01])\]?(?:\*(\d+))?", text) for _ in range(int(count or 1))]
    if text.isdecimal():
        kinds = ["01"[layer % int(text) == 0] for layer in range(layers)]
    if len(kinds) != layers or ")*" in text:
        raise UserInputError(f"moe_layer_freq={text}: must be N or a sum such as ([0]*3+[1]*58) of {layers} layers")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "0")
