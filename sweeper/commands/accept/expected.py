"""What a healthy part reaches: by the catalogue, the tables of measured rates and the planner."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sweeper.commands.accept.experiments import Experiment
from sweeper.config.hardware import Target
from sweeper.preflight.clusters import build_device, build_machine, default_topology
from workloads.api import registry
from workloads.api.errors import UserInputError
from workloads.estimator.communication import bandwidth_gb_s
from workloads.estimator.placed_job import COPY_SHARE
from workloads.hardware.cluster import Cluster, Group
from workloads.hardware.precisions import sustained_flops

LARGE_KIB = 2**20  # of a message from which bandwidth alone counts
Expected = Callable[[Target, Experiment, int], float | None]


def expected_rates(target: Target, experiment: Experiment, ranks: int) -> Mapping[str, float]:
    """Return the expected rate of each test of an experiment; none of devices that the catalogue does not have."""
    try:
        build_device(target.hardware)
    except UserInputError:
        return {}
    rates = {test: RATES[experiment.workload](target, experiment, ranks) for test in experiment.tests}
    device = build_device(target.hardware)
    factors = {test: device.power_headroom if metric == "tflops" else 1.0 for test, metric in experiment.tests.items()}
    return {test: factors[test] * rate for test, rate in rates.items() if rate}


def _products(target: Target, experiment: Experiment, ranks: int) -> float | None:
    dtype = str(experiment.parameters["dtype"]).partition("_")[0]
    device = build_device(target.hardware)
    return sustained_flops(device, dtype) / 1e12 if dtype in device.sustained_tflops else None


def _copies(target: Target, experiment: Experiment, ranks: int) -> float | None:
    is_local = experiment.parameters["operation"] == "copy"
    return build_device(target.hardware).memory_gb_s * COPY_SHARE if is_local else None


def _collectives(target: Target, experiment: Experiment, ranks: int) -> float | None:
    if experiment.parameters["kib"] < LARGE_KIB or experiment.parameters["collective"] != "all_reduce":
        return None
    size = int(experiment.parameters.get("ranks") or ranks)
    cluster = Cluster(build_device(target.hardware), default_topology(target.hardware), size)
    return bandwidth_gb_s(cluster, Group(size))


def _training(target: Target, experiment: Experiment, ranks: int) -> float | None:
    workload = registry.load(experiment.workload)
    machine = build_machine(target, ranks, default_topology(target.hardware), {})
    estimate = workload.estimate(workload.Parameters(**experiment.parameters_for(ranks)), machine)
    return estimate.metrics.get("tokens_per_s")


RATES: Mapping[str, Expected] = {
    "matmul": _products,
    "memory": _copies,
    "collectives": _collectives,
    "parallel": _training,
}
