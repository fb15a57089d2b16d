"""Import other tools' results.

    python -m sweeper ingest PATH… [--device DEVICE] [--dir DIR] [--store URI] [--experiment imported] [--check]

Supported formats: tprimat benchmarks (JSON, both generations), ml_dataflow results (CSV of 19 or 21 columns), and logs
of Megatron-LM, Megatron-DeepSpeed, Primus, Megatron-Bridge, NeMo and torchtitan. A PATH is a file, or a folder whose
files are all tried, with a reason for each that cannot be imported.

Each file becomes an MLflow run with the file attached, and each of its results a child run, in an experiment of their
own. Metrics are derived again from tokens and step times; the tool's own values are stored as claimed_…, and
inconsistencies within a file are reported. Importing the same file again changes nothing.

--device DEVICE  the device of results whose file names none, as in hardware=; else it is searched in the file's name
--check          read and report, and write nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sweeper.cli.parser import CommandParser
from sweeper.commands.ingest import devices, formats
from sweeper.commands.ingest.derive import derive_metrics, find_contradictions
from sweeper.commands.ingest.imported import ImportedResult
from sweeper.common.format import count, format_number, printable
from sweeper.tracking.mlflow_store import check_uri, default_uri
from workloads.api.errors import UserInputError

SHOWN_MESSAGES = 5  # of a file; the report has all of them


def main(words: list[str]) -> None:
    """Run the command. The exit code is 2 if a file that the command names, or every file, cannot be imported."""
    parser = CommandParser("sweeper ingest", __doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--store")
    parser.add_argument("--experiment", default="imported")
    parser.add_argument("--device", default="")
    parser.add_argument("--check", action="store_true")
    parser.run(import_paths, words)


def import_paths(args: argparse.Namespace) -> int:
    """Import each file and print its summary, or why it cannot be imported. Returns the exit code."""
    uri = args.store or default_uri(Path(args.dir))
    if not uri.startswith("sqlite:") and not args.check:
        check_uri(uri, "--store ")  # MLflow would try for minutes
    if args.device:
        devices.check_device(args.device)
    imported, refused, named_refused = 0, 0, 0
    for path in args.paths:
        for file in list_files(path):
            try:
                print(
                    printable(import_file(file, None if args.check else uri, args.experiment, args.device)), flush=True
                )
                imported += 1
            except UserInputError as error:
                refused += 1
                named_refused += file == path
                print(f"refused: {printable(str(error))}", file=sys.stderr if file == path else sys.stdout, flush=True)
    if imported + refused > 1:
        print(
            f"{count(imported + refused, 'file')}: {imported} {'read' if args.check else 'imported'}, {refused} refused"
        )
    if not imported:
        raise UserInputError("no file could be imported")
    return 2 if named_refused else 0


def list_files(path: Path) -> Iterator[Path]:
    """Yield the path, or the files below a folder in order, without hidden ones."""
    if not path.is_dir():
        yield path
        return
    for file in sorted(path.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            yield file


def import_file(path: Path, uri: str | None, experiment: str, device: str = "") -> str:
    """Read the whole file, then write its results to the store at `uri`. Returns a summary, with its contradictions.

    Args:
        uri: None to write nothing.
        device: of the results that name none.

    Raises:
        UserInputError: the file has no supported format, is damaged or has no result. Nothing is written then.
    """
    file_format = formats.detect_format(path)
    results = [devices.add_device(result, path, device) for result in file_format.read(path)]
    if not results:
        raise UserInputError(f"{path}: has no result")
    summary = _summarize(results)
    if uri is not None:
        from sweeper.commands.ingest import write  # MLflow takes seconds to import

        settings = {"format": file_format.name, "device": device}
        summary.append(write.write(uri, experiment, path, settings, results))
    messages = list(_list_messages(results))
    shown = messages if uri is None else messages[:SHOWN_MESSAGES]
    more = len(messages) - len(shown)
    shown += [f"… and {more:,} more: all are in the report and, with --check, here"] if more else []
    return "\n  ".join(["; ".join([f"{path}: {_name_source(file_format, results)}", *summary]), *shown])


def _name_source(file_format: formats.Format, results: Sequence[ImportedResult]) -> str:
    """Return the program that wrote a log, else the format."""
    program = results[0].machine_info.get("program")
    return f"log of {program}" if program else file_format.name


def _summarize(results: Sequence[ImportedResult]) -> list[str]:
    parts = [count(len(results), "result")]
    if len(results) == 1 and (derived := derive_metrics(results[0])):
        rate = f", {format_number(derived['tokens_per_s'])} tokens/s" if "tokens_per_s" in derived else ""
        parts.append(f"{format_number(derived['step_time_ms'])} ms a step{rate}")
    if infeasible := sum(not result.feasible for result in results):
        parts.append(f"{infeasible} of them infeasible")
    if no_rate := sum(result.feasible and not result.tokens_per_step for result in results):
        of_several = f"{no_rate} " if len(results) > 1 else ""
        parts.append(f"{of_several}without tokens/s: the tokens of a step are not known")
    return parts


def _list_messages(results: Sequence[ImportedResult]) -> Iterator[str]:
    """Yield the contradictions of each result, then the notes that results share, once."""
    for result in results:
        for contradiction in find_contradictions(result, derive_metrics(result)):
            yield f"contradiction in {result.name}: {contradiction}"
    for note in dict.fromkeys(note for result in results for note in result.notes):
        yield f"note: {note}"
