"""The driver's cost as sweeps and clusters grow: up to 100,000 trials on 1,000 simulated nodes of 8 GPUs.

    python -m benchmarks.scale [--trials 100000] [--recorded 10000]

Each part runs in a process of its own, so that its memory is its own: the driver over clusters of several sizes, and
what a sweep uses beside it: samplers, the study with many trials running, what searches find with the sampler for many
trials, the recording process, Ray's `wait` over many replies, and the whole command on a finished sweep.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.scale.components import measure_ray_wait, measure_recording, measure_samplers
from benchmarks.scale.driver import MARKS, drive, resume
from benchmarks.scale.page import NODES, SHAPES, render_tables
from benchmarks.scale.rerun import measure_rerun
from benchmarks.scale.study import STUDIES, measure_asks_and_tells

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def measure_matmul() -> bytes:
    """Return a pickled measurement of a real matrix product, for the simulated workers to reply with."""
    program = "import pickle, sys; from workloads.api.trial import run_trial; from workloads.api.contract import Rank;"
    program += "parameters = dict(m=64, n=64, k=64, dtype='fp32', repeats=30);"
    program += "sys.stdout.buffer.write(pickle.dumps(run_trial('matmul', parameters, Rank())))"
    return subprocess.run([sys.executable, "-c", program], env=environment(), check=True, capture_output=True).stdout


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}


def run_part(name: str, *arguments: object) -> Any:
    """Run one part in a process of its own. Returns its result."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--part", name, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{name} {arguments}\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_all_parts(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the largest sweep beside all other parts, two processes at a time. Stored results are not measured again."""
    results = args.parts or folder
    measured = results / "measured"
    if not measured.exists():
        measured.write_text(measure_matmul().hex())
    commands = {}
    for nodes, gpus in SHAPES:
        trials = args.trials if (nodes, gpus) == (NODES, 1) else min(10_000, args.trials)
        sizes = ["--nodes", str(nodes), "--gpus", str(gpus), "--trials", str(trials)]
        commands[f"drive-{nodes}-{gpus}"] = ["drive", *sizes]
    commands["samplers"] = ["samplers", "--trials", str(args.trials)]
    for sampler, running in STUDIES:
        commands[f"study-{sampler}-{running}"] = ["study", "--sampler", sampler, "--running", str(running)]
    commands["rerun"] = ["rerun", "--trials", str(args.trials)]
    commands["waiting"] = ["waiting"]
    commands["record"] = ["record", "--recorded", str(args.recorded)]

    def measure(name: str) -> Any:
        path = results / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(run_part(*commands[name], "--measured", str(measured))))
        return json.loads(path.read_text().splitlines()[-1])

    largest = f"drive-{NODES}-1"
    with ThreadPoolExecutor(2) as pool:
        largest_result = pool.submit(measure, largest)
        other_results = pool.submit(lambda: {name: measure(name) for name in commands if name != largest})
        return other_results.result() | {largest: largest_result.result()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sampler", default="random", help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, default=MARKS[-1])
    parser.add_argument("--recorded", type=int, default=10_000)
    parser.add_argument(
        "--parts", type=Path, help="folder for the results of parts; those in it are not measured again"
    )
    for name in ("part", "folder", "measured"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("nodes", "gpus", "running"):
        parser.add_argument(f"--{name}", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    pickled_measurement = bytes.fromhex(Path(args.measured).read_text()) if args.measured else b""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        match args.part:
            case None:
                print(render_tables(run_all_parts(args, folder)))
                return
            case "drive":
                result: Any = drive(args.nodes, args.gpus, args.trials, pickled_measurement, folder, args.sampler)
                sizes = ["--nodes", args.nodes, "--gpus", args.gpus, "--trials", args.trials, "--sampler", args.sampler]
                result["resume"] = run_part("resume", "--folder", folder, *sizes)
            case "resume":
                result = resume(args.nodes, args.gpus, args.trials, folder, args.sampler)
            case "study":
                result = measure_asks_and_tells(folder, args.sampler, args.running)
            case "rerun":
                result = measure_rerun(args.trials, folder)
            case "record":
                result = measure_recording(args.recorded, pickled_measurement, folder)
            case "waiting":
                result = measure_ray_wait()
            case "samplers":
                result = measure_samplers(args.trials)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
