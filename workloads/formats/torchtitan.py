"""Read and write torchtitan's configuration, as of version 0.2.2: its TOML file, and the JSON in its log."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from workloads.api.errors import UserInputError
from workloads.api.validation import check_known
from workloads.formats import names
from workloads.layouts.layout import LESS_LAYERS, Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.model import MODELS, SIZES, Model
from workloads.tables import read_toml

EXCHANGE = "parallelism.expert_parallel_comm_backend"
FILE = "torchtitan.toml"
# Tokenizer folders, as in torchtitan's own configurations. `debugmodel` uses the tokenizer of torchtitan's tests.
ASSETS = {"debugmodel": "./tests/assets/tokenizer"} | {
    size: f"./assets/hf/Llama-3.1-{size}" for size in ("8B", "70B", "405B")
}
MASKED_SUFFIXES = ("_flex", "_varlen", "_flex_attn", "_varlen_attn")  # flavors with the same sizes and document masks
_TABLES: dict[str, Any] = read_toml(__file__, "torchtitan.toml")
FLAVORS: dict[tuple[str, str], Model] = {
    (name, flavor): MODELS[sizes] if isinstance(sizes, str) else Model(**sizes)
    for name, flavors in _TABLES["flavors"].items()
    for flavor, sizes in flavors.items()
}
RECIPES, CONVERTERS = _TABLES["recipes"], _TABLES["converters"]
FORCED = "per_op_sac_force_recompute_mm_shapes_by_fqns"  # GEMMs that per-op checkpointing recomputes too
FP8, MXFP8 = "quantize.linear.float8", "quantize.linear.mx"
# Names in versions before 0.2, with the current names.
RENAMED: dict[str, str] = _TABLES["renamed"] | {
    f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _TABLES["moved"]
}


def find_flavor(model: Model) -> tuple[str, str]:
    """Return the name and flavor with the given sizes. If none fits, raise UserInputError that names the nearest."""
    differences = {
        flavor: [
            f"{name} ({theirs}, not {ours})"
            for name in SIZES
            if (theirs := getattr(sizes, name)) != (ours := getattr(model, name))
        ]
        for flavor, sizes in FLAVORS.items()
    }
    nearest = min(differences, key=lambda flavor: len(differences[flavor]))
    if not differences[nearest]:
        return nearest
    raise UserInputError(
        f"torchtitan 0.2.2: model has no flavor with these sizes. Nearest: {' '.join(nearest)}, which differs in "
        f"{', '.join(differences[nearest])}. Add the flavor to torchtitan's models/{nearest[0]}/__init__.py, or choose "
        "another trainer"
    )


def _find_assets(job: Job) -> str:
    name, flavor = find_flavor(job.model)
    return ASSETS[flavor] if name == "llama3" else f"./assets/hf/{name.capitalize()}-{flavor}"


def find_interval(job: Job) -> int | None:
    """Return the n for which checkpointing every nth layer checkpoints as many layers as the layout does, or None."""
    layers = job.model.layers
    return next((n for n in range(1, layers + 1) if layers // n == job.layout.checkpointed_layers), None)


def _option(job: Job) -> str | None:
    if job.layout.checkpointing == "per_op":
        return "op"
    return None if job.layout.checkpointed_layers is None else str(find_interval(job))


# Functions that compute the settings that no field gives; see the table.
WRITTEN: dict[str, Callable[[Job], Any]] = {
    "model.name": lambda job: find_flavor(job.model)[0],
    "model.flavor": lambda job: find_flavor(job.model)[1],
    "model.hf_assets_path": _find_assets,
    "model.converters": lambda job: (
        [MXFP8] if job.precision == "mxfp8" else [FP8] if job.precision.startswith("fp8") else []
    ),
    "training.local_batch_size": lambda job: (
        job.layout.micro_batch * max(1, job.layout.microbatches * (job.layout.pp > 1))
    ),
    "training.dtype": lambda job: "bfloat16" if job.state == "bf16" else "float32",
    "training.mixed_precision_param": lambda job: "float32" if job.precision == "fp32" else "bfloat16",
    "parallelism.fsdp_reshard_after_forward": lambda job: "always" if job.layout.reshard_after_forward else "never",
    "parallelism.pipeline_parallel_microbatch_size": lambda job: job.layout.micro_batch,
    # torchtitan adds both `less_layers` to the number of layers, divides by this, and rounds up (`pipeline_llm`).
    "parallelism.pipeline_parallel_layers_per_stage": lambda job: math.ceil(
        (job.model.layers + sum(job.layout.less_layers)) / job.layout.stages
    ),
    "activation_checkpoint.mode": lambda job: "selective" if _option(job) else job.layout.checkpointing,
    "activation_checkpoint.selective_ac_option": _option,
    f"{FP8}.recipe_name": lambda job: RECIPES.get(job.precision),
}
NAMES = names.read_table(_TABLES["names"], WRITTEN, {"pp": lambda job: job.layout.pp > 1})


def _list_obstacles(job: Job) -> Iterator[str]:
    layout, layers = job.layout, job.layout.checkpointed_layers
    if job.precision == "fp32" and job.state != "fp32":
        yield f"precision=fp32 needs state=fp32, not {job.state}"
    if layers is not None and (layout.checkpointing != "full" or layout.pp > 1 or find_interval(job) is None):
        yield f"checkpointed_layers={layers} cannot be written: every n-th layer without pp can"


SUPPORT = names.Support("torchtitan", {**TRAINERS["torchtitan"].runs, **_TABLES["supported"]}, (_list_obstacles,))


def render(job: Job, gpus: int) -> names.RenderedFile:
    """Return the configuration for a canonical job. Raises UserInputError if torchtitan 0.2.2 cannot express it."""
    sections: dict[str, list[str]] = {}
    for key, value in names.write_names(job, NAMES).items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, [f"[{section}]"]).append(f"{name} = {json.dumps(value)}")
    command = " ".join([*names.torchrun(gpus), "-m", "torchtitan.train", f"--job.config_file={FILE}"])
    text = "\n\n".join("\n".join(lines) for lines in sections.values())
    notes = (
        f"model.hf_assets_path ({_find_assets(job)}) is the folder of the tokenizer",
        "the file is for torchtitan 0.2: version 0.3.0 reads no TOML (pip install torchtitan==0.2.2)",
        "training.dataset c4 comes from the Hugging Face hub: training.dataset_path names a folder of your own",
    )
    return names.RenderedFile(FILE, f"# torchtitan 0.2.2: {command}\n{text}\n", command, notes)


def recognizes(text: str) -> bool:
    try:
        config = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return isinstance(config.get("training"), dict) and "model" in config


def read(text: str, gpus: int | None = None, model: Model | None = None) -> names.FileReading:
    """Read a torchtitan TOML file. Raises UserInputError for a value that no job can have."""
    return read_config(tomllib.loads(text), gpus, model)


FIELDS = names.fields_of_keys(NAMES, _TABLES["fields"])
KNOWN = {*(name.key for name in NAMES), *FIELDS, *RENAMED, "training.enable_cpu_offload"}
KNOWN |= {f"{section}.{name}" for section, settings in _TABLES["known"].items() for name in settings}


def read_config(
    config: Mapping[str, Any],
    gpus: int | None = None,
    model: Model | None = None,
    defaults: names.Settings | None = None,
) -> names.FileReading:
    """Return the job that a configuration describes, with torchtitan's defaults or a derived program's `defaults`.

    `model` gives the number of layers if the configuration does not name a known model.
    Raises UserInputError for a value that no job can have.
    """
    given = names.flatten(config)
    settings = names.FileSettings(given, defaults, RENAMED)
    name, flavor = str(settings.get("model.name", "llama3")), str(settings.get("model.flavor", ""))
    plain = next((flavor.removesuffix(suffix) for suffix in MASKED_SUFFIXES if flavor.endswith(suffix)), flavor)
    named = FLAVORS.get((name, plain)) or names.find_model(f"{name}_{plain}")
    model = model or named
    degrees = names.read_names(settings, NAMES, ("dp_replicate", "tp", "cp", "pp"))
    fields = ("dp_shard", "ep", "tp_overlap", "cp_method", "micro_batch", "global_batch")
    read = degrees | names.read_names(settings, NAMES, fields)
    if read["dp_shard"] == -1:  # -1 means all remaining GPUs
        read["dp_shard"] = names.data_parallel_size(gpus, degrees)
    if settings.get("training.data_parallel_type") == "ddp":
        read |= {"dp_replicate": read["dp_replicate"] * read["dp_shard"], "dp_shard": 1}
    local_batch, dp, is_pipeline = read["micro_batch"], read["dp_replicate"] * read["dp_shard"], degrees["pp"] > 1
    if read["global_batch"] <= 0:
        read["global_batch"] = local_batch * dp
    policy = settings.get("parallelism.fsdp_reshard_after_forward", "default")
    read["reshard_after_forward"] = policy == "always" or (policy == "default" and not is_pipeline)
    if is_pipeline:
        count = settings.get("parallelism.pipeline_parallel_microbatches")
        if not count and "experimental.pipeline_parallel_degree" in given:  # 2024 versions divide a batch by `pp`
            count = degrees["pp"]
        size = settings.get("parallelism.pipeline_parallel_microbatch_size", 1)
        read["micro_batch"] = local_batch // int(count) if count else int(size)
        read |= names.read_names(settings, NAMES, ("schedule",))
        usual_less = 0 if "experimental.pipeline_parallel_degree" in given else 1
        read |= {name: settings.get(f"parallelism.pipeline_parallel_{name}", usual_less) for name in LESS_LAYERS}
        read["stages_per_rank"] = 1 if read["schedule"] == "1f1b" else 2
        if model and (per_stage := settings.get("parallelism.pipeline_parallel_layers_per_stage")):
            layers = model.layers + sum(read[name] for name in LESS_LAYERS)
            read["stages_per_rank"] = math.ceil(layers / per_stage) // degrees["pp"]
    layout = Layout(**read, **_read_checkpointing(settings, model))
    layout = replace(layout, sharding="fsdp2" if layout.is_sharded else "none")
    precision, dtype = _read_precision(settings), settings.get("training.dtype")
    others = [name for name in settings.get("model.converters") or () if name not in CONVERTERS]
    notes = {
        "training.enable_cpu_offload: weights, gradients and states are on the host, no field of a job": (
            settings.get("training.enable_cpu_offload")
        ),
        "model.flavor: attention stays within documents, whose lengths the file does not say": plain != flavor,
        "training.local_batch_size: the pipeline is filled and drained several times a step": is_pipeline
        and local_batch * dp != layout.global_batch,
        f"model.converters: {', '.join(others)}": others,
        f"model.flavor={flavor}: {name} has no such model here, so model= is not compared with it": flavor
        and named is None,
    }
    return names.FileReading(
        trainer="torchtitan",
        layout=names.canonical_layout(layout, model.layers if model else None),
        model=model,
        precision=precision,
        state="bf16" if dtype == "bfloat16" else "fp32" if layout.is_sharded or precision == "fp32" else "amp",
        notes=tuple(note for note, is_noted in notes.items() if is_noted),
        sizes={size: getattr(named, size) for size in SIZES} if named else {},
        **names.read_names(settings, NAMES, ("sequence_length", "compiled")),
        others={"dispatcher": "alltoall" if settings.get(EXCHANGE, "standard") == "standard" else "deepep"},
        taken=settings.list_taken(FIELDS),
        left=settings.list_left(),
    )


def _read_checkpointing(settings: names.Settings, model: Model | None) -> dict[str, Any]:
    mode = str(settings.get("activation_checkpoint.mode", "selective"))
    option = str(settings.get("activation_checkpoint.selective_ac_option", "2"))
    if mode != "selective":
        if mode not in ("none", "full"):
            raise UserInputError(f"activation_checkpoint.mode={mode}: no layout has it. Known: none, selective, full")
        return {"checkpointing": mode}
    if option == "op":
        if forced := {*(settings.get(f"activation_checkpoint.{FORCED}") or ())} - {"moe.router.gate"}:
            raise UserInputError(f"{FORCED}={','.join(sorted(forced))}: no layout has these. Known: moe.router.gate")
        return {"checkpointing": "per_op"}
    if not option.isdigit() or not int(option):
        raise UserInputError(f"activation_checkpoint.selective_ac_option={option}: has to be op or a number from 1")
    return {"checkpointing": "full", "checkpointed_layers": model.layers // int(option) if model else None}


def _read_precision(settings: names.Settings) -> str:
    converters = settings.get("model.converters") or []
    given = next((CONVERTERS[name] for name in converters if name in CONVERTERS), "")
    # In 2024, torchtitan had switches instead of converters.
    old = [settings.get("float8.enable_float8_linear"), settings.get("training.fp8_linear")]
    if given == "fp8_tensorwise" or any(old):
        recipe = settings.get(f"{FP8}.recipe_name") or "tensorwise"
        recipes = {theirs: ours for ours, theirs in RECIPES.items()} | {"tensorwise": "fp8_tensorwise"}
        check_known(str(recipe), recipes, f"{FP8}.recipe_name={recipe}: not known here")
        return recipes[recipe]
    for key in ("training.mixed_precision_param", "training.dtype"):
        if (dtype := settings.get(key)) not in (None, "bfloat16", "float32"):
            raise UserInputError(f"{key}={dtype}: not known here. Known: bfloat16, float32")
    return given or ("fp32" if settings.get("training.mixed_precision_param") == "float32" else "bf16")
