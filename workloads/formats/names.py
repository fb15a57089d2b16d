"""Shared parts of the trainers' file formats: tables of keys, supported values, rendered files and readings."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from workloads.api.errors import UserInputError
from workloads.api.validation import format_value
from workloads.layouts.layout import LESS_LAYERS, Job, Layout
from workloads.models.model import MODELS, Model
from workloads.suggestions import suggest

Settings = Mapping[str, Any]
Obstacles = Callable[[Job], Iterator[str]]  # yields the reasons why a job cannot be written
GPUS_PER_NODE = 8
ALIKE = 0.93  # of mistyped names at least, by `difflib`; arguments of Megatron-LM (core_v0.16.1) are at most 0.91 alike


@dataclass(frozen=True)
class Unset:
    """A value that the file leaves for the user to set."""

    text: str  # as written in the file
    reason: str

    def __str__(self) -> str:
        return self.text


class FileSettings(Mapping[str, Any]):
    """A file's settings. The mapping records which settings a reader asked for, so that the rest can be listed."""

    def __init__(self, given: Settings, defaults: Settings | None = None, renamed: Settings | None = None) -> None:
        """Store the `given` settings of a file, a program's `defaults`, and the current names of `renamed` settings."""
        renamed = renamed or {}
        self._written = {renamed[name]: name for name in given if name in renamed} | {
            name: name for name in given if name not in renamed
        }
        self._given = {name: given[written] for name, written in self._written.items()}
        self._values = {**(defaults or {}), **self._given}
        self._asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._asked.add(name)
        value = self._values[name]
        if isinstance(value, Unset):
            raise UserInputError(f"{self._written[name]}={value}: {value.reason}")
        return value

    def find(self, name: str) -> Any:
        """Return a setting's value. If the file leaves the value open, return None and do not count it as read."""
        return None if isinstance(self._values.get(name), Unset) else self.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def list_taken(self, fields: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
        """Return the job field and the value of each setting that a reader asked for, keyed by the file's names."""
        return {
            self._written[name]: (fields.get(name, ""), value)
            for name, value in self._given.items()
            if name in self._asked and value is not None
        }

    def list_left(self) -> tuple[str, ...]:
        """Return the names, as in the file, of settings that have a value but that no reader asked for."""
        return tuple(
            self._written[name]
            for name, value in self._given.items()
            if name not in self._asked and value not in (None, [], {})
        )


@dataclass(frozen=True)
class Name:
    """A key of a trainer's configuration."""

    key: str  # the trainer's name, prefixed with its sections
    field: str = ""  # the field of a job, layout or model with the same meaning; empty if there is none
    default: Any = None  # the trainer's value if a file omits the key
    values: Mapping[Any, Any] | None = None  # maps our values to the trainer's values, if they differ
    write: Any = None  # a value, or a function of the job, to write instead of the field's value
    optional: bool = False  # the key is omitted if its value is the trainer's default
    # Whether to write the key for a job; None means for every job. A value of None is never written.
    when: Callable[[Job], bool] | None = None


def write_names(job: Job, names: Iterable[Name]) -> dict[str, Any]:
    """Return the trainer's settings for a job, in table order."""
    settings = {}
    for name in names:
        if name.when is not None and not name.when(job):
            continue
        if name.write is None:
            value = field_of(job, name.field)
            value = name.values.get(value, value) if name.values else value
        else:
            value = name.write(job) if callable(name.write) else name.write
        if value is not None and not (name.optional and value == name.default):
            settings[name.key] = value
    return settings


def fields_of_keys(names: Iterable[Name], others: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the field of each key in a table and in `others`. `others` maps a field to keys with different values."""
    named = {name.key: name.field for name in names if name.field}
    return named | {key: field for field, keys in others.items() for key in keys}


def read_table(
    rows: Iterable[Mapping[str, Any]],
    written: Mapping[str, Callable[[Job], Any]],
    conditions: Mapping[str, Callable[[Job], bool]],
) -> tuple[Name, ...]:
    """Return the keys in a TOML table, with the functions from `written` and `conditions` that they refer to."""
    names = []
    for row in rows:
        when, values = row.get("when"), row.get("values")
        is_met = _has_values(when) if isinstance(when, Mapping) else conditions[when] if when else None
        functions = {"values": values and dict(values), "when": is_met}
        names.append(Name(**{"write": written.get(row["key"]), **row, **functions}))
    return tuple(names)


def _has_values(values: Mapping[str, Sequence[object]]) -> Callable[[Job], bool]:
    return lambda job: all(field_of(job, name) in allowed for name, allowed in values.items())


def read_names(settings: Settings, names: Iterable[Name], fields: Sequence[str]) -> dict[str, Any]:
    """Return field values in their default's type; 0 means the default. Raises UserInputError for an unknown value."""
    read = {}
    for name in names:
        if name.field not in fields:
            continue
        value = settings.get(name.key)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise UserInputError(f"{name.key}={' '.join(map(str, value))}: more than one value")
            value = value[0]
        if value is None or (value == 0 and value is not False):
            value = name.default
        elif name.default is not None:
            try:
                value = _convert(value, name.default)
            except (KeyError, OverflowError, TypeError, ValueError) as error:
                kind = {bool: "true or false", int: "a whole number"}.get(type(name.default), "a number")
                raise UserInputError(f"{name.key}={value}: not {kind}") from error
        if name.values:
            ours = {_plain(theirs): our for our, theirs in name.values.items()}
            if _plain(value) not in ours:
                close = suggest(str(value), map(format_value, name.values.values()))
                raise UserInputError(f"{name.key}={value}: not known here. {close}")
            value = ours[_plain(value)]
        read[name.field] = value
    return read


def _convert(value: Any, default: Any) -> Any:
    """Convert the value to the type of its default. Raises ValueError, TypeError or KeyError if that fails."""
    if isinstance(default, bool):
        return {"true": True, "false": False, "1": True, "0": False}[str(value).lower()]
    if isinstance(default, int) and (isinstance(value, bool) or float(value) != int(float(value))):
        raise ValueError(value)
    return int(float(value)) if isinstance(default, int) else type(default)(value)


def _plain(value: object) -> str:
    return str(value).lower().replace("_", "")


def field_of(job: Job, name: str) -> Any:
    return next(getattr(part, name) for part in (job, job.layout, job.model) if hasattr(part, name))


@dataclass(frozen=True)
class Support:
    """The values that a trainer's file can express."""

    trainer: str  # the trainer's name in messages
    values: dict[str, Sequence[object]]  # supported values, keyed by the field of a job, layout or model
    obstacles: Sequence[Obstacles] = ()

    def check(self, job: Job) -> None:
        """Raise UserInputError, naming the field and the trainer, if the file cannot express the whole job."""
        self.check_fields(job, self.values)
        for obstacles in self.obstacles:
            for reason in obstacles(job):
                raise UserInputError(f"{self.trainer}: {reason}")

    def check_fields(self, job: Job, names: Iterable[str]) -> None:
        for name, allowed in ((name, self.values[name]) for name in names if name in self.values):
            if (value := field_of(job, name)) not in allowed:
                owner = "the model's " if hasattr(job.model, name) else ""
                supported = ", ".join(map(format_value, allowed))
                raise UserInputError(
                    f"{self.trainer}: {owner}{name}={format_value(value)} cannot be written. Supported: {supported}"
                )


@dataclass(frozen=True)
class RenderedFile:
    """A file that configures or starts a trainer."""

    name: str
    text: str
    command: str  # the command to run in the file's directory, on each node
    notes: tuple[str, ...] = ()  # instructions for the user, such as a path to set


@dataclass(frozen=True)
class FileReading:
    """The job that a trainer's file, or the configuration in its log, describes."""

    trainer: str  # the planner's key for the program
    layout: Layout
    sequence_length: int
    model: Model | None = None  # None if the file does not give all sizes
    precision: str = "bf16"
    state: str = "fp32"
    compiled: bool = False
    document_tokens: int = 0
    notes: tuple[str, ...] = ()  # notes on settings that no job field represents
    others: Mapping[str, Any] = field(default_factory=dict)  # other job fields that the file sets
    sizes: Mapping[str, Any] = field(default_factory=dict)  # model sizes that the file itself sets
    # The settings that were read, keyed by the file's names: the job field (empty if there are several) and the value.
    taken: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    left: tuple[str, ...] = ()  # settings that were not read
    gpus: int | None = None  # the number of GPUs that the file sets, apart from the degrees

    @property
    def job(self) -> Job:
        """Return the job in its canonical form. Raises UserInputError if the file does not give the model's sizes."""
        if self.model is None:
            raise UserInputError(f"the configuration of {self.trainer} does not name all sizes of the model")
        job = Job(self.model, self.layout, self.sequence_length, self.trainer, self.precision)
        job = replace(job, compiled=self.compiled, document_tokens=self.document_tokens, **self.others)
        return canonical_job(replace(job, state=self.state))  # type: ignore[arg-type]


def canonical_job(job: Job) -> Job:
    """Return the job with a fixed value for each field that has no effect, so that equal runs compare equal."""
    model = job.model
    if model.positions != "learned":
        model = replace(model, max_positions=0)
    if model.experts and not model.dense_layers:
        model = replace(model, intermediate_size=0)
    return replace(job, model=model, layout=canonical_layout(job.layout, model.layers))


def canonical_layout(layout: Layout, layers: int | None = None) -> Layout:
    """Return the layout with each field that has no effect set to its default."""
    changes: dict[str, object] = {}
    if layout.sharding == "none":
        changes |= {"dp_replicate": layout.dp, "dp_shard": 1}
    elif layout.dp_shard * layout.cp == 1:
        changes["sharding"] = "none"
    if changes.get("sharding", layout.sharding) in ("none", "zero1", "zero2"):
        changes["reshard_after_forward"] = True
    if layout.tp == 1:
        changes |= {"sequence_parallel": True, "tp_overlap": "none"}
    if layout.cp == 1:
        changes["cp_method"] = "allgather"
    if layout.pp == 1:
        changes |= {"stages_per_rank": 1, "schedule": "1f1b"}
    if layout.pp == 1 or (layout.stages == 2 and layout.less_layers == (1, 1)):
        changes |= dict.fromkeys(LESS_LAYERS, 0)
    elif layers and layers % layout.stages and not (layers + 2) % layout.stages and not any(layout.less_layers):
        changes |= dict.fromkeys(LESS_LAYERS, 1)
    if layout.checkpointing == "none" or layout.checkpointed_layers == layers:
        changes["checkpointed_layers"] = None
    return replace(layout, **changes)  # type: ignore[arg-type]


def flatten(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the settings in one dict, with keys such as `training.steps`."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        settings |= flatten(value, f"{section}{name}.") if isinstance(value, Mapping) else {f"{section}{name}": value}
    return settings


def check_spelling(left: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserInputError if a setting that was not read has nearly the name of a known one."""
    for key in left:
        if (close := get_close_matches(key, known, n=1, cutoff=ALIKE)) and close[0] != key:
            raise UserInputError(f"{key}: not a setting that is known here. Did you mean {close[0]}?")


def parse_scalar(text: str) -> Any:
    """Parse a bool, an integer or null in the syntax of Python, YAML or JSON. Return any other text unchanged."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    return None if text in ("null", "None", "") else text


def find_model(name: str) -> Model | None:
    """Return the model for a name in a trainer's file, such as `llama3.1_8B-fp8.yaml`, or None if it is unknown."""
    name = re.sub(r"[-.]", "_", name.lower().removesuffix(".yaml"))
    name = re.sub(r"(_(fp8|fp4|bf16|mxfp8|base|instruct|v0_\d))+$", "", name)
    return MODELS.get(re.sub(r"^llama_?3(_?[123])?_", "llama3_", name))  # Llama 3.1 to 3.3 have Llama 3's sizes


class IndivisibleGpus(UserInputError):
    """Raised if the product of a file's degrees does not divide the number of GPUs."""

    def __init__(self, message: str, product: int) -> None:
        super().__init__(message)
        self.product = product


def data_parallel_size(gpus: int | None, degrees: Mapping[str, int]) -> int:
    """Return the remaining degree. Raises UserInputError if `gpus` is None, IndivisibleGpus if `degrees` do not fit."""
    product = math.prod(degrees.values())
    if gpus is None:
        raise UserInputError("the file does not say on how many GPUs it runs: pass their number (gpus=)")
    if gpus % product:
        named = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
        raise IndivisibleGpus(f"gpus={gpus} is not a multiple of {named}", product)
    return gpus // product


def nodes_of(gpus: int) -> tuple[int, int]:
    """Return the number of nodes and the number of GPUs per node, which is at most 8."""
    per_node = math.gcd(gpus, GPUS_PER_NODE) if gpus > GPUS_PER_NODE else gpus
    return gpus // per_node, per_node


def torchrun(gpus: int) -> list[str]:
    """Return the launcher's arguments. On several nodes, shell variables give the node rank and master address."""
    nodes, per_node = nodes_of(gpus)
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"]
    if nodes > 1:
        words += ["--node-rank=$NODE_RANK", "--master-addr=$MASTER_ADDR", "--master-port=${MASTER_PORT:-29500}"]
    return words
