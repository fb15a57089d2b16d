"""What trainers print, line by line: which step, how long it took, and what the program says it was told.

Understood are Megatron-LM and what is built upon it (Primus, Megatron-Bridge, NeMo), and torchtitan. Where a program
prints a pair, of this step and of all so far (`7443.9/7491.0`), the step's own is taken. What a log does not say stays
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from workloads.api.contract import Scalar

LONGEST_LINE = 65536  # what is longer is no line of a step, and only its beginning is looked at

# What the programs call a figure: our name, and the factor to our unit.
FIGURES = {
    "elapsed time per iteration (ms)": ("step_time_s", 1e-3),
    "train_step_timing in s": ("step_time_s", 1.0),
    "throughput per GPU (TFLOP/s/GPU)": ("tflops_per_gpu", 1.0),
    "compute per GPU (TFLOP/s/GPU)": ("tflops_per_gpu", 1.0),
    "TFLOPS_per_GPU": ("tflops_per_gpu", 1.0),
    "tflops": ("tflops_per_gpu", 1.0),
    "tokens per GPU (tokens/s/GPU)": ("tokens_per_s_per_gpu", 1.0),
    "tokens/s/GPU inst/harmonic mean": ("tokens_per_s_per_gpu", 1.0),
    "tokens/sec/GPU": ("tokens_per_s_per_gpu", 1.0),
    "tps": ("tokens_per_s_per_gpu", 1.0),
    "mfu": ("mfu", 0.01),
    "global batch size": ("global_batch", 1.0),
    "global_batch_size": ("global_batch", 1.0),
    "lm loss": ("loss", 1.0),
    "reduced_train_loss": ("loss", 1.0),
    "loss": ("loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "grad_norm": ("grad_norm", 1.0),
    "memory": ("peak_device_gib", 1.0),
}

# What the programs call what they were told. Of torchtitan the sections of its configuration stand before the names.
TOLD = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "seq_length": "sequence_length",
    "world_size": "gpus",
    "parallelism.tensor_parallel_degree": "tensor",
    "parallelism.pipeline_parallel_degree": "pipeline",
    "parallelism.context_parallel_degree": "context",
    "parallelism.data_parallel_shard_degree": "shard",
    "parallelism.data_parallel_replicate_degree": "replicate",
    "training.local_batch_size": "micro_batch",
    "training.global_batch_size": "global_batch",
    "training.seq_len": "sequence_length",
    "activation_checkpoint.mode": "checkpointing",
    "compile.enable": "compile",
}

_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")
_ITERATION = re.compile(r"\biteration:?\s+(\d+)\s*/\s*\d+\s*\|")
_TITAN_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_TITAN_FIGURE = re.compile(rf"\b(\w+):\s*({_NUMBER})")
_BRIDGE = re.compile(rf"Step Time\s*:\s*({_NUMBER})\s*s GPU utilization:\s*({_NUMBER})\s*(?:MODEL_)?TFLOP/s/GPU")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} (\S+)\s*$")
_TITAN_SECTION = re.compile(r'^ {2}"(\w+)": \{$')
_TITAN_ENTRY = re.compile(r'^ {4}"(\w+)": (.+?),?$')
_RANK_OF = re.compile(r"\[rank-\d+/(\d+)\]")
_DEVICE = re.compile(r"GPU capacity: (.+?) with ")


@dataclass(frozen=True)
class Step:
    """One step, with what was printed of it under this project's names."""

    number: int
    metrics: Mapping[str, float]


@dataclass
class LogReader:
    """Takes a log line by line. told: what the program says that it was told; device: what it says it runs on."""

    kind: str = ""
    told: dict[str, Scalar] = field(default_factory=dict)
    device: str = ""
    _last: int = -1
    _last_time: datetime | None = None
    _section: str = ""
    _pending: dict[str, float] = field(default_factory=dict)

    def feed(self, line: str) -> Step | None:
        """The step that the line is about, once for each: all ranks may print it."""
        line = _COLOUR.sub("", line[:LONGEST_LINE]).rstrip()
        if found := _ITERATION.search(line):
            return self._step(int(found[1]), self._paired(line), line)
        if found := _TITAN_STEP.search(line):
            self.kind = "torchtitan"
            metrics = {name: _number(text) for name, text in _TITAN_FIGURE.findall(line[found.start() :])}
            return self._step(int(found[1]), _ours(metrics), line)
        if found := _BRIDGE.search(line):
            self._pending = {"step_time_s": _number(found[1]), "tflops_per_gpu": _number(found[2])}
        else:
            self._hear(line)
        return None

    def _paired(self, line: str) -> dict[str, float]:
        """The figures of a line of `name: value |`."""
        if "Training epoch" in line:
            self.kind = "NeMo"
        elif self._pending:
            self.kind = "Megatron-Bridge"
        elif found := _RANK_OF.search(line):
            self.kind = "Primus"
            self.told.setdefault("gpus", int(found[1]))
        elif not self.kind:
            self.kind = "Primus" if re.search(r"\(ms\): [\d.]+/|tokens per GPU", line) else "Megatron-LM"
        pairs = (part.rpartition(":") for part in line.split("|"))
        found_figures = {}
        for name, _, text in pairs:
            if number := re.match(rf"\s*({_NUMBER})", text):
                found_figures[name.strip()] = _number(number[1])
        metrics = self._pending | _ours(found_figures)
        self._pending = {}
        return metrics

    def _step(self, number: int, metrics: dict[str, float], line: str) -> Step | None:
        moment = _time(line)
        if number <= self._last:
            return None
        if "step_time_s" not in metrics and moment and self._last_time and moment > self._last_time:
            metrics["step_time_s"] = (moment - self._last_time).total_seconds() / (number - self._last)
        self._last, self._last_time = number, moment or self._last_time
        return Step(number, metrics)

    def _hear(self, line: str) -> None:
        """A line of a program's configuration, or of what it runs on."""
        if found := _TITAN_SECTION.match(line):
            self._section = found[1]
        elif (found := _TITAN_ENTRY.match(line)) and self._section:
            self._tell(f"{self._section}.{found[1]}", found[2])
        elif found := _ARGUMENT.search(line):
            self._tell(found[1], found[2])
        elif found := _DEVICE.search(line):
            self.device = found[1]

    def _tell(self, name: str, text: str) -> None:
        value = _scalar(text)
        if name in TOLD and value not in (None, -1):  # -1: left to the program
            self.told[TOLD[name]] = value


def _ours(metrics: Mapping[str, float]) -> dict[str, float]:
    return {FIGURES[name][0]: FIGURES[name][1] * value for name, value in metrics.items() if name in FIGURES}


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _time(line: str) -> datetime | None:
    found = _TIME.search(line)
    try:
        return datetime.fromisoformat(found[0].replace(",", ".")) if found else None
    except ValueError:
        return None


def _scalar(text: str) -> Scalar:
    text = text.strip().strip('"')
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return None if text in ("null", "None") else text
