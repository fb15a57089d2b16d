"""Start and end a sweep's gangs: resources, placement groups and actors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sweeper.config.hardware import Target
from sweeper.execution.gang import Environment, Gang, NodeClocks
from sweeper.execution.node_description import GPU_DOMAIN
from sweeper.execution.worker import Worker
from workloads.api.contract import Scalar

NODE_ID, ACCELERATOR_TYPE = "ray.io/node-id", "ray.io/accelerator-type"
# This many ids (912 characters) still cost little, and a selector by id excludes nodes that join later.
MAX_IDS = 16


@dataclass(frozen=True)
class GangResources:
    ranks: int  # the number of workers, each with one GPU or some CPU cores
    whole_nodes: bool = False  # the gang shares its nodes with no other gang
    host_gib: float = 0.0  # the host memory that Ray reserves for each rank

    @property
    def host_bytes(self) -> int:
        return int(self.host_gib * 2**30)


@dataclass(frozen=True)
class GangSpec:
    """The properties that all gangs of a pool share."""

    workload: str
    constants: Mapping[str, Scalar]  # parameters that are the same in every trial
    settings: Mapping[str, Any] | None  # the workload's section of the configuration
    resources: GangResources
    timeout_s: float  # trial.timeout_s
    waits_for_all: bool = False  # each rank measures its own device; if one rank fails, the other results are kept
    reports_steps: bool = False  # the workload reports steps while running and ends itself at the timeout
    cpu_shares: int | None = None  # the number of gangs that share a CPU's cores; None means all gangs of the pool
    searches_environment: bool = False  # trials differ in variables, so a gang is started for a given trial


class GangLauncher:
    """Starts gangs on a target's nodes. The target may change."""

    def __init__(self, target: Target, resources: GangResources, cpu_shares: int) -> None:
        self._resources = resources
        self._cpu_shares = cpu_shares
        self._launched = 0
        self._clocks = NodeClocks()
        self.set_target(target)

    def set_target(self, target: Target) -> None:
        """From now on, start gangs only on the target's nodes."""
        self.target = target
        self._ids = {node.id for node in target.nodes if node.id}
        self._selector = select_nodes(self._ids, ray.nodes()) if self._ids else {}

    def starts_on(self, node_ids: Collection[str]) -> bool:
        return not self._ids or self._ids >= {*node_ids}

    def launch(self, environment: Environment = ()) -> Gang:
        """Start the workers of a gang with these environment variables, without waiting for them.

        Variables delay a worker's start by half a second (1.5 s instead of 1.0 s on two cores), because Ray starts an
        extra process that sets the variables and then becomes the worker. Setting variables in a running worker would
        take no time, but the C library and Python read theirs only when a process starts.
        """
        self._launched += 1
        ranks = self._resources.ranks
        options = self._ray_options()
        if environment:
            options["runtime_env"] = {"env_vars": dict(environment)}
        share = self.target.ranks_per_node(ranks, self._resources.host_gib)
        group = self._reserve(options, share) if ranks > 1 else None
        workers = []
        for rank in range(ranks):
            # A CPU bundle holds one rank because one machine's cores may belong to several Ray nodes.
            bundle = rank // share if self.target.is_gpu else rank
            strategy = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}
            workers.append(ray.remote(Worker).options(max_restarts=0, **options, **strategy).remote())
        handshakes = [worker.handshake.remote() for worker in workers]
        gang = Gang(f"worker {self._launched}", workers, group, handshakes, list(handshakes), environment)
        gang.clocks = self._clocks
        gang.planned_ranks_per_node = share if self.target.is_gpu else None
        return gang

    def _reserve(self, options: dict[str, Any], share: int) -> PlacementGroup:
        """Reserve the resources of all ranks at once, and move the node selector from `options` to the bundles. A GPU
        bundle holds all ranks of one node, so Ray places the gang exactly as planned. PACK would split a gang that
        fits on one node whenever no node had enough free GPUs."""
        ranks, selector = self._resources.ranks, options.pop("label_selector")
        amounts = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": self._resources.host_bytes}
        ranks_of_bundle = share if self.target.is_gpu else 1
        bundle = {resource: amount * ranks_of_bundle for resource, amount in amounts.items() if amount}
        count = ranks // ranks_of_bundle
        strategy: dict[str, Any] = {"strategy": "STRICT_SPREAD" if self.target.is_gpu else "PACK"}
        if self.target.is_gpu and self.target.fits_gpu_domain(ranks, self._resources.host_gib):
            strategy = {"topology_strategy": {NODE_ID: "STRICT_SPREAD", GPU_DOMAIN: "STRICT_PACK"}}
        return placement_group([bundle] * count, bundle_label_selector=[selector] * count, **strategy)

    def _ray_options(self) -> dict[str, Any]:
        ranks, host_bytes = self._resources.ranks, self._resources.host_bytes
        if self.target.hardware.kind == "gpu":
            cores = self.target.cores_of_whole_nodes(ranks) if self._resources.whole_nodes else 1
            memory = {"memory": host_bytes} if host_bytes else {}
            return {"num_cpus": cores, "num_gpus": 1, "label_selector": self._selector, **memory}
        cores = self.target.cores_per_rank(self._cpu_shares * ranks)
        return {"num_cpus": cores, "num_gpus": 0, "label_selector": self._selector}


def kill_gang(gang: Gang) -> None:
    """Kill the workers of a gang, then release its placement group."""
    gang.killed = True
    for worker in gang.workers:
        ray.kill(worker, no_restart=True)
    if gang.group is not None:
        remove_placement_group(gang.group)


def select_nodes(ids: Collection[str], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return a label selector that matches only these nodes. `entries` is the result of `ray.nodes()`.

    The selector must be short because Ray's head keeps a copy for each waiting worker. If there are many ids, select
    the nodes' accelerator type and exclude other nodes of that type by id, if that is shorter. Other nodes of the type
    exist because Ray has a single type for H100 and H100 PCIe, and because nodes are drained. Nodes of that type that
    join later also match."""
    if not ids:
        return {}
    by_id = {NODE_ID: f"in({','.join(sorted(ids))})"}
    type_of = {entry["NodeID"]: entry["Labels"].get(ACCELERATOR_TYPE) for entry in entries if entry["Alive"]}
    types = {type_of.get(node_id) for node_id in ids if node_id in type_of}
    if len(ids) <= MAX_IDS or len(types) != 1 or None in types:
        return by_id
    by_type = {ACCELERATOR_TYPE: str(*types)}
    if others := sorted(node_id for node_id, kind in type_of.items() if kind in types and node_id not in ids):
        by_type[NODE_ID] = f"!in({','.join(others)})"
    return min(by_type, by_id, key=lambda selector: sum(map(len, selector.values())))
