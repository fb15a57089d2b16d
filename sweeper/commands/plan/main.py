"""Plan a training run on a cluster that you do not have.

    python -m sweeper plan model=llama3_70b hardware=h100 gpus=64 trainer=torchtitan
    python -m sweeper plan model=path/to/config.json hardware=mi300x gpus=64 tp=8 pp=4

Searches all layouts for the given number of GPUs, finds the fastest layout that fits, and breaks down its time and
memory. Layout fields that you set (tp=8, pp=4, micro_batch=2, checkpointing=full …) are not searched. If another layout
is faster, the plan explains why. The command needs neither a GPU nor a cluster. All values are estimates.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sweeper.cli.command import Subcommand, check_output_file, output_path, writing
from sweeper.commands.plan.answer import NothingFits, answer, find_problem, scale, search
from sweeper.commands.plan.request import PlanRequest
from sweeper.commands.plan.side_by_side import HEADING, SHOWN_COLUMNS, compare_hardware
from sweeper.commands.plan.text import print_lines, show, show_file
from sweeper.pages.terminal import draw, open_console
from workloads.api.errors import UserInputError
from workloads.estimator.search import bound_gib, fills_memory
from workloads.formats.files import render
from workloads.layouts.layout import describe


@dataclass(frozen=True, kw_only=True)
class PrintedPlan(PlanRequest):
    """The plan to print.

    Attributes:
        out: path of an HTML page to write, with charts of the step, the memory, the pipeline and scaling;
            `file` is written to the same folder, by default to sweeps/.
        fits: print only whether a layout fits in memory; exit with code 0 if a layout fits, else 1.
    """

    out: str | None = None
    fits: bool = False


def run(request: PrintedPlan) -> int:
    """Print the plan, write the requested files, and return the exit code."""
    request = request.complete()
    path = Path(request.out or "")
    names = request.hardware.split(",")
    if len({*names}) < len(names):
        raise UserInputError(f"hardware={request.hardware}: names a GPU twice")
    if len(names) > 1 or request.fits:
        for key in ("out", "file"):
            if (name := getattr(request, key)) is not None:
                other = "fits=true" if request.fits else f"several GPUs: choose one, such as hardware={names[0]}"
                raise UserInputError(f"{key}={name}: not possible with {other}")
        if len(names) > 1 and request.fits:
            raise UserInputError(f"hardware={request.hardware}: fits=true is of one GPU, such as hardware={names[0]}")
        if request.fits and request.finds_gpus:
            raise UserInputError("fits=true: needs gpus=; days=, tokens_per_day= and max_cost= search for GPUs")
        if request.fits:
            return print_fit(request)
        console = open_console(soft_wrap=False)
        rows, lines = compare_hardware(request, names, report)
        console.print(draw(HEADING, rows, SHOWN_COLUMNS, console.width))
        print_lines(console, lines)
        return 0
    if request.out is not None:
        check_output_file("out", path)
        if path.suffix not in (".html", ".htm"):
            raise UserInputError(f"out={request.out}: is an HTML page; give it a name that ends with .html")
    try:
        planned = answer(request, report)
    except UserInputError:
        show_file(request)
        raise
    problem = planned.problem
    show(planned)
    if request.file is not None:
        job = replace(problem.job, layout=planned.best.layout)
        rendered = render(job, problem.cluster.gpus, request.file, request.model)
        written = path.with_name(rendered.name) if request.out else output_path(None, ".", rendered.name)
        with writing("file", written):
            written.write_text(rendered.text)
        notes = (f"note      {note}" for note in rendered.notes)
        command = rendered.command.replace(rendered.name, str(written))
        print(f"file      {written}", f"run it    {command}", *notes, sep="\n")
    if request.out is not None:
        from sweeper.commands.plan.page import build_page

        page = build_page(planned, scale(problem, report))
        with writing("out", path):
            path.write_text(page)
        print(f"page      {path}")
    return 0


def report(text: str) -> None:
    """Print, on a terminal, what takes seconds."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def print_fit(request: PlanRequest) -> int:
    """Print whether a layout fits in memory. Return 0 if a layout fits, else 1."""
    problem, _ = find_problem(request)
    try:
        best = search(problem, keep=1).best[0]
    except NothingFits as error:
        print(f"no        {error}")
        return 1
    memory, cluster = best.estimate.memory, problem.cluster
    most_gib = bound_gib(memory, problem.job, cluster)
    does_fit = most_gib <= cluster.usable_gib
    stalls = ", which it fills: its steps may stall" if does_fit and fills_memory(memory, cluster) else ""
    print(
        f"{'fits' if does_fit else 'no':10}up to {most_gib:.1f} GiB (estimate {memory.needed_gib:.1f}) of "
        f"{cluster.usable_gib:.1f} usable{stalls}: {describe(best.layout)}"
    )
    return 0 if does_fit else 1


COMMAND = Subcommand("plan", __doc__, {"": (PrintedPlan, run)})
main = COMMAND.main
