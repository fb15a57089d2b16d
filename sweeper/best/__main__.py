"""Print what runs the winner of a sweep again, or one of its trials.

    python -m sweeper.best [SWEEP] [--trial N] [--dir DIR]

Without a name: of the last sweep. Standard output has the trial with its figure, our command for it, the software that
it ran with, and the paths of its files; each sweep keeps those of its winner in DIR/sweeps/SWEEP/best:

sweep.sh            our command, with every parameter
workload/best.yaml  the same as a file, which its first lines say how to run
program/            of a trainer or another command: run.sh, which starts it, and its own configuration
torchtitan/, megatron/  of workload=parallel: the layout as a file of these trainers, where they have it
best.json           the figure with its interval, the parameters and the versions

--trial N           of trial N, whose files are written to DIR/sweeps/SWEEP/files/N/run
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sweeper.best.files import FOLDER, LINE, OVERRIDES, RESULT, TrialFiles, build_files
from sweeper.cli.parser import CommandParser
from sweeper.common.errors import UserInputError
from sweeper.folders.stored import StoredSweep, find_sweep, measured_value

VERSIONS = ("torch", "cuda", "hip", "driver", "program")  # of what a measured process reports


def main() -> None:
    """Run the command. The exit code is 2 for invalid input, and where a sweep has no winner."""
    parser = CommandParser("sweeper.best", __doc__)
    parser.add_argument("sweep", nargs="?")
    parser.add_argument("--trial", type=int)
    parser.add_argument("--dir", default=".", type=Path)
    parser.run(run)


def run(args: argparse.Namespace) -> int:
    """Print the trial. Returns the exit code."""
    files = write_trial(find_sweep(args.dir, args.sweep), args.trial)
    print("\n".join(describe(files)))
    return 0


def write_trial(sweep: StoredSweep, number: int | None) -> TrialFiles:
    """Write the files of a trial, or of the winner, and return them.

    Raises:
        UserInputError: there is no such trial, or no trial is complete.
    """
    description = sweep.description
    if description is None:
        raise UserInputError(f"{sweep.name}: an earlier version ran it and kept no sweep.json; run its command again")
    winner = sweep.winner
    if number is None:
        if winner is None:
            raise UserInputError(f"{sweep.name}: no trial is complete; choose one with --trial N")
        files = build_files(description, sweep.read_trial(winner.trial), winner, sweep.folder / FOLDER)
    else:
        record = sweep.read_trial(number)
        has_objective = description.objective in record.metrics
        value = measured_value(record, description.objective) if has_objective else None
        value = winner if winner is not None and winner.trial == number else value
        files = build_files(description, record, value, sweep.folder / "files" / f"{number:04d}" / "run")
    files.write()
    return files


def describe(files: TrialFiles) -> list[str]:
    """Return the lines that are printed."""
    software = {**files.result["software"], **_versions(files.result["process"])}
    return [
        f"# {files.title}",
        files.line,
        "",
        f"software {', '.join(f'{name} {version}' for name, version in software.items())}",
        *(f"file     {files.folder / name}" for name in sorted(files.files, key=_order)),
        *(f"note     {note}" for note in files.notes),
    ]


def _versions(process: dict[str, object]) -> dict[str, object]:
    """Return what the measured process read of its software."""
    return {name: value for name in VERSIONS if (value := process.get(name))}


def _order(name: str) -> tuple[bool, str]:
    return name not in (LINE, OVERRIDES, RESULT), name


if __name__ == "__main__":
    main()
