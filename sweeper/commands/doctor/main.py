"""Take an inventory of every node, and diagnose problems.

    python -m sweeper doctor
    python -m sweeper doctor cluster.address=auto dir=/data/sweeps --quick
    python -m sweeper doctor record

Checks every node's versions, memory and GPUs, and the MLflow server at tracking.uri. Runs a GEMM on each GPU and an
all-reduce on each node (skipped with --quick). Prints the hardware catalog's values for the GPUs with their sources,
and each problem and note with a remedy. A problem ("!") makes measurements wrong, slow or impossible. A note ("-") does
not, such as cores that other processes use or little free disk space. The exit code is 1 if there is a problem, else 0.

`record` saves the reports of this machine's drivers, torch, Ray and kernel to FILE (machine.json). Developers can build
a mock of the machine from this file. The only environment variables in the file are those that select the visible
devices. Host names, user names, serial numbers and addresses are masked. Review the file before you send it to anyone.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from sweeper.cli.command import Cluster, Subcommand, Tracking, switch, word
from sweeper.cli.exits import COMPLETE, SOME_FAILED
from sweeper.commands.accept.judge import list_problems
from sweeper.commands.doctor.checks import check_gpu_setup, check_nodes, check_store
from sweeper.common.format import count
from sweeper.config.catalogue import list_figures
from sweeper.config.hardware import Node, hardware_of
from sweeper.config.schema import Hardware
from sweeper.execution import ray_environment
from sweeper.preflight.devices import describe_inventory, select_target
from workloads.api.errors import UserInputError


@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The nodes and the store to diagnose.

    Attributes:
        dir: results directory of sweeps, whose free disk space is checked as well.
        quick: run nothing on the GPUs.
    """

    dir: str = "."
    tracking: Tracking = field(default_factory=Tracking)
    cluster: Cluster = field(default_factory=Cluster)
    quick: bool = switch()


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """The file to write this machine's record to."""

    file: str = word("FILE", "machine.json")
    cluster: Cluster = field(default_factory=Cluster)


def record_machine(request: RecordRequest) -> int:
    """Write the record of this machine and return the exit code."""
    ray_environment.prepare(request.cluster.address, request.cluster.insecure)  # must run before Ray is imported
    from sweeper.commands.doctor import record
    from sweeper.execution import cluster

    nodes: list[Node] | UserInputError
    try:
        nodes = cluster.discover_nodes(request.cluster.address, request.cluster.insecure)
    except UserInputError as error:  # for example if Ray does not detect the GPUs; the record then shows why
        nodes = error
    gpus = record.write_record(Path(request.file), nodes)["gpus"]
    cluster.stop()
    print(f"recorded   {len(gpus)} GPUs in {request.file}; read it before you send it to anybody")
    return 0


def examine(request: DoctorRequest) -> int:
    """Print the inventory, the measured rates and the findings. Return the exit code."""
    ray_environment.prepare(request.cluster.address, request.cluster.insecure)  # must run before Ray is imported
    from sweeper.commands.doctor.exercise import NodeWatches, exercise
    from sweeper.execution import cluster

    console = Console(highlight=False, soft_wrap=True, markup=False)
    nodes = cluster.discover_nodes(request.cluster.address, request.cluster.insecure)
    console.print(f"cluster    {count(len(nodes), 'node')}: {describe_inventory(nodes)}")
    kinds = {hardware_of(node).name: hardware_of(node) for node in nodes if node.gpus}
    for name, hardware in kinds.items():
        for kind, figures, source in list_figures(hardware):
            console.print(f"{name:10} {kind}: {figures}; {source}")
    states = NodeWatches(nodes, request.dir).states
    findings = [*check_gpu_setup(nodes), *check_nodes(list(states.values())), *check_store(request.tracking.uri)]
    if not request.quick:
        for hardware in kinds.values() or [Hardware(name="cpu", kind="cpu")]:
            target = select_target(hardware, nodes, 1)
            own = [item for item, node in zip(states.items(), nodes, strict=True) if node in target.nodes]
            findings += exercise(target, dict(own), console)
    cluster.stop()
    problems = sum(finding.affects_results for finding in findings)
    notes = f", {count(len(findings) - problems, 'note')}" if len(findings) > problems else ""
    for line in (*list_problems([], findings), f"{count(problems, 'problem')} found{notes}"):
        console.print(line)
    return SOME_FAILED if problems else COMPLETE


COMMAND = Subcommand("doctor", __doc__, {"": (DoctorRequest, examine), "record": (RecordRequest, record_machine)})
main = COMMAND.main
