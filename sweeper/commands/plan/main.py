"""Plan a training on a cluster that you do not have.

    python -m sweeper plan model=llama3_70b hardware=h100 gpus=64 trainer=torchtitan
    python -m sweeper plan model=path/to/config.json hardware=mi300x gpus=64 tp=8 pp=4

Searches every layout that the number of GPUs allows for the fastest that fits, and prints where its time and its memory
go. Fields of the layout that are given (tp=8, pp=4, micro_batch=2, checkpointing=full …) are not searched; then the
plan also says why another layout is faster. Needs neither a GPU nor a cluster. All figures are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sweeper.cli.command import Subcommand, check_output_file, writing
from sweeper.commands.plan.answer import Answer, answer, scale
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import show
from workloads.api.errors import UserInputError, describe_os_error
from workloads.formats.files import render


@dataclass(frozen=True)
class PrintedPlan(PlanRequest):
    """A plan that is printed.

    Attributes:
        out: write the plan as one HTML page with pictures: the step, the memory, the pipeline, scaling.
    """

    out: str | None = None


def run(request: PrintedPlan) -> int:
    """Print the plan. Returns the exit code."""
    if request.out is not None:
        check_output_file("out", Path(request.out))
    planned = answer(request)
    show(planned)
    if request.file is not None:
        _write_file(planned, request.file)
    if request.out is not None:
        write_page(planned, Path(request.out))
    return 0


def write_page(planned: Answer, path: Path) -> None:
    """Write the plan with its pictures as one HTML file.

    Raises:
        UserInputError: the file cannot be written.
    """
    from sweeper.commands.plan.page import (
        build_page,  # only with out=: the searches of the picture of scaling take seconds
    )

    page = build_page(planned, scale(planned.problem))
    with writing("out", path):
        path.write_text(page)
    print(f"page      {path}")


def _write_file(planned: Answer, trainer: str) -> None:
    """Write the fastest layout as a trainer's file into the working directory, and print how to run it.

    Raises:
        UserInputError: the trainer cannot express it, or the file cannot be written.
    """
    problem = planned.problem
    rendered = render(replace(problem.job, layout=planned.best.layout), problem.cluster.gpus, trainer)
    try:
        Path(rendered.name).write_text(rendered.text)
    except OSError as error:
        raise UserInputError(f"file={trainer}: {describe_os_error(error)}") from error
    notes = (f"note      {note}" for note in rendered.notes)
    for line in (f"file      {rendered.name}", f"run it    {rendered.command}", *notes):
        print(line)


COMMAND = Subcommand("plan", __doc__, {"": (PrintedPlan, run)})
main = COMMAND.main
