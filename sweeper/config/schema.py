"""The configuration schema, as dataclasses. `conf/config.yaml` contains the defaults and documents each key."""

from dataclasses import dataclass, field
from typing import Any, Literal

Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class WorkloadSection:
    """The workload, and the objective that ranks trials.

    Attributes:
        name: the benchmark to run; workload=NAME selects a file that sets this key.
        preset: the name of the file that sets what the benchmark trains, which also names the sweeps; empty if the
            benchmark's own file sets it.
        objective: the metric that ranks trials; the leading metric if there are several.
        direction: whether a higher or a lower objective is better.
    """

    name: str
    objective: str
    direction: Direction = "maximize"
    preset: str = ""

    @property
    def title(self) -> str:
        return self.preset or self.name


@dataclass(frozen=True)
class Hardware:
    """A kind of device. Peaks are dense TFLOP/s per device, by dtype. Unpublished peaks are left out.

    Attributes:
        name: the name that hardware=NAME selects; auto selects the cluster's devices.
        kind: whether the device is a CPU or a GPU.
        architecture: the instruction set, such as sm90 or gfx942, which determines the supported number formats.
        accelerators: Ray's labels for the device.
        device_ids: PCI device ids in hex, such as 74a1; a virtual function has its own id.
        device_names: regular expressions that match the driver's names for the device.
        partition: the compute and memory mode that divides an Instinct, such as CPX/NPS4; null: the cluster's mode.
        dies: the number of devices into which CPX mode divides the GPU.
        compute_units: the number of compute units of the undivided device.
        clock_headroom: the factor by which the clock may exceed the peaks' clock. A higher MFU is impossible.
        dense_peak_tflops: peaks by dtype, without sparsity: {bf16: 989, fp8: 1979}.
        achieved_share: the share of the peaks that GEMMs achieve, used until it is measured. The default fits an H200
            at its power limit, where GEMMs sustain 0.67 to 0.69 of the peak and 0.7 fits training runs.
        memory_gib: the memory of one device as the driver reports it, which is less than the vendor's figure.
        bandwidth_tb_s: the memory bandwidth of the device.
        link_gb_s: the bandwidth per direction from one device to the others in the node (NVLink, Infinity Fabric).
        link_peers: the number of devices directly linked to a device, each with an equal part of link_gb_s; null for
            a switch.
        power_w: the maximum power draw of one device.
        price_per_hour: an assumed price in USD, taken from a provider's on-demand price list; null if none was found.
        environment: variables set for every worker, each with a value, a reason and a source.
        sources: the document, table and date for the peaks, memory, bandwidth, power and price.
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
    """The cluster's links and network, for estimates. Bandwidths are per GPU and direction, in GB/s.

    Attributes:
        name: the name that topology=NAME selects; auto uses measurements, else nodes of eight with the GPU's links.
        gpus_per_domain: the number of GPUs that can bypass the network: the GPUs of a node, or 72 in a GB200 NVL72.
        wiring: how GPUs are linked: switch; pairs (a link to every other GPU, as with xGMI); or host (via the CPUs).
        link_gb_s: bandwidth within the domain, summed over all links of a GPU.
        network_gb_s: bandwidth to other domains: the domain's total NIC bandwidth divided by its number of GPUs.
        oversubscription: the ratio of NIC bandwidth to the bandwidth of the switches above them.
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
    """The limits of a sweep. The sweep ends when it reaches any of them."""

    trials: int | None = field(default=None, metadata={"min": 1})
    time_s: float | None = field(default=None, metadata={"min": 0.001})
    patience: int | None = field(default=None, metadata={"min": 1})
    gpu_hours: float | None = field(default=None, metadata={"min": 1e-6})
    cost: float | None = field(default=None, metadata={"min": 1e-6})
    same_failures: int | None = field(default=5, metadata={"min": 1})


@dataclass(frozen=True)
class Finals:
    top: int = field(metadata={"min": 0})  # the number of best trials to remeasure; null: the workload's default
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
    nodes: Any = None  # numbers of nodes for projecting the best point


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
    limits: dict[str, Any] = field(default_factory=dict)  # upper bounds if lower is better, otherwise lower bounds
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
