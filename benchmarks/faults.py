"""Break nodes and the network of a cluster during sweeps, and count what is lost.

    python -m benchmarks.faults [--minutes 10] [--trials 300] [--seed 0] [--kind TEXT]     (as root, on Linux)

The cluster runs on this machine: a head, a driver, two workers with two counted devices each and MLflow's server, each
with its own address, host name, `/tmp` and `/dev/shm` (`tests/support/virtual_network.py`). Without `--kind`, one probe
sweep runs, with trials of two seconds on two devices, under faults of random kinds, nodes and times. With `--kind`, one
sweep runs for each kind with the text in its name ("" matches all), under faults of this kind only. The search ends
after `--trials` trials or `--minutes` minutes, whichever comes first, and the sweep must end within 10 more minutes.
Ray is restarted on nodes where it ended, and so is a command that ended early.

A row gives the faults, the number of command starts, trials with an outcome, and trials among these that exceeded their
limit of 40 s because no answer arrived. It also gives trials without an outcome (lost) or with several (doubled), ranks
that ran to completion more than once because their result did not arrive, the longest time between the ends of two
trials, trial processes that outlived the sweep by a minute, and runs that the store still marks as running.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.support.cluster_faults import FAULTS, World, draw_faults
from tests.support.faulty_sweep import FaultySweep
from tests.support.virtual_network import missing_reason

TRIAL_S = 2.0
PAUSE_S = (5.0, 20.0)  # between faults
BOUND_S = 600.0  # after the search, for trials in flight, a restart of Ray and the report
COLUMNS = ["fault", "faults", "starts", "trials", "timed out", "lost", "doubled", "ranks run twice", "longest stall"]
COLUMNS += ["processes left", "runs left", "took"]


def print_row(name: str, kind: str, world: World, folder: Path, args: argparse.Namespace) -> None:
    """Run one sweep under faults of the kinds whose names contain `kind`, and print its row."""
    folder.mkdir()
    sweep = FaultySweep(world, folder, args.trials, TRIAL_S, args.minutes)
    rng = random.Random(args.seed)
    try:
        outcome = sweep.run(draw_faults(rng, kind), rng, PAUSE_S, 60 * args.minutes + BOUND_S)
    except AssertionError as error:
        print(f"| {name} | failed: {str(error).splitlines()[0]} |", flush=True)
        return
    finally:
        print(f"{name}, seed {args.seed}", *sweep.applied, sep="\n  ", file=sys.stderr, flush=True)
    cells = [outcome.faults, outcome.starts, outcome.trials, outcome.timed_out]
    cells += [outcome.lost, outcome.doubled, outcome.repeated]
    times = [f"{outcome.longest_stall_s:.0f} s", outcome.left_over, outcome.running, f"{outcome.duration_s:.0f} s"]
    print("|", " | ".join(map(str, [name, *cells, *times])), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the search, and of the faults")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", metavar="TEXT", help="a sweep for each fault whose name contains this")
    args = parser.parse_args()
    if reason := missing_reason():
        sys.exit(reason)
    kinds = {"drawn at random": ""} if args.kind is None else {name: name for name in FAULTS if args.kind in name}
    if not kinds:
        parser.error(f"--kind {args.kind}: no fault has this in its name; the names are {', '.join(FAULTS)}")
    print("|", " | ".join(COLUMNS), "|\n|---" + "|---:" * (len(COLUMNS) - 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            for number, (name, kind) in enumerate(kinds.items()):
                print_row(name, kind, world, Path(folder, f"sweep{number}"), args)
        finally:
            world.close()


if __name__ == "__main__":
    main()
