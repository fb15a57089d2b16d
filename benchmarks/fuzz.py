"""Run random command lines, configuration files and imports, and report every failure.

    python -m benchmarks.fuzz [--commands 10000] [--imports 2000] [--processes 200] [--seed 0]

Command lines come from a grammar and from mutations of documented commands, a third of them with their own
configuration file. Imports are mutations of the logs in tests/samples and of other tools' files
(`tests/support/fuzzing.py`). All command lines only plan and never start a sweep. Most run through the entry function
in forked batches; the last ones run as separate processes. `tests/support/fuzz_runner.py` defines failures. A failed
case is printed with the seed that reproduces it.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.fuzz_runner import Failure, import_entry, plan_entry, run_cases, run_processes
from tests.support.fuzzing import Case, random_command, random_import

CASES_OF_SEED = 100
PROCESS_SEEDS = 10**6  # the seeds of separate processes differ from the seeds of forked cases


Run = Callable[[list[Case]], list[Failure]]


def run_all(kind: str, generate: Callable[[random.Random], Case], count: int, seed: int, run: Run) -> int:
    """Run `count` cases, a hundred per seed, and print the failures. Returns the number of failures."""
    failed = 0
    for done in range(0, count, CASES_OF_SEED):
        rng = random.Random(seed + done // CASES_OF_SEED)
        cases = [generate(rng) for _ in range(min(CASES_OF_SEED, count - done))]
        for failure in run(cases):
            failed += 1
            words = [word[:200] for word in failure.case.words]
            print(f"seed {seed + done // CASES_OF_SEED}: {words}\n{failure.reason}\n", flush=True)
        print(f"{kind}: {done + len(cases)} cases, {failed} failures", flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commands", type=int, default=10_000)
    parser.add_argument("--imports", type=int, default=2_000)
    parser.add_argument("--processes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ingest, plan = import_entry(), plan_entry()

        def imports(cases: list[Case]) -> list[Failure]:
            return run_cases(ingest, "sweeper ingest", cases, folder)

        def commands(cases: list[Case]) -> list[Failure]:
            return run_cases(plan, "sweeper", cases, folder)

        def processes(cases: list[Case]) -> list[Failure]:
            return run_processes(cases, folder)

        failed = run_all("imports", random_import, args.imports, args.seed, imports)
        failed += run_all("commands", random_command, args.commands, args.seed, commands)
        failed += run_all("processes", random_command, args.processes, args.seed + PROCESS_SEEDS, processes)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
