"""Parse trainers' logs line by line: step numbers, metrics, and the configuration that the program reports.

The formats are the rows of `workloads.formats.log_formats`. Lines may start with a launcher's prefix. The first row
that matches a line determines the log's trainer, and lines of other trainers are ignored. If a program prints both the
step's value and the mean so far (`7443.9/7491.0`), the step's value is used. Values not in the log stay unknown.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from workloads.api.contract import Scalar
from workloads.formats import megatron, torchtitan
from workloads.formats.log_formats import FORMATS, GIB, NUMBER, RATES, SUFFIXES, LogFormat, Metrics
from workloads.formats.names import parse_scalar
from workloads.tables import read_toml

LONGEST_LINE = 65536  # characters; step lines are shorter, and the rest of a longer line is ignored
LONGEST_ENTRY = 1024  # characters; longer lines are not parsed as configuration entries

STEP_SIZES = ("global_batch", "sequence_length", "batch_tokens")  # a step's sizes, which are not results

# Tables of names that programs print outside step lines.
_NAMES = read_toml(__file__, "log_names.toml")
MEMORY: dict[str, tuple[str, float]] = {name: (ours, size / GIB) for name, (ours, size) in _NAMES["memory"].items()}
OF_RANKS = {"peak_device_gib", "peak_memory_gib", "device_memory_share"}  # printed in step lines by each rank

# Sizes and degrees, keyed by the programs' names. torchtitan's names start with the section.
REPORTED = ("tp", "pp", "cp", "dp_replicate", "dp_shard", "micro_batch", "global_batch", "sequence_length")
CONFIG: dict[str, str] = {
    name.key: name.field for name in (*megatron.NAMES, *torchtitan.NAMES) if name.field in REPORTED
} | _NAMES["config"]
# Values in DeepSpeed's `[config.py:…]` with the usual meaning. DeepSpeed's world size is the data-parallel size.
DEEPSPEED_OWN = ("train_batch_size", "train_micro_batch_size_per_gpu")
DTYPES: dict[str, str] = {name: dtype for dtype, names in _NAMES["dtypes"].items() for name in names}
_LINES = {name: re.compile(pattern.replace("NUMBER", NUMBER)) for name, pattern in _NAMES["lines"].items()}
_TIMES = [(re.compile(pattern), form) for pattern, form in _NAMES["times"]]
# After more dots, GPT-NeoX prints whether the value is the default.
ARGUMENT = re.compile(r"(?:^|\s)(\w+) \.{3,} (\S.*?)(?:\.+(?:updated|default)?)?\s*$")
_CONFIG_LINES = [(text, re.compile(pattern), names.split()) for text, pattern, names in _NAMES["config_lines"]]
WORLD_SIZE = re.compile(r"\busing world size: (\d+)")
TITAN_MESH = re.compile(r"device mesh with parallelism: (.+)$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\[\d\d?(?:;\d{1,3})*m(?=\w+:)")  # the second without the escape character


def strip_colors(line: str) -> str:
    return _COLOUR.sub("", line)


def find_source(line: str) -> str:
    """Return the host and the rank in a line's prefix, as far as they are named."""
    matches = filter(None, (_LINES[name].match(line) for name in ("host", "rank")))
    names = [next(filter(None, match.groups())) for match in matches]
    return " ".join(names)


@dataclass(frozen=True)
class Step:
    """The printed metrics of one step, under this project's names."""

    number: int
    metrics: Mapping[str, float]
    start: int = 0  # the number of restarts before this step
    resolution_s: float = 0.0  # the unit to which the step's time is rounded
    is_by_clock: bool = False  # the step's time is the difference between two lines' timestamps


@dataclass
class LogReader:
    """Reads a log line by line. After the program restarts, the attributes describe the latest start."""

    format: LogFormat | None = None  # the format of the log's trainer, known after its first step
    kind: str = ""  # the trainer's program
    reported_config: dict[str, Scalar] = field(default_factory=dict)  # the configuration that the program reports
    mesh: dict[str, int] = field(default_factory=dict)  # the degrees of the device mesh that torchtitan built
    # The highest memory that any rank has reported outside step lines.
    memory: dict[str, float] = field(default_factory=dict)
    device: str = ""
    model: str = ""  # the model's name, such as llama3_8b
    dtype: str = ""
    unnumbered_steps: int = 0  # number of lines with a step time but without a step number
    has_progress_bar: bool = False  # a progress bar was printed; the bar's times are means since the start
    _start: int = 0
    _last: int = -1
    _second_last: int = -1
    _clock: tuple[int, datetime] | None = None  # the last step whose timestamp is the latest so far, and the timestamp
    # The metrics of the last two steps, whose memory and its share become the maximum over the ranks that print them.
    _metrics_of_steps: dict[int, dict[str, float]] = field(default_factory=dict)
    _last_of_sources: dict[str, int] = field(default_factory=dict)  # the last step of each rank or host
    _total_tokens: tuple[int, float] | None = None  # the first step with a total token count, and the count
    _block: tuple[LogFormat, int, str, dict[str, str]] | None = None  # a step with metrics on separate lines
    _section: str = ""
    _section_indent: int = 0
    _pending: dict[str, str] = field(default_factory=dict)

    def feed(self, line: str) -> Step | None:
        """Parse one line and return the step that the line completes. A step printed by several ranks is returned once.
        A step whose metrics span several lines is complete at the first line after them."""
        line = strip_colors(line[:LONGEST_LINE]).rstrip()
        step = None
        if self._block:
            row, number, head, texts = self._block
            if row.body and row.body.search(line):
                texts |= _read_texts(row, line)
                return None
            self._block, step = None, self._make_step(row, number, texts, head)
        for row in FORMATS:
            if row.hint in line and (match := row.step.search(line)) and self._select(row):
                number = self._read_number(match, line)
                if row.body:
                    self._block = (row, number, line, {})
                    return step
                texts, self._pending = self._pending | _read_texts(row, line[match.start(1) :], line), {}
                return self._make_step(row, number, texts, line)
        if match := _LINES["bridge"].search(line):
            self.unnumbered_steps += 1
            self._pending = {"train_step_timing in s": match[1], "tflops": match[2]}
        elif "%|" in line and _LINES["progress_bar"].search(line):
            self.has_progress_bar = True
        elif "memory (" in line:
            for name, text in _read_texts(FORMATS[0], line).items():
                if name in MEMORY and math.isfinite(value := parse_number(text)[0]):
                    ours, factor = MEMORY[name]
                    self.memory[ours] = max(factor * value, self.memory.get(ours, 0.0))
        elif (validation := _LINES["validation"].search(line)) and (timestamp := _parse_timestamp(line)):
            self._clock = (int(validation[1] or validation[2]), timestamp[0])
        elif len(line) <= LONGEST_ENTRY:
            self._read_configuration(line)
        return step

    def _select(self, row: LogFormat) -> bool:
        """Return whether a step line is from the log's trainer: the program of the first step line, or its family. If a
        trainer runs on DeepSpeed, the steps that DeepSpeed itself prints are ignored."""
        known = self.format
        if known and known.log_family != row.log_family:
            if not known.is_library or row.is_library:
                return False
            self._start = 0
            self._last = self._second_last = -1
            self._clock = None
            known = None
        # A general format does not replace a program's own format, such as Primus's, which runs Megatron-LM.
        if known is None or FORMATS.index(row) < FORMATS.index(known):
            self.format, self.kind = row, row.program
        if self._pending:
            self.kind, self.unnumbered_steps = "Megatron-Bridge", self.unnumbered_steps - 1
        return True

    def _read_number(self, match: re.Match[str], line: str) -> int:
        if rank := _LINES["rank_of"].search(line):
            self.reported_config.setdefault("gpus", int(rank[1]))
        if global_step := _LINES["global_step"].search(line):
            return int(global_step[1])
        if epoch := _LINES["epoch"].search(line):  # in NeMo, each counts iterations from 0 to the printed last number
            return int(match[1]) + int(epoch[1]) * (int(match[2]) + 1)
        return int(match[1])

    def _make_step(self, row: LogFormat, number: int, texts: Mapping[str, str], line: str) -> Step | None:
        # The program has restarted if a rank goes back. Ranks without a prefix are at most one printed step apart.
        source = find_source(line)
        if number < (self._last_of_sources.get(source, -1) if _LINES["rank"].match(line) else self._second_last):
            self._begin_start()
        self._last_of_sources[source] = number
        metrics, resolutions = _rename_metrics(row.metrics, texts)
        if number <= self._last:  # the line of another rank, of a step that was returned before
            known = self._metrics_of_steps.get(number, {})
            known |= {name: max(metrics[name], known[name]) for name in OF_RANKS & metrics.keys() & known.keys()}
            return None
        if row.is_of_interval and "step_time_s" in metrics:
            steps = number - self._last if self._last >= 0 else 1 if number == 1 else 0
            time_s, resolutions["step_time_s"] = metrics.pop("step_time_s"), resolutions["step_time_s"] / (steps or 1)
            metrics |= {"step_time_s": time_s / steps} if steps else {}
        self._derive(number, metrics, resolutions)
        resolution_s = resolutions.get("step_time_s", 0.0)
        is_by_clock = "step_time_s" not in metrics
        if timestamp := _parse_timestamp(line):
            time, tick_s = timestamp
            number_before, before = self._clock or (number, time)
            if is_by_clock and number > number_before and time > before:
                steps = number - number_before
                metrics["step_time_s"] = (time - before).total_seconds() / steps
                resolution_s = 2 * tick_s / steps  # both timestamps are truncated
            if not self._clock or time > before:
                self._clock = (number, time)
        self._second_last, self._last = self._last, number
        if "sequence_length" in metrics:
            self.reported_config["sequence_length"] = int(metrics["sequence_length"])
        metrics = self.memory | metrics
        self._metrics_of_steps = {self._second_last: self._metrics_of_steps.get(self._second_last, {}), number: metrics}
        return Step(number, metrics, self._start, resolution_s, is_by_clock)

    def _derive(self, number: int, metrics: dict[str, float], resolutions: dict[str, float]) -> None:
        rates = {name: metrics[name] for name in RATES if name in metrics}
        if total := rates.get("total_tokens"):
            if self._total_tokens and number > self._total_tokens[0]:
                tokens = (total - self._total_tokens[1]) / (number - self._total_tokens[0])
                if tokens > 1000 * resolutions["total_tokens"]:
                    self.reported_config["batch_tokens"] = round(tokens)
                    if "step_time_s" not in metrics and metrics.get("tokens_per_s", 0.0) > 0:
                        metrics["step_time_s"] = tokens / metrics["tokens_per_s"]
                        share = resolutions["tokens_per_s"] / metrics["tokens_per_s"]
                        resolutions["step_time_s"] = share * metrics["step_time_s"]
            self._total_tokens = self._total_tokens or (number, total)
        samples_per_s, batches_per_s = rates.get("samples_per_s", 0.0), rates.get("batches_per_s", 0.0)
        batch = metrics.get("global_batch") or self.reported_config.get("global_batch")
        if "step_time_s" not in metrics and isinstance(batch, int | float) and samples_per_s > 0:
            batches_per_s, resolutions["batches_per_s"] = samples_per_s / batch, resolutions["samples_per_s"] / batch
        if "step_time_s" not in metrics and batches_per_s > 0:
            metrics["step_time_s"] = 1 / batches_per_s
            resolutions["step_time_s"] = resolutions["batches_per_s"] / batches_per_s / batches_per_s
        time_s = metrics.get("step_time_s", 0.0)
        # With too few digits, rounding could give a wrong batch.
        error = resolutions.get("step_time_s", 0.0) * samples_per_s + resolutions.get("samples_per_s", 0.0) * time_s
        if samples_per_s and not batch and error < 0.5 and time_s > 0:
            metrics["global_batch"] = float(round(samples_per_s * time_s))
        length = metrics.get("sequence_length") or self.reported_config.get("sequence_length")
        if samples_per_s and isinstance(length, int | float):
            metrics.setdefault("tokens_per_s", samples_per_s * length)
        # nanotron's batch counts tokens if the batch equals tokens per second times step time.
        tokens = metrics.get("tokens_per_s", 0.0) * time_s
        if tokens and metrics.get("global_batch") and abs(tokens / metrics["global_batch"] - 1) < 0.03:
            metrics["batch_tokens"] = metrics.pop("global_batch")

    def _begin_start(self) -> None:
        self._start += 1
        self._last = self._second_last = -1
        self._clock = self._total_tokens = None
        self.memory, self._metrics_of_steps, self._last_of_sources = {}, {}, {}

    def _read_configuration(self, line: str) -> None:
        if match := _LINES["json_entry"].match(line):
            self._read_json_entry(len(match[1]), match[2], match[3])
        elif (match := ARGUMENT.search(line)) and ("[config.py:" not in line or match[1] in DEEPSPEED_OWN):
            # Megatron trains in `bf16` or `fp16`, and fp8 is used in addition to one of them.
            name, text = match[1], match[2]
            if name in ("bf16", "fp16") and text == "True":
                self._store_dtype(name)
            elif name == "fp8" and text not in ("None", "False"):
                self._store_dtype("fp8")
            elif name in CONFIG:
                self._store(CONFIG[name], parse_scalar(text))
        elif match := WORLD_SIZE.search(line):
            self._store("gpus", int(match[1]))
        elif match := TITAN_MESH.search(line):
            self._store_mesh({name: int(degree) for name, degree in re.findall(r"(\w+)=(\d+)", match[1])})
        elif match := _LINES["titan_old_mesh"].search(line):
            self._store_mesh(dict(zip(re.findall(r"\w+", match[1]), map(int, match[2].split(",")), strict=False)))
        elif match := _LINES["device"].search(line):
            self.device = match[1]
        elif _LINES["titan_fp8"].search(line):
            self._store_dtype("fp8")
        elif line_of := next((row for row in _CONFIG_LINES if row[0] in line), None):
            if match := line_of[1].search(line):
                for name, text in zip(line_of[2], match.groups(), strict=True):
                    self._store(name, int(text.replace(",", "")))
        elif "Running with config" in line:
            self._section = ""

    def _read_json_entry(self, indent: int, name: str, text: str) -> None:
        if text == "{":
            if not self._section or indent <= self._section_indent:
                self._section, self._section_indent = name, indent
        elif self._section and indent == self._section_indent + 2:
            key = f"{self._section}.{name}"
            value = parse_scalar(text.strip('"'))
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
        """If steps came first, discard the earlier start's configuration: programs report theirs before their steps."""
        if self._last >= 0:
            self._begin_start()
            self.reported_config, self.mesh, self.dtype = {}, {}, ""

    def _store_mesh(self, degrees: Mapping[str, int]) -> None:
        """Store the degrees, the number of GPUs, and the batch if the program chooses it. Expert-parallel ranks are
        already counted in the other degrees. In 2024, torchtitan had one data-parallel degree, called `dp`."""
        mesh = {name: degrees.get(name, 1) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        mesh["dp_shard"] *= degrees.get("dp", 1)
        self._store("gpus", math.prod(mesh.values()))
        self.mesh = mesh
        micro_batch = self.reported_config.get("micro_batch")
        if isinstance(micro_batch, int):
            ranks = mesh["dp_replicate"] * mesh["dp_shard"]
            self.reported_config.setdefault("global_batch", micro_batch * ranks)


def _read_texts(row: LogFormat, *lines: str) -> dict[str, str]:
    return {match["name"]: match["value"] for line in lines for pair in row.pairs for match in pair.finditer(line)}


def _rename_metrics(known: Metrics, texts: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the known metrics and their resolutions, with our names and units. Only a loss may be nan or infinite."""
    metrics, resolutions = {}, {}
    for name, text in texts.items():
        if name in known:
            ours, factor = known[name]
            value, resolution = parse_number(text)
            if math.isfinite(value) or ours == "loss":
                metrics[ours], resolutions[ours] = factor * value, factor * resolution
    return metrics, resolutions


def parse_number(text: str) -> tuple[float, float]:
    """Return a number such as 1,234.5, 1.2E+01 or 11.4K, and the unit of its last digit."""
    digits = text.removesuffix("FLOPS").replace(",", "")
    suffix = digits[-1:] if digits[-1:] in SUFFIXES else ""
    digits = digits.removesuffix(suffix)
    mantissa, _, exponent = digits.lower().partition("e")
    scale = SUFFIXES[suffix] * 10.0 ** max(-300, min(int(exponent or 0) if exponent.lstrip("+-").isdigit() else 0, 300))
    return float(digits) * SUFFIXES[suffix], scale * 10.0 ** -len(mantissa.partition(".")[2])


def _parse_timestamp(line: str) -> tuple[datetime, float] | None:
    """Return the first timestamp in a line, and its resolution in seconds."""
    for pattern, form in _TIMES:
        if match := pattern.search(line):
            text, _, fraction = match[0].replace(",", ".").replace("T", " ").partition(".")
            try:
                # 2000 is a leap year, so every date exists.
                text, form = (text, form) if "%Y" in form else (f"2000 {text}", f"%Y {form}")
                time = datetime.strptime(text, form)
            except ValueError:
                return None
            return time + timedelta(seconds=float(f"0.{fraction or 0}")), 10.0 ** -len(fraction)
    return None
