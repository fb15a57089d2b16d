"""A cluster's GPUs and network, topologies read from plain values, and rates measured on devices."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from workloads.tables import read_csv

Wiring = Literal["switch", "pairs", "host"]
USABLE_MEMORY = 0.97  # the share of driver-reported memory that one process can use


@dataclass(frozen=True)
class AttentionRates:
    """An attention kernel's rates for long sequences, as fractions of the bf16 GEMM rate."""

    forward_share: float = field(metadata={"min": 0.001, "max": 2})
    backward_share: float = field(metadata={"min": 0.001, "max": 2})
    half_tokens: float = field(metadata={"min": 0})  # the sequence length that reaches half of these rates


@dataclass(frozen=True)
class Device:
    name: str  # the name of the GPU's file in conf/hardware
    peak_tflops: Mapping[str, float]  # dense peaks by data type, from the vendor's data sheet
    memory_gib: float  # as reported by the driver
    memory_gb_s: float  # memory bandwidth, from the vendor's data sheet; infinite if unknown
    power_w: float | None  # the GPU's power cap
    # Measured rates of large GEMMs under load, by data type; empty if not measured.
    sustained_tflops: Mapping[str, float]
    architecture: str = ""  # the compiler's name for the GPU: sm80, sm90, sm100, gfx942; empty if unknown
    # The speed of GEMMs without the power cap's limit, relative to sustained GEMMs.
    power_headroom: float = 1.0
    grouped_tflops: Mapping[str, float] = field(default_factory=dict)  # measured rates of grouped GEMMs, by data type
    # Measured GB/s that copies and AdamW's update read and write, and the time of a launch; None if not measured.
    copy_gb_s: float | None = None
    update_gb_s: float | None = None
    launch_us: float | None = None
    # Measured rates of attention kernels, by the planner's kernel names.
    attention: Mapping[str, AttentionRates] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """The links and the network of a cluster of identical nodes. Bandwidths are per direction."""

    name: str  # the name of the topology's file
    # GPUs that reach each other without the network: a node's GPUs, or 72 in a GB200 NVL72.
    gpus_per_domain: int = field(metadata={"min": 1})
    # `switch`: a GPU can use its whole bandwidth to any other GPU. `pairs`: a GPU has one link to each other GPU, and
    # only collectives over the whole domain use all links (xGMI). `host`: PCIe through the CPUs.
    wiring: Wiring
    link_gb_s: float = field(metadata={"min": 0.001})  # bandwidth per GPU within its domain, over all links
    # Bandwidth per GPU between domains: a domain's NIC bandwidth divided by the domain's GPUs.
    network_gb_s: float = field(metadata={"min": 0.001})
    # NIC bandwidth divided by the bandwidth of the switches above the NICs.
    oversubscription: float = field(default=1.0, metadata={"min": 1})
    # link_latency_s and network_latency_s are the latency of one message.
    link_latency_s: float = field(default=4e-6, metadata={"min": 1e-9})
    network_latency_s: float = field(default=12e-6, metadata={"min": 1e-9})


@dataclass(frozen=True)
class Cluster:
    device: Device
    topology: Topology
    gpus: int

    @property
    def usable_gib(self) -> float:
        return USABLE_MEMORY * self.device.memory_gib


@dataclass(frozen=True)
class Group:
    """The ranks in a collective: `ranks` ranks, `stride` apart."""

    ranks: int
    stride: int = 1

    def ranks_per_domain(self, gpus_per_domain: int) -> int:
        return max(1, min(self.ranks, gpus_per_domain // self.stride))


ASSUMED_TFLOPS = 0.05  # for devices without a measured rate; affects only the order of layouts
UNKNOWN_CLUSTER = Cluster(
    Device("unknown", {}, 0.0, math.inf, None, dict.fromkeys(("bf16", "fp32", "fp8", "fp4"), ASSUMED_TFLOPS)),
    Topology("unknown", 1, "switch", link_gb_s=25.0, network_gb_s=25.0),
    gpus=1,
)


DEVICE_RATES = read_csv(__file__, "device_rates.csv")


def measured_tflops(device: str) -> dict[str, float]:
    return {row["dtype"]: float(row["tflops"]) for row in DEVICE_RATES if row["device"] == device}


def power_headroom(device: str) -> float:
    """Return the ratio of a device's GEMM speed without a power cap to its sustained speed; 1 if unknown."""
    rows = (row for row in DEVICE_RATES if row["device"] == device and row["power_headroom"])
    return next((float(row["power_headroom"]) for row in rows), 1.0)
