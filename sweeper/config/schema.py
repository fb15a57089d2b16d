"""The schema of a configuration, as dataclasses. The defaults are in `conf/config.yaml`, which documents each key."""

from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class WorkloadSection:
    """The workload and the objective that ranks its trials.

    Attributes:
        name: the benchmark that runs; workload=NAME selects a file that sets it.
        preset: the name of a file that sets what the benchmark trains, by which its sweeps are named; empty if it is
            the benchmark's.
        objective: the metric that ranks trials; of several the leading one.
        direction: whether a higher or a lower objective is better.
        strategy: the name of a fixed layout in `conf/strategies.yaml`, such as balanced.
    """

    name: str
    objective: str
    direction: Direction = "maximize"
    strategy: str | None = None
    preset: str = ""

    @property
    def title(self) -> str:
        return self.preset or self.name


@dataclass(frozen=True)
class Hardware:
    """A kind of device. Peaks are dense TFLOP/s of one device by data type; unpublished ones are absent.

    Attributes:
        name: the name that hardware=NAME selects; auto: what the cluster has.
        kind: whether the device is a CPU or a GPU.
        architecture: the instruction set, such as sm90 or gfx942; decides which number formats are supported.
        accelerators: Ray's labels for the device.
        device_ids: PCI device ids in hex, such as 74a1; a virtual function has its own.
        device_names: regular expressions for the driver's names of the device.
        partition: compute and memory mode in which an Instinct is divided, such as CPX/NPS4; null for the cluster's.
        dies: into how many devices the mode CPX divides it.
        compute_units: of the undivided device.
        clock_headroom: the factor by which the clock may exceed the one of the peaks. An MFU above it is impossible.
        dense_peak_tflops: peaks by data type, without sparsity: {bf16: 989, fp8: 1979}.
        achieved_share: the share of these peaks that products achieve, where none was measured here. The default is
            that of an H200 at its power limit: its GEMMs sustain 0.67 to 0.69 of the peak, and 0.7 fits its training.
        memory_gib: memory of one device as its driver reports it, less than the vendor's figure.
        bandwidth_tb_s: bandwidth of its memory.
        link_gb_s: bandwidth of one device to the others of its node (NVLink, Infinity Fabric), in each direction.
        link_peers: to how many devices it has a link of its own, with an equal part of link_gb_s; null for a switch.
        power_w: the most power that one device draws.
        price_per_hour: an assumed price in USD, a provider's list price on demand; null where none was found.
        environment: variables that every worker is started with, each with its value, reason and source.
        sources: the document, table and date behind peaks, memory, bandwidth, power and price.
        source: where the figures without an entry in `sources` are from.
    """

    name: str
    kind: Literal["cpu", "gpu"] = "gpu"
    architecture: str | None = None
    accelerators: list[str] = field(default_factory=list)
    device_ids: list[str] = field(default_factory=list)
    device_names: list[str] = field(default_factory=list)
    partition: str | None = None
    dies: int | None = None
    compute_units: int | None = None
    dense_peak_tflops: dict[str, float] = field(default_factory=dict)
    clock_headroom: float = 1.0
    achieved_share: float = field(default=0.7, metadata={"min": 0.01, "max": 1.0})
    memory_gib: float | None = None
    bandwidth_tb_s: float | None = None
    link_gb_s: float | None = None
    link_peers: int | None = field(default=None, metadata={"min": 1})
    power_w: float | None = None
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    environment: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    source: str | None = None


@dataclass(frozen=True)
class TopologySection:
    """Links and network of the cluster, for estimates. Bandwidths are of one GPU in each direction, in GB/s.

    Attributes:
        name: the name that topology=NAME selects; auto: what was measured, else nodes of eight with the GPU's links.
        gpus_per_domain: GPUs that reach each other without the network: of a node, or 72 of a GB200 NVL72.
        wiring: a switch; pairs, a link to each other GPU (xGMI); or host, through the processors.
        link_gb_s: within the domain, all links of a GPU together.
        network_gb_s: to other domains: the NICs of a domain, divided by its GPUs.
        oversubscription: how many times the bandwidth of the NICs exceeds that of the switches above them.
        link_latency_s: of one message within the domain.
        network_latency_s: of one message between domains.
        source: where the figures are from.
        file: a YAML file of these keys instead; topology=FILE.yaml sets it.
    """

    name: str = "auto"
    gpus_per_domain: int | None = field(default=None, metadata={"min": 1})
    wiring: Literal["switch", "pairs", "host"] | None = None
    link_gb_s: float | None = field(default=None, metadata={"min": 0.001})
    network_gb_s: float | None = field(default=None, metadata={"min": 0.001})
    oversubscription: float | None = field(default=None, metadata={"min": 1})
    link_latency_s: float | None = field(default=None, metadata={"min": 1e-9})
    network_latency_s: float | None = field(default=None, metadata={"min": 1e-9})
    source: str | None = None
    file: str | None = None


@dataclass(frozen=True)
class Search:
    """The sampler and its options.

    Attributes:
        sampler: what chooses the parameters of the next trial; set by search=NAME.
    """

    sampler: Literal["tpe", "gp", "nsga2", "cmaes", "qmc", "random", "grid"]
    pruner: Literal["none", "median", "asha"] = "none"
    min_steps: int = field(default=5, metadata={"min": 1})
    reduction_factor: int = field(default=4, metadata={"min": 2})
    initial_points: Any = None
    warm_start: str | None = None


@dataclass(frozen=True)
class Budget:
    """Limits of a sweep; it ends at the first one that is reached."""

    trials: int | None = field(default=None, metadata={"min": 1})
    time_s: float | None = field(default=None, metadata={"min": 0.001})
    patience: int | None = field(default=None, metadata={"min": 1})
    gpu_hours: float | None = field(default=None, metadata={"min": 1e-6})
    cost: float | None = field(default=None, metadata={"min": 1e-6})
    same_failures: int | None = field(default=5, metadata={"min": 1})


@dataclass(frozen=True)
class Finals:
    top: int = field(metadata={"min": 0})  # the best trials that are measured again; null for the workload's
    rounds: int = field(metadata={"min": 2})


@dataclass(frozen=True)
class TrialLimits:
    timeout_s: float = field(metadata={"min": 0.001})
    retries: int = field(metadata={"min": 0})
    grace_s: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class ClusterSection:
    address: str | None = None
    insecure: bool = False
    max_concurrent_trials: int | None = field(default=None, metadata={"min": 1})
    cpus: int | None = field(default=None, metadata={"min": 1})
    drain_below: float | None = field(default=0.9, metadata={"min": 0, "max": 1})


@dataclass(frozen=True)
class Tracking:
    experiment: str
    uri: str | None = None


@dataclass(frozen=True)
class ProjectionSection:
    nodes: Any = None  # to how many the best point is projected


@dataclass(frozen=True)
class Config:
    workload: WorkloadSection
    space: dict[str, Any]
    hardware: Hardware
    search: Search
    budget: Budget
    finals: Finals
    trial: TrialLimits
    cluster: ClusterSection
    tracking: Tracking
    dir: str
    topology: TopologySection = TopologySection()
    projection: ProjectionSection = ProjectionSection()
    command: dict[str, Any] | None = None
    objective: Any = None  # short for workload.objective
    limits: dict[str, Any] = field(default_factory=dict)  # upper bounds where less is better, else lower ones
    metrics: dict[str, Any] = field(default_factory=dict)  # how your own are better: maximize or minimize
    name: str | None = None
    exclusive: Literal["gpu", "node"] | None = None
    gpus: int | Literal["all"] = field(default=1, metadata={"min": 1})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**32 - 1})
    progress: Literal["auto", "always", "never", "json"] = "auto"
    retry: Literal["failed", "infeasible", "inconclusive", "lost", "all"] | None = None
    plan: bool | Literal["run"] = False
    calibration: str = "auto"
    price_per_hour: float | None = field(default=None, metadata={"min": 0})
    price_per_kwh: float | None = field(default=None, metadata={"min": 0})
