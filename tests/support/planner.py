"""Jobs and clusters for tests of the planner."""

from collections.abc import Iterable
from itertools import product
from typing import Any

from sweeper.config.hardware import Target
from sweeper.config.schema import TopologySection
from sweeper.preflight.clusters import build_machine, choose_topology
from workloads.api.contract import Machine
from workloads.hardware.cluster import Cluster, Device, Topology
from workloads.layouts.enumeration import Family
from workloads.layouts.layout import Job, Layout
from workloads.models.model import Model

LLAMA_8B = Model(32, 4096, 32, 8, 128, 14336, 128256)
SMALL = ["model=llama3_8b", "hardware=h100", "gpus=8", "micro_batch=1", "cp=1"]  # arguments of a plan
H100 = Device("h100", {"bf16": 989, "fp16": 989, "fp8": 1979}, 79.6, 3350, 700, {})


def cluster(gpus: int, gpus_per_domain: int = 8) -> Cluster:
    """Return a cluster of H100s with NVSwitch and 400 Gb/s a GPU."""
    return Cluster(H100, Topology("dgx_h100", gpus_per_domain, "switch", link_gb_s=450, network_gb_s=50), gpus)


def job(layout: Layout, model: Model = LLAMA_8B) -> Job:
    return Job(model, layout, sequence_length=8192)


def trained_job(layout: Layout, model: Model = LLAMA_8B, *, block: str = "pytorch", **training: Any) -> Job:
    """Return the job of this project's trainer on sequences of 8192 tokens, without compiled blocks."""
    fields: dict[str, Any] = {"sequence_length": 8192, "compiled": False, **training}
    return Job(model, layout, trainer="own", manual_backward=block == "manual", **fields)


def flatten(families: Iterable[Family]) -> list[Layout]:
    """Return the layouts of families."""
    ways = ((family, way) for family in families for way in product(family.checkpointings, family.reshardings))
    return [layout for family, way in ways for layout in family.list_layouts(*way)]


def machine_of(target: Target, ranks: int) -> Machine:
    """Return the machine of a trial without measured rates, with a network of 200 Gb/s a GPU."""
    nodes = max(node.gpus for node in target.nodes)
    topology = choose_topology(TopologySection(network_gb_s=25.0), target.hardware, nodes, None)
    return build_machine(target, ranks, topology, {})
