"""What the driver costs as sweeps and clusters grow: up to 100,000 trials on 1,000 simulated nodes of 8 GPUs.

    python -m benchmarks.scale [--trials 100000] [--recorded 10000] [--result benchmarks/results/scale.md]

Each part runs in a process of its own, so that its memory is its own: the driver over clusters of several sizes, and
what it takes beside: samplers, the recording process, Ray's waiting for many answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale.beside import record, samplers, waiting
from benchmarks.scale.driver import MARKS, drive, resume
from benchmarks.scale.page import NODES, SHAPES, written

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def measure() -> bytes:
    """A real measurement, to be answered again and again."""
    code = "import pickle, sys; from workloads.api.trial import run_trial; from workloads.api.contract import Rank;"
    code += "words = dict(m=64, n=64, k=64, dtype='fp32', repeats=30);"
    code += "sys.stdout.buffer.write(pickle.dumps(run_trial('matmul', words, Rank())))"
    return subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True).stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def part(name: str, *words: object) -> Any:
    """What one part finds, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--part", name, *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name} {words}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def all_parts(said: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The largest sweep beside all the others: two processes at a time. What is kept already is not measured again."""
    kept = said.parts or folder
    measured = kept / "measured"
    if not measured.exists():
        measured.write_text(measure().hex())
    named = {}
    for nodes, gpus in SHAPES:
        trials = said.trials if (nodes, gpus) == (NODES, 1) else min(10_000, said.trials)
        named[f"drive-{nodes}-{gpus}"] = ["drive", "--nodes", str(nodes), "--gpus", str(gpus), "--trials", str(trials)]
    named |= {"samplers": ["samplers", "--trials", str(said.trials)], "waiting": ["waiting"]}
    named |= {"record": ["record", "--recorded", str(said.recorded)]}

    def found(name: str) -> Any:
        path = kept / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(part(*named[name], "--measured", str(measured))))
        return json.loads(path.read_text().splitlines()[-1])

    largest = f"drive-{NODES}-1"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(found, largest)
        others = pool.submit(lambda: {name: found(name) for name in named if name != largest})
        return others.result() | {largest: first.result()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=MARKS[-1])
    parser.add_argument("--recorded", type=int, default=10_000)
    parser.add_argument("--result", type=Path, default=REPOSITORY / "benchmarks" / "results" / "scale.md")
    parser.add_argument("--parts", type=Path, help="where what a part has found is kept: it is not measured again")
    for name in ("part", "folder", "measured"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("nodes", "gpus"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    said = parser.parse_args()
    measured = bytes.fromhex(Path(said.measured).read_text()) if said.measured else b""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(said.folder or name)
        match said.part:
            case None:
                text = written(all_parts(said, folder), said.trials, said.recorded)
                said.result.write_text(text)
                print(text)
                return
            case "drive":
                found: Any = drive(said.nodes, said.gpus, said.trials, measured, folder)
                sizes = ["--nodes", said.nodes, "--gpus", said.gpus, "--trials", said.trials]
                found["resume"] = part("resume", "--folder", folder, *sizes)
            case "resume":
                found = resume(said.nodes, said.gpus, said.trials, folder)
            case "record":
                found = record(said.recorded, measured, folder)
            case "waiting":
                found = waiting()
            case "samplers":
                found = samplers(said.trials)
        print(json.dumps(found))


if __name__ == "__main__":
    main()
