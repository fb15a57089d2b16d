"""Plan a training on a cluster that you do not have.

    python -m sweeper plan model=MODEL hardware=GPU gpus=N [key=value ...]
    python -m sweeper plan model=llama3_70b hardware=h100 gpus=64 trainer=torchtitan
    python -m sweeper plan model=path/to/config.json hardware=mi300x gpus=64 tp=8 pp=4

Searches every layout that the number of GPUs allows for the fastest that fits, and prints where its time and its memory
go. Fields of the layout that are given (tp=8, pp=4, micro_batch=2, checkpointing=full ...) are not searched; then the
plan also says why another layout is faster. Needs neither a GPU nor a cluster. All figures are estimates.

topology=NAME|FILE.yaml  the network; by default nodes of 8 GPUs, with a NIC of 400 Gb/s for each
trainer=NAME             whose rules, memory and efficiency apply: own, torchtitan, megatron, nemo, deepspeed ...
calibration=none|PATH    rates measured by sweeper.commands.calibrate; by default those in ./calibration, if any
global_batch=N           sequences in a step; by default 4 M tokens
tokens_per_day=N         the fewest GPUs that train on so many tokens
layout=FILE              a trainer's file or log, whose layout and batch are given: torchtitan, Megatron-LM, Primus ...
file=TRAINER             write the fastest layout as the file that this trainer runs
--html FILE              the plan as one page with pictures: the step, the memory, the pipeline, scaling
train_tokens=N           days, GPU-hours and, with price_per_hour=P, the cost of a whole training
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from sweeper.cli.output_file import check_output_file, writing
from sweeper.cli.parser import CommandParser
from sweeper.commands.plan.answer import Answer, answer, scale
from sweeper.commands.plan.request import read_request
from sweeper.commands.plan.text import show
from workloads.api.errors import UserInputError, describe_os_error
from workloads.formats.files import render


def main(words: list[str]) -> None:
    """Run the command."""
    parser = CommandParser("sweeper plan", __doc__)
    parser.add_argument("--html", type=Path, metavar="FILE")
    parser.add_argument("words", nargs="+", metavar="key=value")
    parser.run(run, words)


def run(args: argparse.Namespace) -> int:
    """Print the plan. Returns the exit code."""
    if args.html is not None:
        check_output_file("--html", args.html)
    request = read_request(args.words)
    planned = answer(request)
    show(planned)
    if request.file is not None:
        _write_file(planned, request.file)
    if args.html is not None:
        write_page(planned, args.html)
    return 0


def write_page(planned: Answer, path: Path) -> None:
    """Write the plan with its pictures as one HTML file.

    Raises:
        UserInputError: the file cannot be written.
    """
    from sweeper.commands.plan.page import (
        build_page,  # only with --html: the searches of the picture of scaling take seconds
    )

    page = build_page(planned, scale(planned.problem))
    with writing("--html", path):
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
