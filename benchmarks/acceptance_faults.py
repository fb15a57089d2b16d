"""Whether `sweeper accept` fails the device that another process uses, and names the cause.

    python -m benchmarks.acceptance_faults products [--gpu 1] [--keep FOLDER]
    python -m benchmarks.acceptance_faults copies [--gpu 1]
    python -m benchmarks.acceptance_faults cores

Another process multiplies matrices or copies between host and GPU without a pause while `sweeper accept` runs; `cores`
holds every core of a machine and compares with a run without it. Prints the verdict and a table of the results in
Markdown. The exit code is 0 if the fault is found on its device alone, with its cause.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAULTS = ("products", "copies", "cores")
SIZE = 16384  # of the products: three matrices of 512 MiB
COPIED_MIB = 2048
QUEUED = 8  # calls in advance, so that the GPU never waits
TEXTS = {"products": "another process", "copies": "another process", "cores": "other processes"}


def disturb(fault: str, gpu: int) -> None:
    """Load a GPU without end, or one core."""
    if fault == "cores":
        print("loading", flush=True)
    while fault == "cores":
        pass
    import torch

    with torch.cuda.device(gpu):
        shape = (SIZE, SIZE) if fault == "products" else (COPIED_MIB << 19,)
        a, b, c = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        host = torch.empty_like(a, device="cpu", pin_memory=fault == "copies")
        back = torch.cuda.Stream()
        print("loading", flush=True)
        while True:
            for _ in range(QUEUED):
                if fault == "products":
                    torch.mm(a, b, out=c)
                    continue
                a.copy_(host, non_blocking=True)
                with torch.cuda.stream(back):
                    host.copy_(b, non_blocking=True)
            torch.cuda.synchronize()


@contextmanager
def disturbed(fault: str, gpu: int) -> Iterator[None]:
    """Keep the fault until the block ends."""
    command = [sys.executable, "-m", "benchmarks.acceptance_faults", fault, "--gpu", str(gpu), "--disturb"]
    count = os.cpu_count() or 1 if fault == "cores" else 1
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout
            if not process.stdout.readline():
                raise SystemExit("the other process does not start")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_accept(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command, show its output, and return its record."""
    subprocess.run([sys.executable, "-m", "sweeper", "accept", "profile=quick", f"dir={folder}", *arguments])
    record: dict[str, Any] = json.loads(max(folder.glob("acceptance/*/accept.json")).read_text())
    return record


def tabulate(record: dict[str, Any]) -> Iterator[str]:
    """Yield a row of Markdown for each result."""
    yield "| test | part | rate | passes from | verdict | cause |\n|---|---|---|---|---|---|"
    for row in record["results"]:
        rate, limit = (f"{row[name]:,.4g}" if row[name] else "" for name in ("value", "limit"))
        cause = row["cause"] or row["problem"]
        yield f"| {row['test']} | {row['part']} | {rate} {row['unit']} | {limit} | {row['verdict']} | {cause} |"


def is_found(record: dict[str, Any], fault: str, gpu: int) -> bool:
    """Return whether the verdict is on the disturbed device alone, and each of its failures has the cause."""
    failed = [row for row in record["results"] if row["verdict"] in ("fail", "inconclusive")]
    named = [TEXTS[fault] in f"{row['cause']} {row['problem']}" for row in failed]
    if fault == "cores":  # takes the time of later tests too
        return any(named)
    devices = {row["part"].rpartition(" GPU ")[2] for row in failed if row["scope"] == "device"}
    return record["verdict"] == "fail" and devices == {str(gpu)} and all(named)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--gpu", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the files of the run with the fault")
    parser.add_argument("--disturb", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.disturb:
        disturb(options.fault, options.gpu)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        arguments = []
        if options.fault == "cores":
            run_accept(Path(folder, "before"), "hardware=cpu")
            arguments = ["hardware=cpu", f"baseline={max(Path(folder).glob('before/acceptance/*/accept.json'))}"]
        with disturbed(options.fault, options.gpu):
            record = run_accept(options.keep or Path(folder, "disturbed"), *arguments)
    found = is_found(record, options.fault, options.gpu)
    print(f"\n{record['devices']} x {record['model']}, {record['date']}, {time.monotonic() - started_s:.0f} s")
    print(f"{options.fault}: {'found' if found else 'NOT found'}: {record['sentence']}\n")
    print("\n".join(tabulate(record)))
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
