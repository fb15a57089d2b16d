"""Explain why one estimated job is slower than another, what more resources would change, and what training costs."""

import math
from dataclasses import dataclass, replace

from workloads.api.errors import UserInputError
from workloads.estimator.estimate import JobEstimate, StepTime
from workloads.hardware.cluster import Cluster
from workloads.layouts.layout import Job
from workloads.tables import read_toml

SECONDS_PER_DAY = 86_400
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Dubey et al. 2024, "The Llama 3 Herd of Models", table 5).
FAILURES_PER_GPU_DAY = 419 / 54 / 16_384
MOST = 700.0  # the exponential of a larger number does not fit into a float

CAUSES: dict[str, str] = read_toml(__file__, "causes.toml")


def explain_slower(slower: StepTime, faster: StepTime) -> str:
    """Explain why a step takes longer: a sentence for the largest extra cost, and one for the largest saving."""
    differences = {name: seconds - getattr(faster, name) for name, seconds in vars(slower).items()}
    costly, saving = (choose(differences, key=differences.__getitem__) for choose in (max, min))
    cause = f"{CAUSES[costly][0].upper()}{CAUSES[costly][1:]} ({costly})."
    if differences[saving] >= -5e-4:
        return f"{cause} Nothing else makes up for it."
    return f"{cause} What it saves, most of it in {saving}, is less."


def alternatives(job: Job, cluster: Cluster) -> dict[str, tuple[Job, Cluster]]:
    """Return variants of the job, each with one doubled resource, keyed by that resource."""
    topology, device, layout = cluster.topology, cluster.device, job.layout
    links = replace(topology, link_gb_s=2 * topology.link_gb_s)
    network = replace(topology, network_gb_s=2 * topology.network_gb_s)
    doubled = {
        "twice the memory": (job, replace(cluster, device=replace(device, memory_gib=2 * device.memory_gib))),
        "links of twice the bandwidth": (job, replace(cluster, topology=links)),
    }
    if cluster.gpus > topology.gpus_per_domain:
        doubled["a network of twice the bandwidth"] = (job, replace(cluster, topology=network))
    larger = replace(job, layout=replace(layout, global_batch=2 * layout.global_batch))
    return doubled | {"twice the sequences in a step": (larger, cluster)}


@dataclass(frozen=True)
class Reliability:
    """How often a job fails and what a failure costs. All values are assumptions made by the user."""

    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY  # unexpected interruptions
    restart_s: float = 600.0  # from a failure until training resumes
    checkpoint_s: float = 20.0  # how long a checkpoint stops training

    def failure_interval_s(self, gpus: int) -> float:
        """Return a job's mean time between failures on `gpus` GPUs, or infinity if the failure rate is zero."""
        failures = self.failures_per_gpu_day * gpus
        return SECONDS_PER_DAY / failures if failures else math.inf

    def lost_share(self, gpus: int) -> float:
        """Return the fraction of time lost to failures and to checkpoints, at the best interval between checkpoints
        (Daly 2006, equations 20 and 37). Failures are independent, and also occur during restarts and checkpoints."""
        failures_s, checkpoint_s = self.failure_interval_s(gpus), self.checkpoint_s
        if math.isinf(failures_s):
            return 0.0
        ratio = checkpoint_s / failures_s / 2
        interval_s = math.sqrt(2 * checkpoint_s * failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s
        interval_s = interval_s if ratio < 1 else failures_s
        pass_share = (interval_s + checkpoint_s) / failures_s  # 0 if checkpoints cost nothing
        kept = interval_s / failures_s / math.expm1(min(pass_share, MOST)) if pass_share else 1.0
        return 1 - kept * math.exp(-min(self.restart_s / failures_s, MOST))


@dataclass(frozen=True)
class TrainingRun:
    tokens: float
    days: float
    gpu_hours: float
    cost: float | None
    lost_share: float
    failures: float


def training_run(
    estimate: JobEstimate, tokens: float, reliability: Reliability, price_per_hour: float | None
) -> TrainingRun:
    """Return the time and cost of training on `tokens` tokens. `price_per_hour` is the price of one GPU.

    Raises UserInputError if failures leave less than a thousandth of the time."""
    lost = reliability.lost_share(estimate.gpus)
    if lost > 0.999:
        failing = f"{estimate.gpus:,} GPUs fail every {reliability.failure_interval_s(estimate.gpus):.3g} s"
        problem = f"{failing}, and restart_s={reliability.restart_s:g}: training would not advance"
        raise UserInputError(f"failures_per_gpu_day={reliability.failures_per_gpu_day:g}: {problem}")
    seconds = tokens / (estimate.tokens_per_s_per_gpu * estimate.gpus) / (1 - lost)
    gpu_hours = seconds / 3600 * estimate.gpus
    cost = None if price_per_hour is None else price_per_hour * gpu_hours
    failures = seconds / reliability.failure_interval_s(estimate.gpus)
    return TrainingRun(tokens, seconds / SECONDS_PER_DAY, gpu_hours, cost, lost, failures)
