"""The files that layouts are written to, by trainer, and the one reader of all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from workloads.api.errors import UserInputError, suggest
from workloads.formats import logged, megatron, megatron_bridge, own, primus, torchtitan, torchtitan_reading
from workloads.formats.rendering import FileReading, RenderedFile, canonical_job, check_batch
from workloads.formats.torchtitan_rules import canonical_state
from workloads.layouts.job import Job

COMPILING = ("own", "torchtitan")  # trainers with a switch for torch.compile


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        render: takes a canonical job and the number of GPUs.
        recognises: returns whether a text has this format.
        read: takes a text, and the number of GPUs where the text does not say it.
    """

    render: Callable[[Job, int], RenderedFile]
    recognises: Callable[[str], bool]
    read: Callable[[str, int | None], FileReading]


# By the planner's key of the trainer.
FORMATS = {
    "own": Format(own.render, own.recognises, own.read),
    "torchtitan": Format(torchtitan.render, torchtitan_reading.recognises, torchtitan_reading.read),
    "megatron": Format(megatron.render, megatron.recognises, megatron.read),
    "nemo": Format(megatron_bridge.render, megatron_bridge.recognises, megatron_bridge.read),
    "primus": Format(primus.render, primus.recognises, primus.read),
}


def render(job: Job, gpus: int, trainer: str | None = None) -> RenderedFile:
    """Return the file with which a trainer runs a job on so many GPUs.

    Args:
        trainer: whose file it is; the job's trainer if None. `own` gives this project's command for the job's trainer.

    Raises:
        UserInputError: there is no such format, the layout does not fit the GPUs or the batch, or the trainer cannot
            express it; the message names the field and the trainer.
    """
    trainer = job.trainer if trainer is None else trainer
    if trainer not in FORMATS:
        raise UserInputError(f"trainer={trainer}: no file can be written for it. {suggest(trainer, FORMATS)}")
    check_batch(job, gpus)
    if job.layout.layers_per_stage is not None:
        raise UserInputError(f"{trainer}: layers_per_stage cannot be written. Supported: evenly divided layers")
    return FORMATS[trainer].render(canonical(job, job.trainer if trainer == "own" else trainer), gpus)


def canonical(job: Job, trainer: str) -> Job:
    """Return the job as a trainer runs it, with fields that have no effect there at one value."""
    job = canonical_job(replace(job, trainer=trainer, compiled=job.compiled and trainer in COMPILING))
    return canonical_state(job) if trainer == "torchtitan" else job


def read_layout(text: str, gpus: int | None = None) -> FileReading:
    """Return what a trainer's file, or the configuration in its log, says of its layout.

    Args:
        gpus: on which it runs, where the text does not say it.

    Raises:
        UserInputError: no format is recognised, or the text has a value that no job has.
    """
    for file_format in FORMATS.values():
        if file_format.recognises(text):
            return file_format.read(text, gpus)
    if logged.recognises(text):
        return logged.read(text, gpus)
    raise UserInputError(f"neither a file nor a log of a known trainer. Known: {', '.join(FORMATS)}")
