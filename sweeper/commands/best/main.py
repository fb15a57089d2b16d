"""Print the command that reruns a sweep's winner or any other trial.

    python -m sweeper best
    python -m sweeper best SWEEP trial=12

SWEEP defaults to the last sweep. The output shows the trial, its result, the command that reruns it, the software
versions and the paths of the written files. The winner's files are in DIR/sweeps/SWEEP/best, and the files of another
trial N are in DIR/sweeps/SWEEP/files/N/run:

    sweep.sh            the sweeper command, with every parameter
    program/            for a trainer or another command: its own configuration, and run.sh to start it
    torchtitan/, megatron/  for workload=parallel: the layout as a file for each trainer that supports the layout
    best.json           the result with its interval, the parameters and the software versions

A sweep with several objectives has no winner. The command then lists the trials on the Pareto front, and trial=N
selects a trial. The files in best/ rerun the trial on the front that is best in the first objective.
"""

from dataclasses import dataclass
from pathlib import Path

from sweeper.cli.command import Subcommand, word
from sweeper.commands.best.files import FOLDER, LINE, RESULT, TrialFiles, build_files
from sweeper.common.format import count
from sweeper.pages.terminal import draw, open_console
from sweeper.pages.trial_tables import front_rows
from sweeper.results.stored import StoredSweep, best_command, find_sweep, front_value, measured_value
from workloads.api.errors import UserInputError


@dataclass(frozen=True, kw_only=True)
class BestRequest:
    """The trial to print.

    Attributes:
        sweep: a sweep in `dir`; by default the last sweep.
        trial: number of a trial; by default the winner.
        dir: results directory.
    """

    sweep: str | None = word("SWEEP", None)
    trial: int | None = None
    dir: str = "."


def run(request: BestRequest) -> int:
    """Print the trial or the Pareto front. The exit code is 2 for invalid input or a sweep without a winner."""
    sweep = find_sweep(Path(request.dir), request.sweep)
    if request.trial is None and (front := sweep.front) is not None:
        console, numbers = open_console(), front.numbers
        console.print(f"# {sweep.name}: front of {count(len(numbers), 'trial')} on {sweep.description.device}")
        console.print(draw(*front_rows(front, sweep.description.criteria.metrics), console.width))
        if not front.certified:
            console.print("not certified: each was measured once; run the sweep's command with finals.top=3")
        if numbers:
            chosen = front.leader.number if front.leader else numbers[0]
            console.print(f"choose one: {best_command(sweep.folder, f'trial={chosen}')}")
        return 0
    files = write_trial(sweep, request.trial)
    process = files.result["process"]
    measured = {name: process.get(name) for name in ("torch", "cuda", "hip", "driver", "program")}
    software = files.result["software"] | {name: version for name, version in measured.items() if version}
    print(f"# {files.title}\n{files.line}\n")
    print(f"software {', '.join(f'{name} {version}' for name, version in software.items())}")
    for name in sorted(files.files, key=lambda name: (name not in (LINE, RESULT), name)):
        print(f"file     {files.folder / name}")
    for note in files.notes:
        print(f"note     {note}")
    return 0


def write_trial(sweep: StoredSweep, number: int | None) -> TrialFiles:
    """Write the files of a trial, by default the winner. Raises UserInputError if the trial does not exist."""
    description, winner, value = sweep.description, sweep.winner, None
    if number is None:
        if winner is None:
            reason = description.criteria.describe_unmet(sweep.records.values()) or "no trial is complete"
            raise UserInputError(f"{sweep.name}: {reason}; choose one with trial=N")
        record, value, folder = sweep.read_trial(winner.trial), winner, sweep.folder / FOLDER
    else:
        record, criteria = sweep.read_trial(number), description.criteria
        folder = sweep.folder / "files" / f"{number:04d}" / "run"
        if criteria.values(record) is not None and sweep.front is not None:
            value = front_value(sweep.front, record, criteria)
        elif criteria.values(record) is not None:
            value = winner if winner and winner.trial == number else measured_value(record, criteria)
    files = build_files(description, record, value, folder)
    files.write()
    return files


COMMAND = Subcommand("best", __doc__, {"": (BestRequest, run)})
main = COMMAND.main
