"""What the formats of files share: a rendered file, the answer of a reader, the refusal of what a trainer lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from workloads.api.errors import UserInputError
from workloads.layouts.job import Job, TrainingLayout
from workloads.models.model import Model

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class RenderedFile:
    """A file for a trainer.

    Attributes:
        name: of the file, as the command expects it.
        text: of the file.
        command: what a user runs where the file lies, on each node.
        notes: what a user has to know before that, such as a path that has to be set.
    """

    name: str
    text: str
    command: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileReading:
    """What a trainer's file or the configuration in its log says.

    Attributes:
        trainer: the planner's key of the program.
        model: None where the file does not name all sizes.
        notes: settings that a job has no field for.
    """

    trainer: str
    layout: TrainingLayout
    sequence_length: int
    model: Model | None = None
    precision: str = "bf16"
    state: str = "fp32"
    compiled: bool = False
    document_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def job(self) -> Job:
        """Return the job in its canonical form.

        Raises:
            UserInputError: the file does not name the model's sizes.
        """
        if self.model is None:
            raise UserInputError(f"the configuration of {self.trainer} does not name all sizes of the model")
        job = Job(self.model, self.layout, self.sequence_length, self.trainer, self.precision)
        job = replace(job, compiled=self.compiled, document_tokens=self.document_tokens)
        return canonical_job(replace(job, state=self.state))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Support:
    """What a trainer's file can express.

    Attributes:
        trainer: its name in messages.
        values: the supported values of fields of a job or its layout.
        rules: each returns why a job cannot be written, or nothing.
    """

    trainer: str
    values: Mapping[str, tuple[object, ...]]
    rules: tuple[Callable[[Job], str], ...] = ()

    def check(self, job: Job) -> None:
        """Check that the file can express the whole job.

        Raises:
            UserInputError: it cannot; the message names the field and the trainer.
        """
        if reason := next(self._find_reasons(job), None):
            raise UserInputError(f"{self.trainer}: {reason}")

    def _find_reasons(self, job: Job) -> Iterator[str]:
        for name, allowed in self.values.items():
            value = getattr(job.layout if hasattr(job.layout, name) else job, name)
            if value not in allowed:
                yield f"{name}={_show(value)} cannot be written. Supported: {', '.join(map(_show, allowed))}"
        yield from (reason for rule in self.rules if (reason := rule(job)))


def canonical_job(job: Job) -> Job:
    """Return the job with fields that have no effect at one value, so that equal runs are equal jobs."""
    model = job.model
    if model.positions != "learned":
        model = replace(model, max_positions=0)
    if model.experts and not model.dense_layers:
        model = replace(model, intermediate_size=0)
    return replace(job, model=model, layout=canonical_layout(job.layout, model.layers))


def canonical_layout(layout: TrainingLayout, layers: int | None = None) -> TrainingLayout:
    """Return the layout with fields that have no effect at their defaults."""
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
    if layout.checkpointing == "none" or layout.checkpointed_layers == layers:
        changes["checkpointed_layers"] = None
    return replace(layout, **changes)  # type: ignore[arg-type]


def check_batch(job: Job, gpus: int) -> None:
    """Check that the degrees use all GPUs and that the batch divides.

    Raises:
        UserInputError: they do not.
    """
    layout = job.layout
    if layout.gpus != gpus:
        raise UserInputError(f"gpus={gpus}: the degrees of the layout multiply to {layout.gpus}")
    if layout.global_batch % (layout.micro_batch * layout.dp):
        product = f"micro_batch {layout.micro_batch} x data parallel {layout.dp}"
        raise UserInputError(f"global_batch={layout.global_batch} is not a multiple of {product}")


def nodes_of(gpus: int) -> tuple[int, int]:
    """Return the number of nodes and of GPUs on each: 8 on a node where that divides, else the most that does."""
    per_node = math.gcd(gpus, GPUS_PER_NODE) if gpus > GPUS_PER_NODE else gpus
    return gpus // per_node, per_node


def torchrun(gpus: int) -> list[str]:
    """Return the launcher's words for so many GPUs; on several nodes the shell gives the rank and the address."""
    nodes, per_node = nodes_of(gpus)
    words = ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"]
    if nodes > 1:
        words += ["--node-rank=$NODE_RANK", "--master-addr=$MASTER_ADDR", "--master-port=${MASTER_PORT:-29500}"]
    return words


def shell_script(words: list[str], comment: str, environment: Mapping[str, str] | None = None) -> str:
    """Return a shell script that runs a command, with one word a line behind the first."""
    exports = "".join(f"export {name}={value}\n" for name, value in (environment or {}).items())
    return f"#!/bin/sh\n# {comment}\n{exports}exec " + " \\\n    ".join(words) + "\n"


def data_parallel_size(gpus: int | None, degrees: Mapping[str, int]) -> int:
    """Return the data parallel degree of so many GPUs.

    Raises:
        UserInputError: their number is not known, or the degrees do not divide it.
    """
    product = math.prod(degrees.values())
    if gpus is None:
        raise UserInputError("the file does not say on how many GPUs it runs: pass their number (gpus=)")
    if gpus % product:
        named = " x ".join(f"{name} {degree}" for name, degree in degrees.items())
        raise UserInputError(f"gpus={gpus} is not a multiple of {named}")
    return gpus // product


def _show(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
