"""Import other tools' results.

    python -m sweeper.ingest PATH… [--dir DIR] [--store URI] [--experiment imported] [--check]

Understood are benchmarks of tprimat (JSON, both generations), results of ml_dataflow (CSV of 19 or 21 columns), and
logs of Megatron-LM, Primus, Megatron-Bridge, NeMo and torchtitan. Each file becomes a run with the file attached, and
each of its results a run below it, in an experiment of their own. Figures are computed again from tokens and times; the
tool's own stand beside them as claimed_…, and what does not fit together is said. Importing a file again changes
nothing. --check reads and says, and writes nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sweeper.cli.parser import CommandParser
from sweeper.common.errors import UserInputError
from sweeper.ingest import formats
from sweeper.ingest.derive import disagreements, figures
from sweeper.tracking.mlflow_store import check_uri, default_uri

SPEEDS = {"tokens_per_s", "tokens_per_s_per_gpu"}


def main() -> None:
    """The command line. Exit code 2 for a file that cannot be imported; those before it are."""
    words = CommandParser("sweeper.ingest", __doc__)
    words.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    words.add_argument("--dir", default=".")
    words.add_argument("--store")
    words.add_argument("--experiment", default="imported")
    words.add_argument("--check", action="store_true")
    words.run(take_all)


def take_all(said: argparse.Namespace) -> int:
    """A line for each file."""
    uri = said.store or default_uri(Path(said.dir))
    if not uri.startswith("sqlite:") and not said.check:
        check_uri(uri, "--store ")  # MLflow would try for minutes
    for path in said.paths:
        print(take(path, None if said.check else uri, said.experiment))
    return 0


def take(path: Path, uri: str | None, experiment: str) -> str:
    """Read a whole file before any of it is written; what was found in it, in words."""
    kind = formats.recognise(path)
    results = list(kind.read(path))
    if not results:
        raise UserInputError(f"{path}: has no result")
    words = [f"{path}: {kind.name}, {len(results)} result{'s' if len(results) > 1 else ''}"]
    failed = sum(not each.feasible for each in results)
    words += [f"{failed} of them did not work"] if failed else []
    if silent := sum(each.feasible and not own.keys() & SPEEDS for each in results for own in [figures(each)]):
        words.append(f"{silent} without tokens/s, since the file does not say how many a step has: not in the report")
    odd = [words for each in results for words in (*each.contradictions, *disagreements(each, figures(each)))]
    if odd:
        words.append(f"{len(odd)} contradictions, such as: {odd[0]}" if len(odd) > 1 else f"1 contradiction: {odd[0]}")
    if uri is not None:
        from sweeper.ingest import write  # MLflow takes seconds to import

        words.append(write.write(uri, experiment, path, kind.name, results))
    return "; ".join(words)


if __name__ == "__main__":
    main()
