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

from sweeper.cli.command import Subcommand, check_output_file, output_path, writing
from sweeper.commands.plan.answer import answer, scale
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.text import show, show_file
from workloads.api.errors import UserInputError, describe_os_error
from workloads.formats.files import render


@dataclass(frozen=True)
class PrintedPlan(PlanRequest):
    """A plan that is printed.

    Attributes:
        out: write the plan as one HTML page with pictures: the step, the memory, the pipeline, scaling;
            `file` is written beside it, by default to the folder sweeps/.
    """

    out: str | None = None


def run(request: PrintedPlan) -> int:
    """Print the plan, and write its files. Returns the exit code."""
    path = Path(request.out or "")
    if request.out is not None:
        check_output_file("out", path)
    try:
        planned = answer(request)
    except UserInputError:
        show_file(request)
        raise
    problem = planned.problem
    show(planned)
    if request.file is not None:
        rendered = render(replace(problem.job, layout=planned.best.layout), problem.cluster.gpus, request.file)
        written = path.with_name(rendered.name) if request.out else output_path(None, ".", rendered.name)
        try:
            written.write_text(rendered.text)
        except OSError as error:
            raise UserInputError(f"file={request.file}: {describe_os_error(error)}") from error
        notes = (f"note      {note}" for note in rendered.notes)
        command = rendered.command.replace(rendered.name, str(written))
        print(f"file      {written}", f"run it    {command}", *notes, sep="\n")
    if request.out is not None:
        from sweeper.commands.plan.page import build_page

        page = build_page(planned, scale(problem))  # whose searches take seconds
        with writing("out", path):
            path.write_text(page)
        print(f"page      {path}")
    return 0


COMMAND = Subcommand("plan", __doc__, {"": (PrintedPlan, run)})
main = COMMAND.main
