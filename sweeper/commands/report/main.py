"""Report results.

    python -m sweeper report
    python -m sweeper report sweep=NAME format=markdown
    python -m sweeper report compare monday tuesday
    python -m sweeper report compare monday

Without a verb, the report lists the sweeps and the best result of each device for each kind of work, with charts. The
results come from the MLflow store in `dir` or at `tracking.uri`. HTML is written to DIR/sweeps/report.html, a single
file that opens offline; a button on each chart saves it as PNG. The other formats go to standard output.

`compare` compares sweep B, by default the latest, with an earlier sweep A on the work that they have in common: point
by point at parameters that both measured, and by best results. Exit codes: 0 for faster or not slower (a loss of 1.5
times the threshold is ruled out), 1 for slower by more than the threshold and run-to-run variance, 2 for nothing to
compare, 3 for inconclusive (prints the number of runs needed). A single run does not show run-to-run variance. With the
assumed between_runs=0.02, a loss of up to 9% is inconclusive, and comparing two equal sweeps usually exits with 3.
`python -m sweeper history` measures the run-to-run variance and compares several runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sweeper.cli import command
from sweeper.metrics.derivation import Prices
from workloads.api.errors import UserInputError

if TYPE_CHECKING:
    from sweeper.results.mlflow_results import Stored


@dataclass(frozen=True)
class ReportTracking(command.Tracking):
    """The store to read.

    Attributes:
        uri: the MLflow store; by default the store in `dir`.
        experiment: MLflow experiment to read; by default all experiments.
    """

    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class ResultsRequest(command.StoreRequest):
    """The results to read."""

    tracking: ReportTracking = field(default_factory=ReportTracking)


@dataclass(frozen=True, kw_only=True)
class ReportRequest(ResultsRequest):
    """The report to write.

    Attributes:
        sweep: sweep to report on; by default all sweeps.
        format: html, markdown, csv or json.
        out: file to write; by default DIR/sweeps/report.html, and standard output for other formats.
        price_per_hour: price of a GPU-hour, to compute the cost of tokens.
        price_per_kwh: price of electricity per kWh, to compute the cost of tokens.
    """

    sweep: str | None = None
    format: Literal["html", "markdown", "csv", "json"] = "html"
    out: str | None = None
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    price_per_kwh: float | None = field(default=None, metadata={"min": 0})


@dataclass(frozen=True, kw_only=True)
class CompareRequest(ResultsRequest):
    """The sweeps to compare, the earlier sweep first.

    Attributes:
        threshold: tolerated loss, as a fraction or in percent.
        between_runs: standard deviation between identical runs, as a fraction or in percent.
    """

    first: str = command.word("A")
    second: str | None = command.word("B", None)
    threshold: float = 0.02
    between_runs: float = 0.02


def read_store(request: ResultsRequest, sweep: str | None = None) -> Stored:
    """Read the request's whole store, or a single sweep."""
    from sweeper.results import mlflow_results  # imports pandas (0.5 s), so only after the argument checks

    return mlflow_results.read(request.open_uri(), request.tracking.experiment, sweep)


def compare_sweeps(request: CompareRequest) -> int:
    """Print the comparison and return the exit code of its verdict. Raises UserInputError if nothing is comparable."""
    from sweeper.results.runs import EXIT_CODES, Gate, Verdict

    gate, first = Gate(request.threshold, request.between_runs), request.first
    stored = read_store(request)
    from sweeper.commands.report import compare
    from sweeper.results import comparison

    second = request.second or compare.find_latest_sweep(stored, first)
    note, works = compare.compare_sweeps(stored, first, second, gate)
    text, verdict = comparison.describe_comparison(works, gate)
    hint = "; `python -m sweeper history` compares several runs" if verdict is Verdict.INCONCLUSIVE else ""
    of_sweep = (stored.trials[stored.trials["tag.sweep"] == name] for name in (first, second))
    points = comparison.describe_pairs(comparison.find_pairs(*of_sweep))
    print("\n".join(filter(None, [note, *points, f"{text}{hint}"])))
    if verdict is None:
        raise UserInputError(f"{first}: {second} has no comparable result")
    return EXIT_CODES[verdict]


def write_report(request: ReportRequest) -> int:
    """Write the report and return the exit code. Raises UserInputError if there is nothing to report."""
    if request.out:
        command.check_output_file("out", Path(request.out))
    given = (request.price_per_hour, request.price_per_kwh)
    prices = None if given == (None, None) else Prices(*given)
    stored = read_store(request, request.sweep)
    from sweeper.commands.report import artifact, fronts, report_tables

    found = fronts.find_fronts(stored)
    path = command.output_path(request.out, request.dir, f"report.{request.format}")
    tables = report_tables.build_tables(stored, prices, [front.table for front in found])
    if not tables:
        raise UserInputError("the store has nothing to report: no sweep, and no imported result with tokens/s")
    is_page = request.format == "html"
    if is_page:
        text = artifact.build_page("sweeper: results", stored, tables, found)
    else:
        text = report_tables.build_text(stored, tables, request.format)
    if not (is_page or request.out):
        print(text)
        return 0
    with command.writing("out", path):
        path.write_text(text if is_page else f"{text}\n")
    print(path)
    return 0


VERBS: command.Verbs = {"": (ReportRequest, write_report), "compare": (CompareRequest, compare_sweeps)}
COMMAND = command.Subcommand("report", __doc__, VERBS)
main = COMMAND.main
