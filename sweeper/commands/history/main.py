"""Keep reference results in a file, and compare later runs with them.

    python -m sweeper history append
    python -m sweeper history
    python -m sweeper history tuesday tuesday-2 junit=track.xml
    python -m sweeper history plot

The file is performance.json by default, or file=FILE. Commit this small JSON file to your repository. SWEEP is the name
of a sweep in the MLflow store, by default the last sweep. Several sweeps of the same work count as repeated runs.

`compare` compares these runs with the file's runs of the same work and hardware. Exit codes: 0 for faster or not
slower, 1 for slower, 2 for nothing to compare or invalid input, 3 for inconclusive (prints the number of runs needed).

`append` adds these runs to the file and creates the file if necessary.

`list` prints the current level and the run-to-run variance of each kind of work and device in the file.

`plot` draws the history and marks version and driver changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sweeper.cli.command import StoreRequest, Subcommand, Verbs, output_path, switch, words, writing
from workloads.api.errors import UserInputError
from workloads.suggestions import nearest, suggest

if TYPE_CHECKING:
    from sweeper.commands.history.new_runs import NewRun


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """The file to read.

    Attributes:
        file: file of reference results.
    """

    file: str = "performance.json"

    @property
    def path(self) -> Path:
        return Path(self.file)


@dataclass(frozen=True, kw_only=True)
class RunsRequest(FileRequest, StoreRequest):
    """Runs, and the file to compare them with or add them to.

    Attributes:
        threshold: tolerated loss; at least 90% of losses 1.5 times as large are detected.
        between_runs: standard deviation between identical runs, assumed until 12 runs exist to estimate it.
    """

    sweeps: list[str] = field(default_factory=list, metadata=words("SWEEP"))
    threshold: float = 0.02
    between_runs: float = 0.02


@dataclass(frozen=True, kw_only=True)
class CompareRequest(RunsRequest):
    """Runs to compare with the runs in the file.

    Attributes:
        junit: path of a JUnit file to write the comparison to.
        markdown: path of a Markdown file to write the comparison to.
    """

    junit: str | None = None
    markdown: str | None = None


@dataclass(frozen=True, kw_only=True)
class AppendRequest(RunsRequest):
    """Runs to add to the file.

    Attributes:
        new_level: start a new level, the reference for later runs, after an intended change in speed.
    """

    new_level: bool = switch()


@dataclass(frozen=True, kw_only=True)
class PlotRequest(FileRequest):
    """The page to write.

    Attributes:
        out: path of the HTML page; by default sweeps/FILE.html.
    """

    out: str | None = None


def read_runs(request: RunsRequest) -> list[NewRun]:
    from sweeper.commands.history import new_runs
    from sweeper.results import mlflow_results  # imports pandas (0.5 s): only after argument checks

    try:
        return new_runs.read_runs(mlflow_results.read(request.open_uri()), request.sweeps)
    except UserInputError as error:
        close = [name for name in request.sweeps if nearest(name, VERBS)]
        raise UserInputError(f"{error} {suggest(close[0], VERBS)}" if close else str(error)) from error


def compare_runs(request: CompareRequest) -> int:
    """Print the comparison and write the files for a CI pipeline. Return the exit code of the worst verdict."""
    from sweeper.commands.history import new_runs, output, reference_file
    from sweeper.results.comparison import describe_comparison
    from sweeper.results.runs import EXIT_CODES, Gate

    gate = Gate(request.threshold, request.between_runs)
    known = reference_file.read(request.path)
    runs = read_runs(request)
    works = new_runs.compare(known, runs, gate)
    text, verdict = describe_comparison(works, gate)
    if verdict is None:
        raise UserInputError(f"file={request.path}: {runs[0].run.sweep}: {works[0].detail}")
    note = f"At a threshold of {gate.threshold:.3g}, against the runs of {request.path.name}."
    print(text)
    if request.markdown:
        _write(request.markdown, output.build_markdown(works, note), "markdown")
    if request.junit:
        _write(request.junit, output.build_junit(works), "junit")
    return EXIT_CODES[verdict]


def append_runs(request: AppendRequest) -> int:
    """Add the runs to the file and print the number of runs at each level."""
    from sweeper.commands.history import new_runs, reference_file
    from sweeper.common.format import count
    from sweeper.results.runs import Gate

    gate = Gate(request.threshold, request.between_runs)
    known = reference_file.read(request.path) if request.path.exists() else reference_file.History()
    runs = read_runs(request)
    longer = new_runs.append(known, runs, gate, new_level=request.new_level)
    reference_file.write(request.path, longer)
    for new in runs:
        series = longer.find(new.identity)
        total = count(len(series.level) if series else 0, "run")
        print(f"{new.run.sweep}: {new.run.value:g} {new.identity.unit} on {new.identity.device}, {total} at its level")
    print(request.path)
    return 0


def show_history(request: FileRequest) -> int:
    """Print the current levels in the file."""
    from sweeper.commands.history import output, reference_file
    from sweeper.pages.terminal import draw, open_console

    table = output.build_table(reference_file.read(request.path))
    console = open_console()
    console.print(draw(table.heading, table.rows, output.MIN_COLUMNS, console.width))
    return 0


def draw_history(request: PlotRequest) -> int:
    """Draw the history in the file on a page, and print the page's path."""
    from sweeper.commands.history import picture, reference_file

    path = output_path(request.out, ".", f"{request.path.stem}.html")
    if path.suffix != ".html":
        raise UserInputError(f"out={path}: must end in .html")
    known, file = reference_file.read(request.path), f"file={request.path}"
    if not known.series:
        raise UserInputError(f"{file}: the history is empty: `python -m sweeper history append` adds a run")
    _write(str(path), picture.build_page(known, request.path.name), "out")
    print(path)
    return 0


def _write(path: str, text: str, key: str) -> None:
    with writing(key, Path(path)):
        Path(path).write_text(text)


VERBS: Verbs = {
    "compare": (CompareRequest, compare_runs),
    "append": (AppendRequest, append_runs),
    "list": (FileRequest, show_history),
    "plot": (PlotRequest, draw_history),
}
COMMAND = Subcommand("history", __doc__, VERBS, default="compare")
main = COMMAND.main
