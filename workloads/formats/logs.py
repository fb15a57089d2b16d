"""Parse the logs of trainers line by line: step numbers, metrics, and the configuration that the program reports.

Supported are Megatron-LM, the programs built on it (Megatron-DeepSpeed, Primus, Megatron-Bridge, NeMo), and torchtitan,
with or without what a launcher writes before each line. Where a program prints a pair of this step and the mean so far
(`7443.9/7491.0`), the step's value is taken. A value that the log does not contain stays unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from workloads.api.contract import Scalar
from workloads.formats import megatron, torchtitan

LONGEST_LINE = 65536  # characters; no step's line is longer, and only the beginning of a longer line is parsed
LONGEST_ENTRY = 1024  # characters of a line with an entry of the configuration
GIB = 2**30

# A metric's name in this project, the factor to this project's unit, and the names under which programs print it.
_PRINTED_METRICS = (
    ("step_time_s", 1e-3, ("elapsed time per iteration (ms)",)),
    ("step_time_s", 1.0, ("train_step_timing in s",)),
    # Of one GPU, also the `TFLOPs` of Megatron-DeepSpeed.
    ("tflops_per_gpu", 1.0, ("throughput per GPU (TFLOP/s/GPU)", "compute per GPU (TFLOP/s/GPU)")),
    ("tflops_per_gpu", 1.0, ("TFLOPS_per_GPU", "TFLOPs", "tflops")),
    ("tokens_per_s_per_gpu", 1.0, ("tokens per GPU (tokens/s/GPU)", "tokens/s/GPU inst/harmonic mean")),
    # `wps` of torchtitan of 2024: words are tokens, of one GPU.
    ("tokens_per_s_per_gpu", 1.0, ("tokens/sec/GPU", "tokens_per_sec_per_gpu", "tps", "wps")),
    ("mfu", 0.01, ("mfu",)),
    # The second as Megatron's port for Ascend spells it.
    ("global_batch", 1.0, ("global batch size", "gloabl batch size", "global_batch_size")),
    ("sequence_length", 1.0, ("actual seqlen",)),
    ("skipped_iterations", 1.0, ("number of skipped iterations",)),
    ("loss", 1.0, ("lm loss", "reduced_train_loss", "loss")),
    ("grad_norm", 1.0, ("grad norm", "grad_norm")),
    # What the allocator reserved, or what the driver saw in use; Primus writes GB and means GiB.
    (
        "peak_device_gib",
        1.0,
        ("memory", "hip mem usage/free/total/usage_ratio", "rocm mem usage/free/total/usage_ratio"),
    ),
    ("peak_device_gib", 1 / GIB, ("peak_memory_usage",)),
    ("device_memory_share", 1.0, ("mem usages",)),
)
METRICS = {printed: (name, factor) for name, factor, names in _PRINTED_METRICS for printed in names}
STEP_SIZES = ("global_batch", "sequence_length")  # the sizes of a step, which are no results

# Names in a line about a rank's memory. Megatron's MB are MiB; the other line has GB of 10^9 bytes.
MEMORY = {
    "max allocated": ("peak_memory_gib", 1 / 1024),
    "max reserved": ("peak_device_gib", 1 / 1024),
    "mem-max-allocated-gigabytes": ("peak_memory_gib", 1e9 / GIB),
    "mem-max-reserved-gigabytes": ("peak_device_gib", 1e9 / GIB),
}

# Sizes and degrees by the programs' names; torchtitan's have the section before them.
REPORTED = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch", "global_batch", "sequence_length")
CONFIG = {name.key: name.field for name in (*megatron.NAMES, *torchtitan.NAMES) if name.field in REPORTED} | {
    "data_parallel_size": "dp",
    "rampup_batch_size": "batch_rampup",
    "world_size": "gpus",
    "training.batch_size": "micro_batch",  # torchtitan of 2024
    "activation_checkpoint.mode": "checkpointing",
    "compile.enable": "compile",
}
DTYPES = {
    name: dtype
    for dtype, names in {
        "bf16": ("bfloat16", "bf16", "bf16-mixed"),
        "fp16": ("float16", "fp16", "half", "16-mixed", "16bit"),
        "fp32": ("float32", "fp32", "float", "32-true"),
    }.items()
    for name in names
}

_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?"
_VALUE = rf"(?:{_NUMBER}|[-+]?(?:nan|NaN|NAN|inf|Inf)\b)"
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?")
_ITERATION = re.compile(r"\biteration:?\s+(\d+)\s*/\s*(\d+)\s*\|")
_EPOCH = re.compile(r"\bTraining epoch (\d+),")
_GLOBAL_STEP = re.compile(r"\bglobal_step: (\d+)")
_TITAN_STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:")
_TITAN_METRIC = re.compile(rf"\b(\w+):\s*({_VALUE})")
_BRIDGE = re.compile(rf"Step Time\s*:\s*({_NUMBER})\s*s GPU utilization:\s*({_NUMBER})\s*(?:MODEL_)?TFLOP/s/GPU")
ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} (\S.*?)\s*$")
WORLD_SIZE = re.compile(r"\busing world size: (\d+)")
# A line of JSON behind whatever a launcher writes before it: the spaces, the key and the value.
_JSON_ENTRY = re.compile(r'^(?:.*?[^ ])??( +)"(\w+)": (.+?),?$')
TITAN_MESH = re.compile(r"device mesh with parallelism: (.+)$")
_TITAN_OLD_MESH = re.compile(r"-D device mesh with \[(.*?)\], \[([\d, ]+)\]")
_TITAN_FP8 = re.compile(r"Swapped to (?:Float8|MX)\w*Linear|Float8 (?:\w+ )*training active")
_RANK_OF = re.compile(r"\[rank-\d+/(\d+)\]")
_DEVICE = re.compile(r"\b[A-Z]+ capacity: (.+?) with [\d.]+ ?GiB")
_PROGRESS_BAR = re.compile(r"\d+%\|.*?\| *\d+/\d+ \[.*(?:s/it|it/s)")

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # escape sequences of a terminal


def strip_colours(line: str) -> str:
    return _COLOUR.sub("", line)


@dataclass(frozen=True)
class Step:
    """The printed metrics of one step, under this project's names."""

    number: int
    metrics: Mapping[str, float]
    start: int = 0  # how often the program had been restarted before


@dataclass
class LogReader:
    """Reads a log line by line. After a restart the attributes are those of the new start."""

    kind: str = ""  # the program that wrote the log, known once it has printed a step
    reported_config: dict[str, Scalar] = field(default_factory=dict)  # the configuration that the program reports
    mesh: dict[str, int] = field(default_factory=dict)  # the degrees of the device mesh that torchtitan built
    # the most memory that any rank has reported outside the lines of steps
    memory: dict[str, float] = field(default_factory=dict)
    device: str = ""
    model: str = ""  # such as llama3_8b
    dtype: str = ""
    unnumbered_steps: int = 0  # lines with the time of a step that belong to no numbered step
    has_progress_bar: bool = False  # it has a progress bar, whose times are means since the start
    _start: int = 0
    _last: int = -1
    _second_last: int = -1
    _last_time: datetime | None = None
    _section: str = ""
    _section_indent: int = 0
    _pending: dict[str, float] = field(default_factory=dict)

    def feed(self, line: str) -> Step | None:
        """Parse one line and return the step that it reports. A step that several ranks print is returned once."""
        line = strip_colours(line[:LONGEST_LINE]).rstrip()
        if "iteration" in line and (match := _ITERATION.search(line)):
            number = int(match[1])
            if global_step := _GLOBAL_STEP.search(line):
                number = int(global_step[1])
            elif epoch := _EPOCH.search(line):  # of NeMo: the iteration begins again from 0 to the printed last
                number += int(epoch[1]) * (int(match[2]) + 1)
            return self._make_step(number, self._read_pairs(line), line)
        if "step:" in line and (match := _TITAN_STEP.search(line)):
            self.kind = "torchtitan"
            printed = {name: _parse_number(text) for name, text in _TITAN_METRIC.findall(line[match.start() :])}
            return self._make_step(int(match[1]), _rename_metrics(printed), line)
        if match := _BRIDGE.search(line):
            self.unnumbered_steps += 1
            self._pending = {"step_time_s": _parse_number(match[1]), "tflops_per_gpu": _parse_number(match[2])}
        elif "%|" in line and _PROGRESS_BAR.search(line):
            self.has_progress_bar = True
        elif "memory (" in line:
            for name, value in _split_pairs(line).items():
                if name in MEMORY:
                    ours, factor = MEMORY[name]
                    self.memory[ours] = max(factor * value, self.memory.get(ours, 0.0))
        elif len(line) <= LONGEST_ENTRY:
            self._read_configuration(line)
        return None

    def _read_pairs(self, line: str) -> dict[str, float]:
        """Return the metrics of a line of `name: value |` pairs."""
        if "Training epoch" in line:
            self.kind = "NeMo"
        elif self._pending:
            self.kind = "Megatron-Bridge"
            self.unnumbered_steps -= 1
        elif match := _RANK_OF.search(line):
            self.kind = "Primus"
            self.reported_config.setdefault("gpus", int(match[1]))
        elif not self.kind:
            self.kind = "Primus" if re.search(r"\(ms\): [\d.]+/|tokens per GPU", line) else "Megatron-LM"
        metrics = self._pending | _rename_metrics(_split_pairs(line))
        self._pending = {}
        return metrics

    def _make_step(self, number: int, metrics: dict[str, float], line: str) -> Step | None:
        """Return the step, with its time from the lines' timestamps if it is not printed; None for a known step."""
        timestamp = _parse_timestamp(line)
        if number < self._second_last:  # ranks are at most one printed step apart: the program was restarted
            self._begin_start()
        elif number <= self._last:
            return None
        if "step_time_s" not in metrics and timestamp and self._last_time and timestamp > self._last_time:
            metrics["step_time_s"] = (timestamp - self._last_time).total_seconds() / (number - self._last)
        self._second_last, self._last, self._last_time = self._last, number, timestamp or self._last_time
        if "sequence_length" in metrics:
            self.reported_config["sequence_length"] = int(metrics["sequence_length"])
        return Step(number, self.memory | metrics, self._start)

    def _begin_start(self) -> None:
        self._start += 1
        self._last = self._second_last = -1
        self._last_time = None
        self.memory = {}

    def _read_configuration(self, line: str) -> None:
        """Store a configuration entry or the device, if the line reports one."""
        if match := _JSON_ENTRY.match(line):
            self._read_json_entry(len(match[1]), match[2], match[3])
        elif (match := ARGUMENT.search(line)) and "[config.py:" not in line:  # DeepSpeed's world size is another one
            # Megatron trains in `bf16` or `fp16`, and in fp8 beside one of them.
            name, text = match[1], match[2]
            if name in ("bf16", "fp16") and text == "True":
                self._store_dtype(name)
            elif name == "fp8" and text not in ("None", "False"):
                self._store_dtype("fp8")
            elif name in CONFIG:
                self._store(CONFIG[name], _parse_scalar(text))
        elif match := WORLD_SIZE.search(line):
            self._store("gpus", int(match[1]))
        elif match := TITAN_MESH.search(line):
            self._store_mesh({name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", match[1])})
        elif match := _TITAN_OLD_MESH.search(line):
            self._store_mesh(dict(zip(re.findall(r"\w+", match[1]), map(int, match[2].split(",")), strict=False)))
        elif match := _DEVICE.search(line):
            self.device = match[1]
        elif _TITAN_FP8.search(line):
            self._store_dtype("fp8")
        elif "Running with config" in line:
            self._section = ""

    def _read_json_entry(self, indent: int, name: str, text: str) -> None:
        """Store an entry of torchtitan's configuration: two levels of JSON, indented by two spaces each."""
        if text == "{":
            if not self._section or indent <= self._section_indent:
                self._section, self._section_indent = name, indent
        elif self._section and indent == self._section_indent + 2:
            key = f"{self._section}.{name}"
            value = _parse_scalar(text)
            if key == "model.name":
                self.model = str(value)
            elif key == "model.flavor":
                self.model = re.sub(r"[^a-z0-9.]+", "_", f"{self.model}_{value}".lower())
            elif key == "training.mixed_precision_param":
                self._store_dtype(DTYPES.get(str(value), str(value)))
            elif key in CONFIG:
                self._store(CONFIG[key], value)

    def _store(self, name: str, value: Scalar) -> None:
        self._begin_configuration()
        if value not in (None, -1):  # -1: the program chooses the value
            self.reported_config[name] = value

    def _store_dtype(self, dtype: str) -> None:
        self._begin_configuration()
        if self.dtype != "fp8":
            self.dtype = dtype

    def _begin_configuration(self) -> None:
        """Forget the configuration of an earlier start: a program reports its configuration before its steps."""
        if self._last >= 0:
            self._begin_start()
            self.reported_config, self.mesh, self.dtype = {}, {}, ""

    def _store_mesh(self, degrees: Mapping[str, int]) -> None:
        """Store the degrees, the number of GPUs, and the batch where the program chooses it.

        Expert parallelism takes its ranks from the others. torchtitan of 2024 calls the one data parallel degree `dp`.
        """
        mesh = {name: degrees.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        mesh["dp_shard"] *= degrees.get("dp", 1)
        self._store("gpus", math.prod(mesh.values()))
        self.mesh = mesh
        micro_batch = self.reported_config.get("micro_batch")
        if isinstance(micro_batch, int):
            ranks = mesh["dp_replicate"] * mesh["dp_shard"]
            self.reported_config.setdefault("global_batch", micro_batch * ranks)


def _split_pairs(line: str) -> dict[str, float]:
    """Return the numbers of a line of `name: value |` pairs."""
    pairs = (part.rpartition(":") for part in line.split("|"))
    numbers = ((name.strip(), re.match(rf"\s*({_VALUE})", text)) for name, _, text in pairs)
    return {name: _parse_number(number[1]) for name, number in numbers if number}


def _rename_metrics(printed: Mapping[str, float]) -> dict[str, float]:
    """Return the known metrics under this project's names, in its units. Only a loss may be no finite number."""
    known = ((*METRICS[name], value) for name, value in printed.items() if name in METRICS)
    return {ours: factor * value for ours, factor, value in known if math.isfinite(value) or ours == "loss"}


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
