"""Test whether `sweeper accept` gives no verdict on the device that another process uses, and names the cause.

    python -m benchmarks.acceptance_faults products|copies|memory [--gpu NUMBER] [--keep FOLDER]
    python -m benchmarks.acceptance_faults link|none|numa [--keep FOLDER]
    python -m benchmarks.acceptance_faults cores

While `sweeper accept` runs, another process multiplies matrices without a pause (`products`), copies between host and
GPU without a pause (`copies`), holds all but 8 GiB of a GPU's memory (`memory`), or copies between GPUs 0 and 1 both
ways (`link`). `numa` runs two processes on each core of a GPU's NUMA node. `cores` loads every core and compares with a
run without load. `none` is a healthy run. The default GPU is the last. The exit code is 0 if the fault is found only on
the affected devices, with the right cause, or if the healthy run passes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.verify import list_gpus
from workloads.api.host import parse_numbers

FAULTS = ("none", "products", "copies", "memory", "link", "cores", "numa")
LOADS_CORES = ("cores", "numa")
SIZE = 16384  # of the GEMMs: three matrices of 512 MiB
COPIED_MIB = 2048
LEFT_MIB = 8192  # of a GPU's memory: too little for two buffers of 4 GiB
QUEUED = 8  # calls queued in advance, so that the GPU never waits


def disturb(fault: str, gpu: int) -> None:
    """Load a GPU, its link to another GPU, or one core until killed, or hold most of a GPU's memory."""
    if fault == "numa":
        os.sched_setaffinity(0, list_local_cores(gpu))
    if fault in LOADS_CORES:
        print("loading", flush=True)
    while fault in LOADS_CORES:
        pass
    import torch

    with torch.cuda.device(0 if fault == "link" else gpu):
        held_mib = torch.cuda.mem_get_info()[0] // 2**20 - LEFT_MIB if fault == "memory" else COPIED_MIB
        shape = (SIZE, SIZE) if fault == "products" else (held_mib << 19,)
        a = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        if fault == "memory":
            print("loading", flush=True)
            signal.pause()
        a, b, c = (torch.randn_like(a) for _ in range(3))
        far = a.to("cuda:1") if fault == "link" else a.cpu().pin_memory()
        back = torch.cuda.Stream()
        far_back = torch.cuda.Stream(1) if fault == "link" else back  # else both directions share the default stream
        print("loading", flush=True)
        while True:
            for _ in range(QUEUED):
                if fault == "products":
                    torch.mm(a, b, out=c)
                    continue
                a.copy_(far, non_blocking=True)
                with torch.cuda.stream(back), torch.cuda.stream(far_back):
                    far.copy_(b, non_blocking=True)
            torch.cuda.synchronize()


def list_local_cores(gpu: int) -> set[int]:
    """Return the cores of a GPU's NUMA node that this process may use, or all usable cores if the node is unknown."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader", f"--id={gpu}"]
    address = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().lower()[4:]
    file = Path("/sys/bus/pci/devices", address, "local_cpulist")
    mine = os.sched_getaffinity(0)
    return (parse_numbers(file.read_text()) & mine if file.exists() else mine) or mine


@contextmanager
def disturbed(fault: str, gpu: int) -> Iterator[None]:
    """Keep the fault until the block ends."""
    command = [sys.executable, "-m", "benchmarks.acceptance_faults", fault, "--gpu", str(gpu), "--disturb"]
    counts = {"none": 0, "cores": os.cpu_count() or 1}
    count = 2 * len(list_local_cores(gpu)) if fault == "numa" else counts.get(fault, 1)
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    try:
        if not all(process.stdout and process.stdout.readline() for process in processes):
            raise SystemExit("the other process does not start")
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_accept(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command, show its output, and return its record."""
    subprocess.run([sys.executable, "-m", "sweeper", "accept", "profile=quick", f"dir={folder}", *arguments])
    return dict(json.loads(max(folder.glob("acceptance/*/accept.json")).read_text()))


def is_found(record: dict[str, Any], fault: str, gpu: int) -> bool:
    """Return whether only the disturbed devices have slow tests, which are inconclusive and name the cause."""
    rows = [row for row in record["results"] if row["verdict"] in ("fail", "inconclusive")]
    texts = [f"{row['cause']} {row['problem']}" for row in rows]
    if fault == "numa" and record["verdict"] == "pass":
        return any("processes" in finding["problem"] for finding in record["findings"])
    if fault in LOADS_CORES:  # also slows later tests
        return any("other processes" in text for text in texts)
    if fault == "none":
        return bool(record["verdict"] == "pass")
    places = [finding["location"] for finding in record["findings"] if finding["affects_results"]]
    places += [row["part"] for row in rows if row["scope"] == "device" and row["value"]]
    devices = {place.rpartition(" GPU ")[2] for place in places}
    # If one GPU has no memory, the tests of all GPUs have no result.
    is_named = all("other process" in text or "out of memory" in text for text in texts)
    is_open = record["verdict"] == "inconclusive" and all(row["verdict"] != "fail" for row in rows)
    return is_open and is_named and devices == ({"0", "1"} if fault == "link" else {str(gpu)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("fault", choices=FAULTS)
    parser.add_argument("--gpu", type=int, default=len(list_gpus()) - 1)
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
    print(f"{options.fault}: {'found' if found else 'NOT found'}: {record['sentence']}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
