"""Import other tools' results.

    python -m sweeper.ingest PATH… [--dir DIR] [--store URI] [--experiment imported] [--check]

Supported formats: tprimat benchmarks (JSON, both generations), ml_dataflow results (CSV of 19 or 21 columns), and logs
of Megatron-LM, Primus, Megatron-Bridge, NeMo and torchtitan. Each file becomes an MLflow run with the file attached,
and each of its results a child run, in an experiment of their own. Metrics are derived again from tokens and step
times; the tool's own values are stored as claimed_…, and inconsistencies within a file are reported. Importing the same
file again changes nothing. --check reads and reports, and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sweeper.cli.parser import CommandParser
from sweeper.common.errors import UserInputError
from sweeper.ingest import formats
from sweeper.ingest.derive import derive_metrics, find_disagreements
from sweeper.tracking.mlflow_store import check_uri, default_uri

RATES = {"tokens_per_s", "tokens_per_s_per_gpu"}


def main() -> None:
    """Run the command. The exit code is 2 for a file that cannot be imported; the files before it are imported."""
    parser = CommandParser("sweeper.ingest", __doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--store")
    parser.add_argument("--experiment", default="imported")
    parser.add_argument("--check", action="store_true")
    parser.run(import_files)


def import_files(args: argparse.Namespace) -> int:
    """Import each file and print a line for it."""
    uri = args.store or default_uri(Path(args.dir))
    if not uri.startswith("sqlite:") and not args.check:
        check_uri(uri, "--store ")  # MLflow would try for minutes
    for path in args.paths:
        print(import_file(path, None if args.check else uri, args.experiment))
    return 0


def import_file(path: Path, uri: str | None, experiment: str) -> str:
    """Read the whole file, then write its results to the store at `uri`. Returns a summary of one line.

    Args:
        uri: None to write nothing.

    Raises:
        UserInputError: the file has no supported format, is damaged or has no result. Nothing is written then.
    """
    file_format = formats.detect_format(path)
    results = list(file_format.read(path))
    if not results:
        raise UserInputError(f"{path}: has no result")
    parts = [f"{path}: {file_format.name}, {len(results)} result{'s' if len(results) > 1 else ''}"]
    infeasible = sum(not result.feasible for result in results)
    parts += [f"{infeasible} of them infeasible"] if infeasible else []
    derived = [derive_metrics(result) for result in results]
    if no_rate := sum(
        result.feasible and not metrics.keys() & RATES for result, metrics in zip(results, derived, strict=True)
    ):
        parts.append(f"{no_rate} without tokens/s, because the file has no tokens per step: not in the report")
    problems = [
        problem
        for result, metrics in zip(results, derived, strict=True)
        for problem in (*result.contradictions, *find_disagreements(result, metrics))
    ]
    if problems:
        count = f"{len(problems)} contradictions, such as" if len(problems) > 1 else "1 contradiction"
        parts.append(f"{count}: {problems[0]}")
    if uri is not None:
        from sweeper.ingest import write  # MLflow takes seconds to import

        parts.append(write.write(uri, experiment, path, file_format.name, results))
    return "; ".join(parts)


if __name__ == "__main__":
    main()
