"""What is here, on every node, and what of it is wrong.

    python -m sweeper.doctor [--address HOST:PORT] [--dir DIR] [--uri URI] [--insecure] [--quick]

Looks at every node's versions, memory and GPUs, at the stores, and runs a matrix product on each GPU and a sum over all
of them (--quick: does not). Each finding says what to do. Exit code 1 where there is one that spoils results.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from sweeper.cli.parser import CommandParser
from sweeper.common import metrics
from sweeper.common.errors import UserInputError
from sweeper.common.trials import TrialRecord, TrialResult, TrialStatus
from sweeper.config.hardware import FOREIGN_USE_GIB, Node, Target, describe_inventory, hardware_of, select_target
from sweeper.config.schema import Hardware
from sweeper.execution import cluster, gang_pool
from sweeper.execution.gang_launcher import GangResources, GangSpec
from sweeper.search.study import Trial
from sweeper.tracking.mlflow_store import check_uri
from sweeper.ui import per_gpu
from workloads.api.node_state import read_node_state

LEAST_SHARED_GIB, LEAST_FREE_GIB, LEAST_DISK_GIB = 2.0, 8.0, 5.0
SLOW = 0.95  # of the median GPU's rate
PRODUCT = {"m": 8192, "n": 8192, "k": 8192, "dtype": "bf16", "repeats": 50}
PRODUCT_OF_A_CPU = {"m": 512, "n": 512, "k": 512, "dtype": "fp32", "repeats": 20}


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. spoils: whether results are wrong or slow for it."""

    where: str
    what: str
    do: str
    spoils: bool = True


def main() -> None:
    words = CommandParser("sweeper.doctor", __doc__)
    words.add_argument("--address")
    words.add_argument("--dir", default=".")
    words.add_argument("--uri")
    words.add_argument("--insecure", action="store_true")
    words.add_argument("--quick", action="store_true")
    words.run(lambda said: examine(said.address, said.dir, said.uri, insecure=said.insecure, quick=said.quick))


def examine(address: str | None, folder: str, uri: str | None, *, insecure: bool, quick: bool) -> int:
    """Print what there is and what is wrong; the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    nodes = cluster.discover_nodes(address, insecure)
    console.print(f"cluster  {len(nodes)} node{'s' if len(nodes) > 1 else ''}: {describe_inventory(nodes)}")
    healths = [_health(node, folder) for node in nodes]
    findings = [*of_nodes(healths), *of_stores(uri)]
    if not quick:
        kinds: dict[str, Hardware] = {hardware_of(node).name: hardware_of(node) for node in nodes if node.gpus}
        for hardware in kinds.values() or [Hardware(name="cpu", kind="cpu")]:
            findings += _exercise(select_target(hardware, nodes, 1), console)
    cluster.stop()
    for finding in findings:
        sign = "!" if finding.spoils else "-"
        console.print(f"{sign} {finding.where}: {finding.what}\n  {finding.do}", markup=False)
    console.print("nothing found" if not findings else f"{len(findings)} found")
    return int(any(finding.spoils for finding in findings))


def _health(node: Node, folder: str) -> dict[str, Any]:
    if node.id is None:
        return read_node_state(folder)
    there = NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)
    found: dict[str, Any] = ray.get(
        ray.remote(read_node_state).options(num_cpus=0, scheduling_strategy=there).remote(folder)
    )
    return found


# ── what is wrong with it ──


def of_nodes(healths: list[dict[str, Any]]) -> Iterator[Finding]:
    """What each node lacks, and where nodes differ from one another."""
    for each in healths:
        node = str(each["node"])
        if each["shared_gib"] < LEAST_SHARED_GIB:
            yield Finding(
                node,
                f"/dev/shm has {each['shared_gib']:.1f} GiB, NCCL and data loaders want more",
                "docker run --shm-size=16g, or an emptyDir of medium Memory at /dev/shm",
            )
        if each["free_gib"] < LEAST_FREE_GIB:
            yield Finding(node, f"{each['free_gib']:.1f} GiB of memory are free", "see what else runs there", False)
        if each["disk_gib"] < LEAST_DISK_GIB:
            yield Finding(node, f"{each['disk_gib']:.1f} GiB of disk are free", "make room, or another --dir", False)
        for gpu in each["gpus"]:
            yield from of_gpu(f"{node} GPU {gpu['number']}", gpu)
    names = sorted({name for each in healths for name in each["versions"]})
    for name in names:
        yield from _differing(name, {str(each["node"]): each["versions"].get(name, "") for each in healths})
    drivers = {str(each["node"]): each["gpus"][0]["driver"] for each in healths if each["gpus"]}
    yield from _differing("the driver", drivers)
    models = {str(each["node"]): f"{len(each['gpus'])} x {each['gpus'][0]['name']}" for each in healths if each["gpus"]}
    yield from _differing("the GPUs", models, spoils=False)


def of_gpu(where: str, gpu: dict[str, Any]) -> Iterator[Finding]:
    if not gpu["answers"]:
        yield Finding(where, "does not answer the driver", "see dmesg for its Xid; reset it or restart the node")
        return
    if gpu.get("used_gib", 0.0) > FOREIGN_USE_GIB:
        yield Finding(where, f"{gpu['used_gib']:.1f} GiB of it are in use", "nvidia-smi shows by whom")
    if gpu.get("power_limit_w", 0) < gpu.get("power_default_w", 0):
        yield Finding(
            where,
            f"its power is limited to {gpu['power_limit_w']:.0f} W of {gpu['power_default_w']:.0f} W",
            f"nvidia-smi -i {gpu['number']} -pl {gpu['power_default_w']:.0f}, or know that it is so",
        )
    if gpu.get("clock_limit_mhz", 0) < gpu.get("clock_default_mhz", 0):
        yield Finding(
            where,
            f"its clock is limited to {gpu['clock_limit_mhz']} MHz of {gpu['clock_default_mhz']} MHz",
            f"nvidia-smi -i {gpu['number']} -rac, or know that it is so",
        )
    if errors := gpu.get("uncorrected_errors", 0):
        yield Finding(where, f"{errors} memory errors could not be corrected", "take it out of service")


def _differing(what: str, by_node: dict[str, str], *, spoils: bool = True) -> Iterator[Finding]:
    """One finding where nodes do not agree, naming those that are in the minority."""
    counts = Counter(by_node.values())
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    others = ", ".join(f"{node} {value or 'none'}" for node, value in by_node.items() if value != usual)
    yield Finding("nodes", f"{what} is {usual or 'none'} on most, but {others}", "make them the same", spoils)


def of_stores(uri: str | None) -> Iterator[Finding]:
    if uri is None:
        return
    try:
        check_uri(uri)
    except UserInputError as error:
        yield Finding("store", str(error), "start it, or say another --uri")


# ── trying it ──


def _exercise(target: Target, console: Console) -> list[Finding]:
    """A product on every device at once, and a sum over all of them."""
    gpu = target.hardware.kind == "gpu"
    size = target.devices if gpu else min(2, target.devices)
    with Path("/dev/null").open("w") as nowhere, redirect_stdout(nowhere):  # Ray prints what befalls workers
        cluster.start(target)
    findings = []
    product = _trial(target, "matmul", PRODUCT if gpu else PRODUCT_OF_A_CPU, size)
    if product.status is TrialStatus.COMPLETE:
        console.print(f"product  {_said_rates(product)}")
        findings += list(_slow(product))
    else:
        findings.append(_failed("the matrix product", product))
    if size > 1:
        total = _trial(target, "allreduce", {"mib": 256 if gpu else 4}, size)
        if total.status is TrialStatus.COMPLETE:
            rate = total.measurements[0].metrics["bus_gb_s"]
            console.print(f"sum      over {size} ranks: {rate:,.3g} GB/s each way and device")
        else:
            findings.append(_failed(f"the sum over {size} ranks", total))
    return findings


def _trial(target: Target, workload: str, parameters: dict[str, Any], size: int) -> TrialResult:
    spec = GangSpec(workload, parameters, settings=None, resources=GangResources(size), timeout_s=300)
    pool = gang_pool.GangPool(target, spec, count=1)
    try:
        submitted, by = False, time.monotonic() + 360
        while time.monotonic() < by:
            if not submitted and pool.capacity() > 0:
                pool.submit(Trial(0, {}))
                submitted = True
            for _, outcome in pool.wait(0.25):
                return outcome
        return TrialResult(TrialStatus.TIMED_OUT, 0.0, 0.0, "no worker started within 6 minutes")
    except cluster.ClusterError as error:
        return TrialResult(TrialStatus.FAILED, 0.0, 0.0, str(error))
    finally:
        pool.close()


def _failed(what: str, outcome: TrialResult) -> Finding:
    do = outcome.detail[-300:] or "see Ray's logs"
    return Finding("cluster", f"{what} {outcome.status.value}: {outcome.reason}", do)


def _said_rates(outcome: TrialResult) -> str:
    rates = [metrics.tflops_of(m.flops_per_step, m.step_times_s, m.statistic) for m in outcome.measurements]
    mean, least = statistics.mean(rates), min(rates)
    return f"on each of {len(rates)} at once: {mean:,.4g} TFLOP/s in the mean, {least:,.4g} at least"


def _slow(outcome: TrialResult) -> Iterator[Finding]:
    trial = TrialRecord(
        *(0, {}, outcome.status, "", "", {}, [asdict(each) for each in outcome.measurements], outcome.where),
        *(outcome.started_at_s, outcome.ended_at_s, 0.0),
    )
    for member in per_gpu.per_gpu_results([trial]):
        if member.relative < SLOW:
            yield Finding(
                f"{member.host} {member.gpu}",
                f"its products run at {member.relative:.2f} of the median GPU's rate",
                "compare its clock, power and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE)",
            )


if __name__ == "__main__":
    main()
