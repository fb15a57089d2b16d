"""Break the nodes and the network of a cluster under sweeps, and count what is lost.

    python -m benchmarks.faults [--trials 300] [--faults 10] [--seed 0] [--only TEXT]     (as root, on Linux)

The cluster stands on this machine: a head, a driver, two workers with two counted devices each and MLflow's server,
each with its own address, host name, `/tmp` and `/dev/shm` (`tests/support/virtual_network.py`). For each kind of fault
one sweep of the probe runs, whose trials take a second on two devices, with `--faults` faults of that kind at
random times, and then one sweep with all kinds in random order. Where a driver ends before its sweep does, Ray is
started again on the nodes where it has ended, and the same command is started again.

A row gives the faults, how often the command was started, trials with an outcome, those of them that took longer than
their limit of 40 s because no answer arrived, trials without an outcome (lost), with several (doubled), ranks that
ran to their end more than once because their result did not arrive, the longest time between the ends of two trials,
processes of trials that outlived the sweep by a minute, and runs that the store still takes to be running.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.support.cluster_faults import FAULTS, Fault, FaultySweep, World
from tests.support.virtual_network import missing_reason

PAUSE_S = (10.0, 40.0)  # between faults
LIMIT_S = 3600.0
COLUMNS = ["fault", "faults", "starts", "trials", "timed out", "lost", "doubled", "ranks run twice", "longest stall"]
COLUMNS += ["processes left", "runs left", "took"]


def print_row(name: str, world: World, folder: Path, faults: list[Fault], trials: int, rng: random.Random) -> None:
    folder.mkdir()
    try:
        outcome = FaultySweep(world, folder, trials).run(faults, rng, PAUSE_S, LIMIT_S)
    except AssertionError as error:
        print(f"| {name} | failed: {str(error).splitlines()[0]} |", flush=True)
        return
    cells = [
        outcome.faults,
        outcome.starts,
        outcome.trials,
        outcome.timed_out,
        outcome.lost,
        outcome.doubled,
        outcome.repeated,
    ]
    times = [f"{outcome.longest_stall_s:.0f} s", outcome.left_over, outcome.running, f"{outcome.duration_s:.0f} s"]
    print("|", " | ".join(map(str, [name, *cells, *times])), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--faults", type=int, default=10, help="faults in each sweep")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    args = parser.parse_args()
    if reason := missing_reason():
        sys.exit(reason)
    rng = random.Random(args.seed)
    kinds = {name: fault for name, fault in FAULTS.items() if args.only in name}
    print("|", " | ".join(COLUMNS), "|\n|---" + "|---:" * (len(COLUMNS) - 1) + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        try:
            for number, (name, fault) in enumerate(kinds.items()):
                print_row(name, world, Path(folder, f"sweep{number}"), [fault] * args.faults, args.trials, rng)
            drawn = rng.choices(list(kinds.values()), k=args.faults)
            print_row("any of these", world, Path(folder, "sweep"), drawn, args.trials, rng)
        finally:
            world.close()


if __name__ == "__main__":
    main()
