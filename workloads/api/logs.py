"""Parse the logs of trainers line by line: step numbers, metrics, and the configuration that the program reports.

Supported are Megatron-LM, the programs built on it (Primus, Megatron-Bridge, NeMo), and torchtitan. Where a program
prints a pair of this step and the mean so far (`7443.9/7491.0`), the step's value is taken. A value that the log does
not contain stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from workloads.api.contract import Scalar

LONGEST_LINE = 65536  # characters; no step's line is longer, and only the beginning of a longer line is parsed

# The printed name of a metric: its name in this project, and the factor to this project's unit.
METRICS = {
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

# The programs' names of their configuration, and ours. torchtitan's names have the section before them.
CONFIG_NAMES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "data_parallel_size": "dp",
    "micro_batch_size": "micro_batch",
    "global_batch_size": "global_batch",
    "seq_length": "sequence_length",
    "world_size": "gpus",
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.data_parallel_shard_degree": "dp_shard",
    "parallelism.data_parallel_replicate_degree": "dp_replicate",
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
_TITAN_METRIC = re.compile(rf"\b(\w+):\s*({_NUMBER})")
_BRIDGE = re.compile(rf"Step Time\s*:\s*({_NUMBER})\s*s GPU utilization:\s*({_NUMBER})\s*(?:MODEL_)?TFLOP/s/GPU")
_ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} (\S+)\s*$")
_TITAN_SECTION = re.compile(r'^ {2}"(\w+)": \{$')
_TITAN_ENTRY = re.compile(r'^ {4}"(\w+)": (.+?),?$')
_RANK_OF = re.compile(r"\[rank-\d+/(\d+)\]")
_DEVICE = re.compile(r"GPU capacity: (.+?) with ")


@dataclass(frozen=True)
class Step:
    """The printed metrics of one step, under this project's names."""

    number: int
    metrics: Mapping[str, float]


@dataclass
class LogReader:
    """Reads a log line by line.

    Attributes:
        kind: the program that wrote the log, known once it has printed a step.
        reported_config: the configuration that the program reports.
        device: the device that the program reports.
    """

    kind: str = ""
    reported_config: dict[str, Scalar] = field(default_factory=dict)
    device: str = ""
    _last: int = -1
    _last_time: datetime | None = None
    _section: str = ""
    _pending: dict[str, float] = field(default_factory=dict)

    def feed(self, line: str) -> Step | None:
        """Parse one line and return the step that it reports. A step that several ranks print is returned once."""
        line = _COLOUR.sub("", line[:LONGEST_LINE]).rstrip()
        if match := _ITERATION.search(line):
            return self._make_step(int(match[1]), self._read_pairs(line), line)
        if match := _TITAN_STEP.search(line):
            self.kind = "torchtitan"
            printed = {name: _parse_number(text) for name, text in _TITAN_METRIC.findall(line[match.start() :])}
            return self._make_step(int(match[1]), _rename_metrics(printed), line)
        if match := _BRIDGE.search(line):
            self._pending = {"step_time_s": _parse_number(match[1]), "tflops_per_gpu": _parse_number(match[2])}
        else:
            self._read_configuration(line)
        return None

    def _read_pairs(self, line: str) -> dict[str, float]:
        """Return the metrics of a line of `name: value |` pairs."""
        if "Training epoch" in line:
            self.kind = "NeMo"
        elif self._pending:
            self.kind = "Megatron-Bridge"
        elif match := _RANK_OF.search(line):
            self.kind = "Primus"
            self.reported_config.setdefault("gpus", int(match[1]))
        elif not self.kind:
            self.kind = "Primus" if re.search(r"\(ms\): [\d.]+/|tokens per GPU", line) else "Megatron-LM"
        pairs = (part.rpartition(":") for part in line.split("|"))
        printed = {}
        for name, _, text in pairs:
            if number := re.match(rf"\s*({_NUMBER})", text):
                printed[name.strip()] = _parse_number(number[1])
        metrics = self._pending | _rename_metrics(printed)
        self._pending = {}
        return metrics

    def _make_step(self, number: int, metrics: dict[str, float], line: str) -> Step | None:
        """Return the step, with its time from the lines' timestamps if it is not printed; None for a known step."""
        timestamp = _parse_timestamp(line)
        if number <= self._last:
            return None
        if "step_time_s" not in metrics and timestamp and self._last_time and timestamp > self._last_time:
            metrics["step_time_s"] = (timestamp - self._last_time).total_seconds() / (number - self._last)
        self._last, self._last_time = number, timestamp or self._last_time
        return Step(number, metrics)

    def _read_configuration(self, line: str) -> None:
        """Store a configuration entry or the device, if the line reports one."""
        if match := _TITAN_SECTION.match(line):
            self._section = match[1]
        elif (match := _TITAN_ENTRY.match(line)) and self._section:
            self._store_entry(f"{self._section}.{match[1]}", match[2])
        elif match := _ARGUMENT.search(line):
            self._store_entry(match[1], match[2])
        elif match := _DEVICE.search(line):
            self.device = match[1]

    def _store_entry(self, name: str, text: str) -> None:
        value = _parse_scalar(text)
        if name in CONFIG_NAMES and value not in (None, -1):  # -1: the program chooses the value
            self.reported_config[CONFIG_NAMES[name]] = value


def _rename_metrics(printed: Mapping[str, float]) -> dict[str, float]:
    """Return the known metrics under this project's names, in its units."""
    return {METRICS[name][0]: METRICS[name][1] * value for name, value in printed.items() if name in METRICS}


def _parse_number(text: str) -> float:
    return float(text.replace(",", ""))


def _parse_timestamp(line: str) -> datetime | None:
    match = _TIME.search(line)
    try:
        return datetime.fromisoformat(match[0].replace(",", ".")) if match else None
    except ValueError:
        return None


def _parse_scalar(text: str) -> Scalar:
    text = text.strip().strip('"')
    if text in ("true", "True", "false", "False"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return None if text in ("null", "None") else text
