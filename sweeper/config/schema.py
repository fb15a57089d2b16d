"""The schema of a configuration, as dataclasses. The defaults are in `conf/config.yaml`, which documents each key."""

from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class WorkloadSection:
    """The workload and the objective that ranks its trials.

    Attributes:
        name: the benchmark that runs; workload=NAME selects a file that sets it.
        preset: the name of a file that sets what the benchmark trains, and that its sweeps are named after; empty if
            the benchmark's own file sets it.
        objective: the metric that ranks trials; the leading one if there are several.
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
    """A kind of device. Peaks are dense TFLOP/s of one device by data type; unpublished peaks are missing.

    Attributes:
        name: the name that hardware=NAME selects; auto: the devices of the cluster.
        kind: whether the device is a CPU or a GPU.
        architecture: the instruction set, such as sm90 or gfx942; decides which number formats are supported.
        accelerators: Ray's labels for the device.
        device_ids: PCI device ids in hex, such as 74a1; a virtual function has its own id.
        device_names: regular expressions for the driver's names of the device.
        partition: the compute and memory mode that divides an Instinct, such as CPX/NPS4; null for the cluster's mode.
        dies: the number of devices into which the mode CPX divides the GPU.
        compute_units: the number of compute units of the undivided device.
        clock_headroom: the factor by which the clock may exceed that of the peaks. An MFU above it is impossible.
        dense_peak_tflops: peaks by data type, without sparsity: {bf16: 989, fp8: 1979}.
        achieved_share: the share of these peaks that GEMMs achieve, used if none was measured here. The default fits an
            H200 at its power limit: its GEMMs sustain 0.67 to 0.69 of the peak, and 0.7 fits its training.
        memory_gib: the memory of one device as reported by its driver, which is less than the vendor's figure.
        bandwidth_tb_s: the bandwidth of the device's memory.
        link_gb_s: the bandwidth from one device to the others in its node (NVLink, Infinity Fabric), in each direction.
        link_peers: the number of devices with a direct link to it, each with an equal part of link_gb_s; null for a
            switch.
        power_w: the maximum power draw of one device.
        price_per_hour: an assumed price in USD, a provider's on-demand list price; null if none was found.
        environment: variables with which every worker is started, each with its value, reason and source.
        sources: the document, table and date behind peaks, memory, bandwidth, power and price.
        source: the source of all values without an entry in `sources`.
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
    """Links and network of the cluster, for estimates. Bandwidths are per GPU and direction, in GB/s.

    Attributes:
        name: the name that topology=NAME selects; auto: what was measured, else nodes of eight with the GPU's links.
        gpus_per_domain: the number of GPUs that reach each other without the network: a node, or 72 in a GB200 NVL72.
        wiring: how GPUs are linked: switch; pairs, a link to each other GPU (xGMI); or host, through the processors.
        link_gb_s: bandwidth within the domain, over all links of a GPU together.
        network_gb_s: bandwidth to other domains: that of a domain's NICs, divided by its GPUs.
        oversubscription: how many times the bandwidth of the NICs exceeds that of the switches above them.
        link_latency_s: the latency of one message within the domain.
        network_latency_s: the latency of one message between domains.
        source: the source of these values.
        file: a YAML file with these keys; topology=FILE.yaml sets it.
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
        sampler: the algorithm that chooses the parameters of the next trial; set by search=NAME.
    """

    sampler: Literal["tpe", "gp", "nsga2", "cmaes", "qmc", "random", "grid"]
    pruner: Literal["none", "median", "asha"] = "none"
    min_steps: int = field(default=5, metadata={"min": 1})
    reduction_factor: int = field(default=4, metadata={"min": 2})
    initial_points: Any = None
    warm_start: str | None = None


@dataclass(frozen=True)
class Budget:
    """The limits of a sweep, which ends when it reaches the first of them."""

    trials: int | None = field(default=None, metadata={"min": 1})
    time_s: float | None = field(default=None, metadata={"min": 0.001})
    patience: int | None = field(default=None, metadata={"min": 1})
    gpu_hours: float | None = field(default=None, metadata={"min": 1e-6})
    cost: float | None = field(default=None, metadata={"min": 1e-6})
    same_failures: int | None = field(default=5, metadata={"min": 1})


@dataclass(frozen=True)
class Finals:
    top: int = field(metadata={"min": 0})  # how many of the best trials are remeasured; null for the workload's default
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
    nodes: Any = None  # the numbers of nodes to which the best point is projected


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
    limits: dict[str, Any] = field(default_factory=dict)  # upper bounds if less is better, otherwise lower bounds
    metrics: dict[str, Any] = field(default_factory=dict)  # the directions of your own metrics: maximize or minimize
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
