"""Convert published runs to jobs: what the columns of `planner_rows.csv` mean to the planner."""

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sweeper.preflight.clusters import build_cluster
from workloads.api.errors import UserInputError
from workloads.hardware.cluster import Cluster
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.layout import AttentionKernel, Checkpointing, Job, Layout, Sharding, State
from workloads.layouts.trainers import SYNONYMS, TRAINERS
from workloads.models.flops import model_flops_per_token
from workloads.models.hugging_face import UnsupportedModel, load_model
from workloads.models.model import Model

SHARDINGS: dict[str, Sharding] = {
    "none": "none",
    "ddp": "none",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "fsdp1",
    "fsdp": "fsdp2",
    "fsdp1": "fsdp1",
    "fsdp2": "fsdp2",
    "hsdp": "fsdp2",
    "megatron_fsdp": "megatron_fsdp",
}
CHECKPOINTINGS: dict[str, Checkpointing] = {
    "none": "none",
    "per_op": "per_op",
    "selective": "selective",
    "selective_up": "selective_up",
    "core_attention": "core_attention",
    "norm_act": "norm_act",
    "full": "full",
    "partial": "full",
}
MODEL_NAMES = {"deepseek_v3_671b": "deepseek_v3", "nemotron_3.5_lightning": "nemotron_3_5_lightning_30b_a3b"}
# Keys that mean another recipe in these trainers: Transformer Engine's MXFP8, one scale per tensor in LLMQ, and
# torchao's NVFP4.
PRECISION_NAMES = {
    ("megatron", "mxfp8"): "fp8_te_mxfp8",
    ("pytorch", "fp8"): "fp8_te_current",
    ("pytorch", "nvfp4"): "nvfp4_torchao",
}
# The meaning of the recomputation text where the key is empty (the first match counts), and the default assumption.
RECOMPUTED = {
    **{"selective []": "none", "some blocks": "half", "mla_up_proj": "norm_act"},
    **{"ffn": "selective", "swiglu": "norm_act", "norm": "norm_act"},
}
ASSUMED_RECOMPUTED = {"torchtitan": "per_op"}  # by trainer, otherwise none; this is torchtitan's default
# Each trainer's meaning of it; otherwise Megatron's.
SELECTIVE: dict[str, Checkpointing] = {"own": "selective", "llmq": "selective", "torchtitan": "per_op"}
RECIPES = Path(__file__).with_name("planner_recipes.csv")
COLUMNS = (
    *("source", "model", "gpus", "seq_len", "tp", "pp", "vpp", "cp", "ep", "dp", "sharding", "micro_batch"),
    *("global_batch", "recompute", "precision", "tokens_per_s_per_gpu", "tflops_per_gpu", "step_s", "memory_gib"),
    *("note", "framework", "hardware_key", "cluster_key", "model_key", "sharding_key", "recompute_key"),
    "precision_key",
)
RING_TRAINERS = {"nemo", "megatron-core", "megatron-bridge", "megatron-lm", "megatron", "primus", "nemo-automodel"}


class UnsupportedRow(Exception):
    """A row that cannot be expressed as a job, with the reason."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run: the job, the cluster and the measured values.

    Attributes:
        pair: the trainer and the device, which share one calibrated efficiency.
        step_s: seconds of the whole step; None if the row has only memory.
        memory_gib: None if the row has no memory.
        memory_kind: the kind of memory: the framework's `allocated` or `reserved`, or the driver's `total`.
        assumed: properties that the row does not state.
    """

    row: Mapping[str, str]
    job: Job
    cluster: Cluster
    step_s: float | None
    memory_gib: float | None
    memory_kind: str
    assumed: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        return self.job.trainer, self.cluster.device.name

    @property
    def family(self) -> str:
        return "moe" if self.job.model.experts else "dense"

    @property
    def source(self) -> str:
        return self.row["source"]

    @property
    def tokens(self) -> int:
        return self.job.layout.global_batch * self.job.sequence_length

    @property
    def name(self) -> str:
        layout = self.job.layout
        degrees = [f"{key}{value}" for key in ("tp", "cp", "pp", "ep") if (value := getattr(layout, key)) > 1]
        parts = [self.row["framework"], self.row["model_key"], f"{self.cluster.gpus}x{self.cluster.device.name}"]
        return " ".join([*parts, *degrees, f"S{self.job.sequence_length}", self.row["precision_key"]])


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise SystemExit(f"{path} has no column {', '.join(missing)}")
        return [{key: (value or "").strip() for key, value in row.items() if isinstance(key, str)} for row in reader]


def read_run(row: Mapping[str, str]) -> PublishedRun:
    """Return the run of a row. Raises UnsupportedRow if the model, the layout or a key is not modeled."""
    try:
        model = load_model(_model_name(row))
        cluster = _named_network(row, build_cluster(row["hardware_key"], row["cluster_key"], _integer(row, "gpus")))
    except (UnsupportedModel, UserInputError, KeyError) as error:
        raise UnsupportedRow(str(error)) from error
    job = _job(row, model, cluster)
    step_s = _step_s(row, job, cluster.gpus)
    memory = _number(row, "memory_gib")
    if "known issue" in row["note"]:
        raise UnsupportedRow(f"its source names a fault: {row['note'].split('known issue: ')[-1]}")
    if job.model.index_heads and not job.model.compression:
        raise UnsupportedRow("no rate of kernels that select tokens is known; its 65 s are 8 times the estimate")
    if step_s is None and memory is None:
        raise UnsupportedRow("nothing was measured: no step_s, tokens/s, TFLOP/s or memory_gib")
    kinds = {"nvidia-smi": "total", "% of the gpu": "total", "reserved": "reserved", "allocated": "allocated"}
    kind = next((kind for text, kind in kinds.items() if text in row["note"].lower()), "reserved")
    is_assumed = not row["recompute_key"] and not any(text in row["recompute"] for text in RECOMPUTED)
    return PublishedRun(row, job, cluster, step_s, memory, kind, "recomputation" if is_assumed else "")


def _model_name(row: Mapping[str, str]) -> str:
    name = row["model_key"] or row["model"].split()[0].lower()
    return MODEL_NAMES.get(name, name)


def _named_network(row: Mapping[str, str], cluster: Cluster) -> Cluster:
    """Return the cluster with the network that the text names, such as `50 Gb/s a GPU`."""
    named = re.findall(r"(\d+) Gb/s a (GPU|node)", row.get("hardware", ""))
    if not named:
        return cluster
    gb_s = min(float(bits) / (8 if place == "GPU" else 8 * cluster.topology.gpus_per_domain) for bits, place in named)
    return replace(cluster, topology=replace(cluster.topology, network_gb_s=gb_s))


def _job(row: Mapping[str, str], model: Model, cluster: Cluster) -> Job:
    if not row["seq_len"]:
        raise UnsupportedRow("its source's sequence length is not known")
    trainer = SYNONYMS.get(row["framework"], row["framework"])
    if trainer not in TRAINERS:
        raise UnsupportedRow(f"unknown framework '{trainer}'. Available: {', '.join(TRAINERS)}")
    precision = row["precision_key"]
    precision = PRECISION_NAMES.get((TRAINERS[trainer].core, precision), precision)
    if precision not in PRECISIONS:
        raise UnsupportedRow(f"unknown precision '{precision}'. Available: {', '.join(PRECISIONS)}")
    dtype = PRECISIONS[precision].dtype
    if dtype not in cluster.device.peak_tflops:
        raise UnsupportedRow(f"{cluster.device.name} has no matrix units for {dtype}")
    note = row["note"].lower()
    is_pure, settings = "pure" in row["sharding_key"], _settings(row, trainer, cluster)
    layout = replace(_layout(row, trainer, cluster, model), cuda_graph="graph" in settings)
    if named := settings & CHECKPOINTINGS.keys():
        layout = replace(layout, checkpointing=CHECKPOINTINGS[named.pop()])
    state: State = "amp" if precision.endswith("_amp") or trainer == "llm-foundry" else "fp32"
    state = "bf16" if "pure bf16" in row["precision"].lower() or trainer == "llmq" else state
    return Job(
        model=model,
        layout=layout,
        sequence_length=_integer(row, "seq_len"),
        trainer=trainer,
        precision=precision,
        state=state,
        bf16_blocks=int(last[1]) if (last := re.search(r"last (\d+) of \d+ blocks", row["precision"])) else 0,
        waits_for_launches="cuda_launch_blocking" in note,
        compiled=_is_compiled(note) or trainer == "fms-fsdp",
        compiled_loss="2024-" not in row["source"],
        manual_backward=_has_manual_backward(trainer, precision, row),
        gradient_bytes=2 if is_pure or _reduces_in_bf16(row, precision) else None,
        attention_kernel="cudnn_fp8" if "fp8_attention" in settings else _attention_kernel(row, trainer),
        dispatcher="deepep" if "deepep" in settings else "alltoall",
        expert_overlap="overlap" in settings,
        expert_capacity="capacity" in settings,
        fused_experts="fused" in settings,
        low_precision_head="fp8_head" in settings,
    )


def _reduces_in_bf16(row: Mapping[str, str], precision: str) -> bool:
    """Return whether a recipe sets `grad_reduce_in_fp32=False`: Megatron-Bridge's performance recipes do (v0.2.2 to
    067f987, `_benchmark_common`), and NeMo's in fp8 (7a8f1cc7, `set_primary_perf_configs`)."""
    source = row["source"]
    is_bridge = re.search(r"Megatron-Bridge (performance summary|.*pretrain_(performance|weak_scaling))", source)
    return bool(is_bridge) or ("DGX Cloud performance recipes" in source and precision.startswith("fp8"))


def _settings(row: Mapping[str, str], trainer: str, cluster: Cluster) -> set[str]:
    """Return a run's settings: `deepep`, `overlap` of expert exchanges, a `graph` of whole steps, `fp8_attention`,
    `fp8_head`, `fused` experts, a `capacity` of experts, or what is recomputed.

    If the recipe behind the row is known, its settings apply. Otherwise, DeepEP or HybridEP applies to rows that name
    one and to Megatron's recipes of 2026. A graph applies to rows that name one and to NVIDIA's recipes for Blackwell
    since 26.06. MLPerf rows state that many of their submissions use graphs.
    """
    recipe = _recipe(row)
    if recipe is not None:
        return recipe
    text, source = f"{row['note']} {row['source']}".lower(), row["source"]
    is_recent = TRAINERS[trainer].core == "megatron" and re.search(r"2026|\b26\.\d\d", source)
    is_recipe = "Megatron-Bridge" in source and re.search(r"26\.06|2026-0[78]", source)
    is_blackwell = cluster.device.architecture.startswith("sm10")
    graphs = r"full(-iteration)? cuda graphs?|cuda graphs in many|use-cuda-graphs"
    has = {
        "deepep": is_recent or re.search("deepep|hybridep", text),
        "overlap": re.search("(1f1b|a2a|ep) overlap", text),
        "fused": "paged stash" in text,
        "graph": (is_recipe and is_blackwell) or re.search(graphs, text),
    }
    return {name for name, found in has.items() if found}


def _recipe(row: Mapping[str, str]) -> set[str] | None:
    """Return the settings of the recipe for a row with experts, of Megatron-Bridge from its release or the one before.

    `planner_recipes.csv` has the settings in Megatron-Bridge's scripts/performance/configs at v0.2.2 (25.11), v0.3.1
    (26.02), v0.4.2 (26.04) and v0.5.0 (26.06), and those of the DGX Cloud recipes (NVIDIA/dgxc-benchmarking, v25.05.05:
    launch.sh, and the scripts of NeMo that it calls, at the commits in setup.sh). The verification cards of August 2026
    ran recipes with the same settings.
    """
    source, model = row["source"], row["model_key"].removesuffix("_671b").removesuffix("_30b_a3b")
    found = re.search(r"(\d\d\.\d\d)(\.\d+)? NeMo Container", source)
    cloud = "dgxc-25.05" if "DGX Cloud performance recipes 25.05" in source else ""
    if not found and not cloud and not re.search(r"cards \(pretrain_(performance|weak_scaling)\)", source):
        return None
    release = found[1] if found else "26.06"
    layouts = {("", ""), (row["pp"] or "1", row["ep"] or "1")}
    with RECIPES.open(newline="") as lines:
        recipes = {
            known: set(recipe["settings"].split())
            for recipe in csv.DictReader(lines)
            for known in recipe["releases"].split()
            if recipe["model"] in (model, row["model_key"])
            and row["hardware_key"] in recipe["devices"].split()
            and row["precision_key"] in recipe["precisions"].split()
            and (recipe["pp"], recipe["ep"]) in layouts
        }
    return recipes.get(cloud or max((known for known in recipes if known <= release), default=""))


def _attention_kernel(row: Mapping[str, str], trainer: str) -> AttentionKernel | Literal[""]:
    """Return the kernel that a row names, or that an older version of the trainer used; empty for the current one.

    torchtitan has preferred cuDNN's kernel since the second half of 2025; before, it used FlashAttention 2.
    """
    text = f"{row['note']} {row.get('url_or_repo_path', '')}".lower()
    if match := re.search(r"flash[-_ ]?attention[-_ ]?([23])|\bfa([23])\b", text):
        return "flash3" if "3" in match.groups() else "flash2"
    is_recent = re.search(r"torchtitan 0\.[2-9]|2025-(09|1\d)|202[6-9]", row["source"])
    return "flash2" if trainer == "torchtitan" and not is_recent else ""


def _has_manual_backward(trainer: str, precision: str, row: Mapping[str, str]) -> bool:
    """Return whether this project's trainer used its own backward pass: before `block` existed, in bf16 if possible."""
    can_have = trainer == "own" and precision == "bf16" and _integer(row, "tp", 1) == _integer(row, "cp", 1) == 1
    return "block=manual" in row["note"] or (can_have and "block=pytorch" not in row["note"])


def _is_compiled(note: str) -> bool:
    return "compile" in note and not re.search(r"(no|without|not)[ -](torch\.)?compile", note)


def _layout(row: Mapping[str, str], trainer: str, cluster: Cluster, model: Model) -> Layout:
    degrees = {key: _integer(row, key, 1) for key in ("tp", "pp", "cp", "ep", "dp")}
    stages = degrees["pp"] * _integer(row, "vpp", 1)
    if stages > model.layers + 2:  # Megatron counts the embedding and the loss as layers
        raise UnsupportedRow(f"{stages} pipeline stages, but the model has {model.layers} layers")
    if degrees["ep"] > 1 and (not model.experts or model.experts % degrees["ep"]):
        raise UnsupportedRow(f"ep {degrees['ep']} does not divide {model.experts} experts")
    dp = _data_parallel(degrees, cluster.gpus)
    key = row["sharding_key"].removesuffix("_cpu_optimizer").removesuffix("_pure")
    key = "zero1" if not key and "ZeRO-1" in row["sharding"] else key
    key = "hsdp" if "hybrid" in key or "hsdp" in key else key
    if key in ("fsdp", "fsdp2") and TRAINERS[trainer].core == "megatron":
        key = "megatron_fsdp"
    if key not in SHARDINGS:
        raise UnsupportedRow(f"unknown sharding '{row['sharding_key']}'. Available: {', '.join(SHARDINGS)}")
    chunks = _integer(row, "vpp", 1) if degrees["pp"] > 1 else 1
    named = re.search(r"schedule (zbv|v-half|v-min|zero-bubble)", row["note"])
    micro_batch = _integer(row, "micro_batch", 1)
    global_batch = _integer(row, "global_batch", micro_batch * dp)
    if global_batch % (micro_batch * dp):
        raise UnsupportedRow(f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} x dp {dp}")
    shard = _shard_ranks(row, dp, cluster) if key == "hsdp" else dp
    note, recompute = row["note"].lower(), row["recompute"].lower()
    checkpointing, layers = _checkpointing(row, trainer, model.layers)
    first_less, last_less = _less_layers(model, degrees["pp"] * chunks, is_nemo=trainer == "nemo")
    is_async = "asynctp" in note or "async tp" in note or "tp overlap" in note or trainer == "megatron-bridge"
    return Layout(
        dp_replicate=dp // shard,
        dp_shard=shard,
        stages_per_rank=chunks,
        schedule=named[1].replace("-", "_") if named else "interleaved" if chunks > 1 else "1f1b",
        micro_batch=micro_batch,
        global_batch=global_batch,
        sharding=SHARDINGS[key],
        # FSDP keeps a stage's weights gathered while a pipeline's micro-batches go through the stage (torchtitan).
        reshard_after_forward=degrees["pp"] == 1 and "stay gathered" not in row["sharding"],
        sequence_parallel=trainer != "megatron-lm" or "sequence parallel" in recompute,
        tp_overlap="async" if is_async else "none",
        cp_method="ring" if trainer in RING_TRAINERS else "allgather",
        offload_optimizer=row["sharding_key"].endswith("cpu_optimizer"),
        checkpointing=checkpointing,
        checkpointed_layers=layers,
        checkpointing_freq=2 if "every second block" in row["recompute"] else 1,
        first_stage_less_layers=first_less,
        last_stage_less_layers=last_less,
        **degrees,
    )


def _less_layers(model: Model, stages: int, *, is_nemo: bool) -> tuple[int, int]:
    """Return how many layers fewer the first and last stages have in models with prediction layers.

    In Megatron-Bridge's recipes for DeepSeek-V3, the last stage gets the layers that the others leave (v0.5.0,
    `set_deepseek_v3_pipeline_model_parallel_layout`); in NeMo's, the ends have one and two fewer of 64 (v2.3.0,
    scripts/performance/llm/pretrain_deepseek_v3.py).
    """
    if stages == 1 or not model.prediction_layers:
        return 0, 0
    lacking, most = -model.layers % stages, math.ceil(model.layers / stages)
    if is_nemo and lacking == 3:
        return 1, 2
    last = min(lacking, most)
    return (lacking - last, last) if lacking - last <= most else (0, 0)


def _data_parallel(degrees: dict[str, int], gpus: int) -> int:
    """Return the number of GPU groups that train on different sequences, and remove `dp` from the degrees.

    If the product of the degrees is not the number of GPUs, `dp` also counts the ranks of other degrees, as some tables
    do. `dp` is then derived from the other degrees.
    """
    others = math.prod(degrees[key] for key in ("tp", "pp", "cp"))
    if gpus % others:
        raise UnsupportedRow(f"tp x pp x cp = {others} does not divide {gpus} GPUs")
    del degrees["dp"]
    return gpus // others


def _shard_ranks(row: Mapping[str, str], dp: int, cluster: Cluster) -> int:
    """Return the number of ranks over which HSDP shards: `shard 16` or `replicate 4` in the text, or one node."""
    text = row["sharding"].lower()
    shards, copies = re.search(r"shard\D{0,12}(\d+)", text), re.search(r"replicate\D{0,12}(\d+)", text)
    shard = min(dp, cluster.topology.gpus_per_domain)
    if shards or copies:
        shard = int(shards[1]) if shards else dp // max(1, int(copies[1]) if copies else 1)
    if not shard or dp % shard:
        raise UnsupportedRow(f"HSDP over {shard} ranks does not divide dp {dp}")
    return shard


def _checkpointing(row: Mapping[str, str], trainer: str, model_layers: int) -> tuple[Checkpointing, int | None]:
    """Return what is recomputed, and in how many layers if the row gives a number."""
    key = row["recompute_key"]
    if not key:
        named = (meant for text, meant in RECOMPUTED.items() if text in row["recompute"])
        key = next(named, ASSUMED_RECOMPUTED.get(trainer, "none"))
    if key == "half":
        return "full", model_layers // 2
    if key == "full_some_layers" and (each := re.search(r"(\d+) layers of each stage", row["recompute"])):
        return "full", int(each[1]) * _integer(row, "pp", 1) * _integer(row, "vpp", 1)
    match = re.fullmatch(r"(full|partial)[_ ]?(\d+)(_layers?)?", key)
    if match:
        return "full", int(match[2])
    if key not in CHECKPOINTINGS:
        raise UnsupportedRow(f"unknown recomputation '{key}'. Available: {', '.join(CHECKPOINTINGS)}")
    if key == "selective":
        return SELECTIVE.get(trainer, "core_attention"), None
    layers = re.search(r"(\d+)\s*(?:of \d+ )?layers", row["recompute"].lower()) if key == "partial" else None
    return CHECKPOINTINGS[key], int(layers[1]) if layers else None


def _step_s(row: Mapping[str, str], job: Job, gpus: int) -> float | None:
    """Return the seconds of a step: as published, from tokens/s, or from TFLOP/s by the convention in the note."""
    tokens = job.layout.global_batch * job.sequence_length
    if step_s := _number(row, "step_s"):
        return step_s
    if rate := _number(row, "tokens_per_s_per_gpu"):
        return tokens / rate / gpus
    if tflops := _number(row, "tflops_per_gpu"):
        is_megatron = TRAINERS[job.trainer].core == "megatron"
        return tokens * _convention_flops(row["note"].lower(), job, is_megatron) / (tflops * 1e12 * gpus)
    return None


def _convention_flops(note: str, job: Job, is_megatron: bool) -> float:
    """Return the FLOPs per token by the convention that a note names; if it names none, that of Megatron, which counts
    half of the scores (core_v0.12.0, training.py: rows with tokens/s and TFLOP/s agree), else full attention."""
    causal = model_flops_per_token(job.model, job.sequence_length)
    if "causal" in note or (is_megatron and "6n" not in note):
        return causal
    if "6n" in note or "six_n" in note:
        return 6.0 * job.model.parameters
    linear = model_flops_per_token(job.model, 1)
    return linear + 2 * (causal - linear)


def _number(row: Mapping[str, str], key: str) -> float | None:
    """Return a number above 0; None for a blank."""
    text = row.get(key, "")
    if not text:
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError as error:
        raise UnsupportedRow(f"{key} is '{text}', which is not a number") from error
    if not math.isfinite(value) or value <= 0:
        raise UnsupportedRow(f"{key} is '{text}', which is not a number above 0")
    return value


def _integer(row: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = _number(row, key)
    if value is None and default is not None:
        return default
    if value is None or value != int(value):
        raise UnsupportedRow(f"{key} is '{row.get(key, '')}', which is not a positive whole number")
    return int(value)
