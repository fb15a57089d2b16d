"""Print an answer to the terminal."""

from __future__ import annotations

import textwrap

from rich.console import Console

from sweeper.commands.plan.answer import Answer
from sweeper.commands.plan.text import (
    INDENT,
    comparison_lines,
    differences_table,
    head_lines,
    layouts_table,
    parts_table,
    tail_lines,
)
from sweeper.pages.terminal import draw, terminal_width
from workloads.estimator.bands import find_band


def show(answer: Answer) -> None:
    """Print the answer."""
    error_share = find_band(answer.problem.job).error_share
    console = Console(width=terminal_width(), highlight=False, markup=False, emoji=False)
    _print_lines(console, head_lines(answer))
    console.print(draw(*parts_table(answer.best.estimate, error_share), 3, console.width))
    console.print(draw(*layouts_table(answer, error_share), 5, console.width))
    if answer.faster is not None:
        _print_lines(console, comparison_lines(answer))
        console.print(draw(*differences_table(answer.best, answer.faster, error_share), 4, console.width))
    _print_lines(console, tail_lines(answer))


def _print_lines(console: Console, lines: list[str]) -> None:
    """Print lines; what does not fit into the terminal goes on below, indented like the text after the first word."""
    for line in lines:
        wrapper = textwrap.TextWrapper(console.width, subsequent_indent=INDENT, drop_whitespace=True)
        wrapper.break_long_words = wrapper.break_on_hyphens = False
        indent = INDENT if line.startswith(INDENT) else ""
        wrapper.initial_indent = indent
        console.print("\n".join(wrapper.wrap(line.removeprefix(indent))), soft_wrap=True)
