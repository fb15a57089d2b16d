"""The GPUs of a cluster and the network between them, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Wiring = Literal["switch", "pairs", "host"]


class AttentionRates(NamedTuple):
    """The rates of an attention kernel over long sequences, as shares of the rate of bf16 products.

    Attributes:
        half_tokens: the length of sequences at which half of these rates is reached.
    """

    forward_share: float
    backward_share: float
    half_tokens: float


@dataclass(frozen=True)
class Device:
    """A GPU.

    Attributes:
        name: the key of its file in conf/hardware.
        peak_tflops: dense peaks by data type, of the vendor's data sheet.
        memory_gib: what the driver reports.
        memory_gb_s: bandwidth of the device's memory, of the vendor's data sheet; infinite where it is unknown.
        power_w: the power cap at which it runs.
        sustained_tflops: measured rates of large matrix products under load, by data type; empty where none was.
        power_headroom: how much faster products run while the power cap does not limit them, against sustained ones.
        architecture: of the compiler: sm80, sm90, sm100, gfx942; empty where it is not known.
        copy_gb_s: bytes that copies read and write in a second, as measured; None where they were not.
        attention: measured rates of attention kernels by the planner's names of them.
    """

    name: str
    peak_tflops: Mapping[str, float]
    memory_gib: float
    memory_gb_s: float
    power_w: float | None
    sustained_tflops: Mapping[str, float]
    architecture: str = ""
    power_headroom: float = 1.0
    copy_gb_s: float | None = None
    attention: Mapping[str, AttentionRates] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """Links and network of a cluster of equal nodes. Bandwidths are each way.

    Attributes:
        name: the key of its file.
        gpus_per_domain: GPUs that reach each other without the network: of a node, or 72 of a GB200 NVL72.
        wiring: `switch`: a GPU uses its whole bandwidth towards any other; `pairs`: one link to each other GPU, which
            only collectives of the whole domain can all use (xGMI); `host`: PCIe, through the processors.
        link_gb_s: of one GPU within its domain, all links together.
        network_gb_s: of one GPU between domains: the NICs of a domain, divided by its GPUs.
        oversubscription: how many times the bandwidth of the NICs exceeds that of the switches above them.
        link_latency_s, network_latency_s: of one message.
    """

    name: str
    gpus_per_domain: int
    wiring: Wiring
    link_gb_s: float
    network_gb_s: float
    oversubscription: float = 1.0
    link_latency_s: float = 4e-6
    network_latency_s: float = 12e-6


@dataclass(frozen=True)
class Cluster:
    """Equal GPUs on a network."""

    device: Device
    topology: Topology
    gpus: int


ASSUMED_TFLOPS = 0.05  # of a device whose rate was not measured: only the order of layouts depends on it
UNKNOWN_CLUSTER = Cluster(
    Device("unknown", {}, 0.0, math.inf, None, dict.fromkeys(("bf16", "fp32", "fp8", "fp4"), ASSUMED_TFLOPS)),
    Topology("unknown", 1, "switch", link_gb_s=25.0, network_gb_s=25.0),
    gpus=1,
)
