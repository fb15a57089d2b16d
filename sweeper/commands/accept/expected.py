"""Compute the rates expected of a healthy part from the hardware catalog, measured-rate tables and the planner."""

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter

from sweeper.commands.accept.experiments import END_OVER_START, Experiment
from sweeper.config.hardware import Target
from sweeper.preflight.clusters import build_device, build_machine, default_topology, find_device
from workloads.api import registry
from workloads.api.contract import Scalar
from workloads.estimator.communication import all_reduce_s, all_to_all_s
from workloads.estimator.placed_job import COPY_SHARE
from workloads.hardware.cluster import Cluster, Group
from workloads.hardware.precisions import sustained_flops

LEAST_KIB = 4096  # smallest message with an expected rate; the planner does not model launch-bound messages


def expected_rates(target: Target, experiment: Experiment, ranks: int) -> Mapping[str, float]:
    """Return the expected rate of each test. An unknown device is only expected to keep its initial rate to the end."""
    metrics = experiment.tests.items()
    ends = {f"{test}{END_OVER_START}": 1.0 for test, metric in metrics if metric == "tflops_sustained"}
    device = find_device(target.hardware)
    if device is None:
        return ends
    rates = dict.fromkeys(experiment.tests, _expected_rate(target, experiment, ranks))
    factors = {test: device.power_headroom if metric == "tflops" else 1.0 for test, metric in metrics}
    return ends | {test: factors[test] * rate for test, rate in rates.items() if rate}


def _expected_rate(target: Target, experiment: Experiment, ranks: int) -> float | None:
    """Return the rate of an experiment on a known device; None if nothing is expected of it."""
    device, given = build_device(target.hardware), experiment.parameters
    match experiment.workload:
        case "matmul":
            dtype = str(given["dtype"]).partition("_")[0]
            return sustained_flops(device, dtype) / 1e12 if dtype in device.sustained_tflops else None
        case "memory":
            return device.memory_gb_s * COPY_SHARE if given["operation"] == "copy" else None
        case "parallel":
            return _find_layout(target, experiment, ranks)[0]
    # A collective's bus bandwidth in GB/s, as defined by nccl-tests, from the planner's time.
    if given["kib"] < LEAST_KIB:
        return None
    size, moved = int(given.get("ranks") or ranks), 1024.0 * given["kib"]
    topology = replace(default_topology(target.hardware), gpus_per_domain=target.ranks_per_node(ranks))
    cluster, group = Cluster(device, topology, size), Group(size)
    others = (size - 1) / size
    if given["collective"] == "all_reduce":
        return 2 * others * moved / all_reduce_s(cluster, group, moved) / 1e9
    remote = max(0.0, 1 - topology.gpus_per_domain / size)
    return others * moved / all_to_all_s(cluster, group, others * moved, remote * moved) / 1e9


def _find_layout(target: Target, experiment: Experiment, ranks: int) -> tuple[float, dict[str, Scalar]]:
    """Return the tokens/s and the parameters of the fastest training layout, or 0 tokens/s if no layout fits."""
    ranks = 1 if experiment.scope == "device" else ranks
    workload, given = registry.load(experiment.workload), experiment.parameters_for(ranks)
    machine = build_machine(target, ranks, default_topology(target.hardware), {})
    layouts = [given | {"dp_replicate": ranks // n, "dp_shard": n} for n in range(1, ranks + 1) if ranks % n == 0]
    estimates = [workload.estimate(workload.Parameters(**layout), machine) for layout in layouts]
    rates = [estimate.metrics.get("tokens_per_s", 0.0) for estimate in estimates]
    return max(zip(rates, layouts, strict=True), key=itemgetter(0))


def choose_parameters(target: Target, experiment: Experiment, ranks: int) -> dict[str, Scalar]:
    """Return a trial's parameters: for training, those of the planner's fastest layout. Return {} if no layout fits."""
    given = experiment.parameters_for(ranks)
    if experiment.workload != "parallel" or find_device(target.hardware) is None:
        return given
    rate, layout = _find_layout(target, experiment, ranks)
    return layout if rate else {}
