"""Write layouts to each trainer's file format, and read all of these formats."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from workloads.api.errors import UserInputError
from workloads.api.validation import check_known
from workloads.formats import megatron, megatron_files, own, printed, torchtitan
from workloads.formats.names import FileReading, RenderedFile, Support, canonical_job, check_spelling
from workloads.layouts.layout import Job, Layout
from workloads.layouts.rules import Site, find_violation
from workloads.layouts.trainers import find_trainer
from workloads.models.model import Model


class Format(NamedTuple):
    render: Callable[[Job, int], RenderedFile]  # takes a canonical job and the number of GPUs
    recognizes: Callable[[str], bool]
    # takes a text, and the number of GPUs and the model in case the text does not give them
    read: Callable[[str, int | None, Model | None], FileReading]


# Keyed by the planner's name for the trainer.
FORMATS = {
    "own": Format(own.render, own.recognizes, own.read),
    "torchtitan": Format(torchtitan.render, torchtitan.recognizes, torchtitan.read),
    "megatron": Format(
        megatron_files.render_script,
        lambda text: megatron_files.ARGUMENT_IN_TEXT.search(text) is not None,
        megatron_files.read_script,
    ),
    "nemo": Format(megatron_files.render_recipe, lambda text: "run_recipe.py" in text, megatron_files.read_recipe),
    "primus": Format(
        megatron_files.render_experiment,
        lambda text: "framework:" in text and megatron_files.find_trainer(text) is not None,
        megatron_files.read_experiment,
    ),
}
SUPPORTS = {"torchtitan": torchtitan.SUPPORT, **megatron_files.SUPPORTS}


def render(job: Job, gpus: int, trainer: str | None = None, model: str = "") -> RenderedFile:
    """Return a file that makes a trainer run the job. The default is the job's trainer; `own` returns our command,
    with the path `model` of a `config.json` if no model of the table has these sizes.

    Raises UserInputError if the format is unknown, or if a rule of the trainer or its file forbids the layout.
    """
    trainer = trainer or job.trainer
    check_known(trainer, FORMATS, f"trainer={trainer}: no file can be written for it")
    job = canonical(job, job.trainer if trainer == "own" else trainer)
    if violation := find_violation(job, Site(gpus, gpus)):
        raise UserInputError(f"{trainer}: {violation.reason}")
    if trainer == "own" and job.trainer != "own":
        raise UserInputError(f"own: no command fixes a whole layout of {job.trainer}. Supported: own")
    _find_support(trainer).check(job)
    return own.render(job, gpus, model) if trainer == "own" else FORMATS[trainer].render(job, gpus)


def _find_support(trainer: str) -> Support:
    return own.own_support() if trainer == "own" else SUPPORTS[trainer]


def find_obstacle(job: Job, given: Mapping[str, Any], trainer: str, model: str = "") -> str:
    """Return why no layout of the job with the `given` fields can be written for a trainer, or "" if some can be."""
    cores = {find_trainer(name).core for name in (job.trainer, trainer)}
    if trainer != job.trainer and cores != {"megatron"}:
        return f"{trainer}: the layouts are those of trainer={job.trainer}: set trainer={trainer}"
    try:
        render(replace(job, layout=Layout(sharding="none")), 1, trainer, model)
        given_job = replace(job, layout=replace(Layout(sharding="none"), **given))
        _find_support(trainer).check_fields(given_job, given)
    except UserInputError as error:
        return str(error)
    return ""


def canonical(job: Job, trainer: str) -> Job:
    """Return the job as the trainer runs it, with a fixed value for each field that has no effect in the trainer."""
    job = canonical_job(replace(job, trainer=trainer, compiled=job.compiled and find_trainer(trainer).compiles))
    if trainer == "torchtitan" and job.state in ("fp32", "amp") and job.precision != "fp32":
        # FSDP keeps fp32 weights; otherwise, autocast casts weights.
        return replace(job, state="fp32" if job.layout.is_sharded else "amp")
    return job


def read_layout(text: str, gpus: int | None = None, model: Model | None = None) -> FileReading:
    """Return the job that a trainer's file or log describes. Raises UserInputError if no format is recognized."""
    for file_format in FORMATS.values():
        if file_format.recognizes(text):
            try:
                reading = file_format.read(text, gpus, model)
            except (ArithmeticError, AttributeError, IndexError, RecursionError, TypeError, ValueError) as error:
                raise UserInputError(f"a value of the file cannot be read: {error}") from error
            known = {"torchtitan": torchtitan.KNOWN, "own": {name.key for name in own.own_names()}}
            check_spelling(reading.left, known.get(reading.trainer, megatron.KNOWN))
            return reading
    if printed.has_configuration(text):
        return printed.read_configuration(text, gpus, model)
    problem = f"neither a file of {', '.join(FORMATS)}, nor a log that prints its settings"
    if text.lstrip().startswith("["):
        try:
            tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            problem = f"as TOML: {error}"
    raise UserInputError(f"no layout found: {problem}")
