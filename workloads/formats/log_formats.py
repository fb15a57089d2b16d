"""The table of log formats: the line by which each trainer reports a step, and what its names and units are.

A row's `step` matches only lines of its trainer. Sources (August 2026): `megatron/training/training.py` (Megatron-LM),
`bigscience-workshop/Megatron-DeepSpeed`, `print_rank_last_patches.py` and `metrics_output_format.py` (Primus),
`nanotron/trainer.py`, `scripts/base_train.py` (nanochat), `megatron/logging.py` (GPT-NeoX), `recipes/llm/train_ft.py`
(NeMo Automodel), `torchtitan/components/metrics.py`, `callbacks/console_logger.py` (OLMo-core), Composer's
`console_logger.py` (llm-foundry), `utils/timer.py` and `runtime/pipe/engine.py` (DeepSpeed).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 2**30
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
# A number, with the suffix that some programs write for powers of 1,000.
VALUE = rf"(?:{NUMBER}(?:[KMBGTPE](?:FLOPS)?\b)?|[-+]?(?:nan|NaN|NAN|inf|Inf)\b)"
SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
Metrics = Mapping[str, tuple[str, float]]  # by printed name: this project's name, and the factor to its unit

# Values from which others follow and which are not results themselves: see `LogReader._derive`.
RATES = ("batches_per_s", "samples_per_s", "total_tokens")


def _metrics(*rows: tuple[str, float, tuple[str, ...]]) -> dict[str, tuple[str, float]]:
    return {printed: (name, factor) for name, factor, names in rows for printed in names}


# Names of Megatron-LM, programs built on it, and torchtitan.
MEGATRON_METRICS = _metrics(
    ("step_time_s", 1e-3, ("elapsed time per iteration (ms)",)),
    ("step_time_s", 1.0, ("elapsed time per iteration (s)", "train_step_timing in s")),
    # Of one GPU, also the `TFLOPs` of Megatron-DeepSpeed.
    ("tflops_per_gpu", 1.0, ("throughput per GPU (TFLOP/s/GPU)", "compute per GPU (TFLOP/s/GPU)")),
    ("tflops_per_gpu", 1.0, ("TFLOPS_per_GPU", "TFLOPs", "tflops")),
    ("tokens_per_s_per_gpu", 1.0, ("tokens per GPU (tokens/s/GPU)", "tokens/s/GPU inst/harmonic mean")),
    # `wps` of torchtitan of 2024: words are tokens, of one GPU.
    ("tokens_per_s_per_gpu", 1.0, ("tokens/sec/GPU", "tokens_per_sec_per_gpu", "tps", "wps")),
    ("samples_per_s", 1.0, ("samples per second",)),
    ("mfu", 0.01, ("mfu",)),
    # The second as Megatron's port for Ascend spells it.
    ("global_batch", 1.0, ("global batch size", "gloabl batch size", "global_batch_size")),
    ("sequence_length", 1.0, ("actual seqlen",)),
    ("skipped_iterations", 1.0, ("number of skipped iterations",)),
    ("loss", 1.0, ("lm loss", "reduced_train_loss", "loss")),
    ("grad_norm", 1.0, ("grad norm", "grad_norm")),
    # What the allocator reserved, or what the driver saw in use; Primus writes GB and means GiB.
    ("peak_device_gib", 1.0, ("memory", "memory usage/free/total", "hip mem usage/free/total/usage_ratio")),
    ("peak_device_gib", 1.0, ("rocm mem usage/free/total/usage_ratio",)),
    ("peak_device_gib", 1 / GIB, ("peak_memory_usage",)),
    ("device_memory_share", 1.0, ("mem usages",)),
)
# `name: value | name: value`, or without the colon
_BARS = (re.compile(rf"(?:^|\|)\s*(?P<name>[^|\s](?:[^|]*?[^|\s:])?)(?:\s*:\s*|\s+)(?P<value>{VALUE})"),)
_WORDS = (re.compile(rf"\b(?P<name>\w+):\s*(?P<value>{VALUE})"),)


@dataclass(frozen=True)
class LogFormat:
    """A row: how one trainer reports a step. Rows of a `family` may follow each other in one log."""

    program: str
    hint: str  # a text that every line that `step` matches contains
    step: re.Pattern[str]  # group 1 is the step's number
    metrics: Metrics
    pairs: tuple[re.Pattern[str], ...] = _BARS  # of a name and its value
    body: re.Pattern[str] | None = None  # lines below the step's that have its metrics
    family: str = ""  # by default the program
    is_library: bool = False  # other trainers run on it, and print lines of their own
    flops: str = "its own"  # how it counts the operations that it states
    dtype: str = ""  # its default, which it does not print
    is_of_interval: bool = False  # the printed time is of all steps since the last line
    has_equal_steps: bool = True  # each trains on as many tokens: it does not count without padding
    counts_model_replicas: bool = False  # its rate `per GPU` is of a rank of data or context parallelism

    @property
    def log_family(self) -> str:
        return self.family or self.program


_MEGATRON = LogFormat(
    "Megatron-LM",
    "iteration",
    re.compile(r"\biteration:?\s+(\d+)\s*/\s*(\d+)\s*\|(?=.*(?:elapsed time per iter|consumed |lm loss))"),
    MEGATRON_METRICS,
    family="Megatron",
)
_TITAN = LogFormat(
    "torchtitan",
    "step:",
    re.compile(r"(?<!validate )\bstep:\s*(\d+)\s+loss:(?=.*\b(?:memory|grad_norm|tps|wps):)"),
    MEGATRON_METRICS,
    _WORDS,
    flops="full attention",
    dtype="bf16",
)
_OLMO = LogFormat(
    "OLMo-core",
    "[step=",
    re.compile(r"\[step=(\d+)/(?:\d+|\?\?\?),epoch=\d+[^\]]*\]\s*$"),
    _metrics(
        ("batches_per_s", 1.0, ("throughput/device/BPS", "throughput/device/batches_per_second")),
        ("tokens_per_s_per_gpu", 1.0, ("throughput/device/TPS", "throughput/device/tokens_per_second")),
        ("total_tokens", 1.0, ("throughput/total tokens", "throughput/total_tokens")),
        ("tflops_per_gpu", 1e-12, ("throughput/device/flopsPS",)),
        ("mfu", 0.01, ("throughput/device/MFU",)),
        ("loss", 1.0, ("train/CE loss", "train/CrossEntropyLoss")),
        ("grad_norm", 1.0, ("optim/total grad norm",)),
        ("peak_device_gib", 1.0, ("gpu_memory/GPU reserved mem (GiB)",)),
        ("peak_memory_gib", 1.0, ("gpu_memory/GPU active mem (GiB)",)),
        ("peak_memory_gib", 1e6 / GIB, ("System/Peak GPU Memory (MB)",)),
    ),
    (re.compile(rf"(?:^|\s{{2,}})(?P<name>[A-Za-z][^=\s][^=]*)=(?P<value>{VALUE})"),),
    body=re.compile(r"(?:^|\s{2,})[A-Za-z][^=]*=\S+\s*$"),
)
FORMATS = (
    LogFormat(
        "nanotron",
        "iteration:",
        re.compile(r"\biteration: (\d+) / \d+ \|(?=.*\btokens_per_sec)"),
        _metrics(
            ("step_time_s", 1e-3, ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")),
            ("tokens_per_s", 1.0, ("tokens_per_sec",)),
            ("tokens_per_s_per_gpu", 1.0, ("tokens_per_sec_per_gpu",)),
            ("tflops_per_gpu", 1.0, ("model_tflops_per_gpu",)),
            ("global_batch", 1.0, ("global_batch_size",)),  # in sequences, since 2025 in tokens: `LogReader._derive`
            ("loss", 1.0, ("lm_loss",)),
            ("grad_norm", 1.0, ("grad_norm",)),
        ),
    ),
    LogFormat(
        "nanochat",
        "tok/sec:",
        re.compile(r"\bstep (\d+)(?:/\d+)? \([\d.]+%\) \|(?=.*\bdt: )"),
        _metrics(
            ("step_time_s", 1e-3, ("dt",)),
            ("tokens_per_s", 1.0, ("tok/sec",)),
            ("mfu", 0.01, ("mfu", "bf16_mfu")),
            ("loss", 1.0, ("loss",)),
            ("grad_norm", 1.0, ("grad norm",)),
        ),
        flops="6 per parameter and full attention",
    ),
    LogFormat(
        "GPT-NeoX",
        "samples/sec:",
        re.compile(r"samples/sec: [\d.]+ \| iteration\s+(\d+)\s*/\s*\d+ \|"),
        MEGATRON_METRICS
        | _metrics(
            ("samples_per_s", 1.0, ("samples/sec",)),
            ("tflops_per_gpu", 1e-12, ("approx flops per GPU",)),
            ("mfu", 0.01, ("MFU",)),
            ("hfu", 0.01, ("HFU",)),
            ("loss", 1.0, ("lm_loss",)),
        ),
        (*_BARS, re.compile(rf"(?P<name>samples/sec): (?P<value>{VALUE})")),  # behind a date, without a bar
    ),
    LogFormat(
        "NeMo Automodel",
        "| epoch ",
        re.compile(r"^(?!.*\[val\]).*\bstep (\d+) \| epoch \d+ \| loss "),
        _metrics(
            ("tokens_per_s", 1.0, ("tps",)),
            ("tokens_per_s_per_gpu", 1.0, ("/gpu",)),
            ("peak_memory_gib", 1.0, ("mem",)),
            ("loss", 1.0, ("loss",)),
            ("grad_norm", 1.0, ("grad_norm",)),
        ),
        (*_BARS, re.compile(rf"\((?P<value>{VALUE})(?P<name>/gpu)\)")),
        has_equal_steps=False,
        counts_model_replicas=True,
    ),
    replace(
        _MEGATRON,
        program="NeMo",
        step=re.compile(r"\bTraining epoch \d+, iteration (\d+)/(\d+) \|"),
    ),
    replace(
        _MEGATRON,
        program="Primus",
        step=re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|(?=.*\| memory usage/free/total: )"),
        family="Primus on torchtitan",
        flops="full attention",
        dtype="bf16",
        is_of_interval=True,
    ),
    replace(
        _MEGATRON,
        program="Primus",
        step=re.compile(
            r"^(?=.*(?:\[rank-\d+/\d+\]|\(ms\): [\d.]+/|tokens per GPU)).*\biteration\s+(\d+)\s*/\s*(\d+)\s*\|"
        ),
    ),
    _MEGATRON,
    replace(
        _TITAN, program="Primus", step=re.compile(rf"\[rank-\d+/\d+\].*{_TITAN.step.pattern}"), family="torchtitan"
    ),
    _TITAN,
    _OLMO,
    replace(_OLMO, program="OLMo", step=re.compile(r"\[step=(\d+)/\d+\]\s*$")),
    LogFormat(
        "llm-foundry",
        "[batch=",
        re.compile(r"\[batch=(\d+)/\d+\]:\s*$"),
        _metrics(
            ("batches_per_s", 1.0, ("throughput/batches_per_sec",)),
            ("samples_per_s", 1.0, ("throughput/samples_per_sec",)),
            ("tokens_per_s", 1.0, ("throughput/tokens_per_sec",)),
            ("total_tokens", 1.0, ("time/token",)),
            ("tokens_per_s_per_gpu", 1.0, ("throughput/device/tokens_per_sec",)),
            ("tflops_per_gpu", 1e-12, ("throughput/device/flops_per_sec",)),
            ("mfu", 1.0, ("throughput/device/mfu",)),
            ("loss", 1.0, ("loss/train/total",)),
        ),
        (re.compile(rf"\bTrain (?P<name>\S[^:]*): (?P<value>{VALUE})"),),
        body=re.compile(r"\bTrain \S[^:]*: "),
    ),
    LogFormat(
        "DeepSpeed",
        "SamplesPerSec=",
        # Before 0.8 the step stands behind the epoch alone, and before 0.7 there is a running mean alone.
        re.compile(r"(?:\bglobal_step=|\[timer\.py:\d+:stop\] \d+/)(\d+), (?:RunningAvg)?SamplesPerSec="),
        _metrics(("samples_per_s", 1.0, ("CurrSamplesPerSec",)), ("peak_memory_gib", 1.0, ("MaxMemAllocated",))),
        (re.compile(rf"\b(?P<name>\w+)=(?P<value>{VALUE})"),),
        is_library=True,
    ),
    LogFormat(
        "DeepSpeed",
        "iter time (s):",
        re.compile(r"\bsteps: (\d+) loss: \S+ .*?iter time \(s\): "),
        _metrics(
            ("step_time_s", 1.0, ("iter time (s)",)),
            ("samples_per_s", 1.0, ("samples/sec",)),
            ("loss", 1.0, ("loss",)),
        ),
        (re.compile(rf"(?P<name>iter time \(s\)|samples/sec|loss): (?P<value>{VALUE})"),),
        family="DeepSpeed's pipeline",
        is_library=True,
    ),
)
