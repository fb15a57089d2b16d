"""Measure the memory that Ray's head uses for waiting work, with nodes selected by 1,000 ids, one id, or type.

    python benchmarks/head_memory.py [--actors 400] [--groups 100] [--result benchmarks/results/head_memory.md]

Starts Ray on this machine without any node that matches, so all submitted work waits. Each row is the growth of the
control store's process in a separate run, divided by the number of waiting actors or placement groups (of eight bundles
on different nodes).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group

from sweeper.execution.cluster import init_ray
from sweeper.execution.gang_launcher import select_nodes
from sweeper.execution.ray_internals import without_unused_processes

REPOSITORY = Path(__file__).resolve().parent.parent
NODES = [f"{number:056x}" for number in range(1000)]
BUNDLES = 8
SETTLE_S = 12.0  # until Ray has tried to place everything


def build_selectors() -> dict[str, dict[str, str]]:
    labels = {"ray.io/accelerator-type": "H200"}
    entries: list[dict[str, Any]] = [{"NodeID": node, "Alive": True, "Labels": labels} for node in NODES]
    return {
        "one id": select_nodes(NODES[:1], entries),
        "1,000 ids": {"ray.io/node-id": f"in({','.join(NODES)})"},
        "type": select_nodes(NODES, entries),
        "type without ten": select_nodes(NODES[10:], entries),
    }


class Actor:
    """An actor that never starts."""


def submit(kind: str, selector: Mapping[str, str]) -> Any:
    if kind == "actor":
        return ray.remote(Actor).options(num_cpus=1, label_selector=selector).remote()
    return placement_group(
        [{"CPU": 1}] * BUNDLES, bundle_label_selector=[dict(selector)] * BUNDLES, strategy="STRICT_SPREAD"
    )


def head_process() -> Path:
    """Return the folder in /proc of the control store that this process started."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (folder / "stat").read_text().split()[1:4:2] == ["(gcs_server)", str(os.getpid())]:
            return folder
    raise RuntimeError("Ray has started no gcs_server as a child of this process")


def resident_mib(process: Path) -> float:
    return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(kind: str, name: str, count: int) -> dict[str, Any]:
    """Return the growth of the head's memory in MiB per waiting item, over `count` items."""
    selector = build_selectors()[name]
    with without_unused_processes():
        init_ray(address="local", num_cpus=2, object_store_memory=100 * 2**20)
    head = head_process()
    time.sleep(3)
    before_mib = resident_mib(head)
    waiting = [submit(kind, selector) for _ in range(count)]
    time.sleep(SETTLE_S)
    mib = (resident_mib(head) - before_mib) / len(waiting)
    return {"kind": kind, "selector": name, "characters": sum(map(len, selector.values())), "mib": mib}


def measure_in_process(kind: str, name: str, count: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", kind, name, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def render(actors: list[dict[str, Any]], groups: list[dict[str, Any]], args: argparse.Namespace) -> str:
    lines = [
        "# Memory of Ray's head by selector",
        "",
        "`python benchmarks/head_memory.py`. One run for each value.",
        "",
    ]
    lines += [
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ray {ray.__version__}."
    ]
    lines += [f"{args.actors} waiting actors; {args.groups} waiting placement groups of {BUNDLES} bundles.", ""]
    lines += ["| nodes selected by | characters | MiB an actor | MiB a group |", "| --- | ---: | ---: | ---: |"]
    for actor, group in zip(actors, groups, strict=True):
        lines += [f"| {actor['selector']} | {actor['characters']:,} | {actor['mib']:.3f} | {group['mib']:.3f} |"]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=400)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "SELECTOR", "COUNT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        kind, name, count = args.one
        print(json.dumps(measure(kind, name, int(count))))
        return
    names = list(build_selectors())
    actors = [measure_in_process("actor", name, args.actors) for name in names]
    groups = [measure_in_process("group", name, args.groups) for name in names]
    page = render(actors, groups, args)
    print(page)
    if args.result:
        args.result.write_text(page)


if __name__ == "__main__":
    main()
