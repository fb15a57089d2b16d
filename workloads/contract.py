"""All that crosses between `sweeper/` and `workloads/`: small frozen dataclasses of plain values.

A workload is a class with a `Parameters` dataclass and a `run`. It can be run by hand
(`python -m workloads.trial matmul m=1024 n=1024 k=1024`), by torchrun, or by a test, with no Ray in sight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

Scalar = str | int | float | bool | None
STATISTICS = ("median", "mean", "fastest")


class Infeasible(Exception):
    """These parameters cannot work on this device: too little memory, an illegal layout, a missing type.

    It is knowledge, not a failure: the sampler is told, and the same parameters are not tried again.
    """


class Hopeless(Exception):
    """A trial that was asked to end, since others were better at the same step."""


class TookTooLong(Exception):
    """A trial that ended itself once its time was over, so that it can say what it had come to."""


class OutOfMemory(Infeasible):
    """The device or the host had too little memory. The process that tried has a fragmented allocator."""


class Listener(Protocol):
    """Hears of a trial while it runs, from any of its ranks."""

    def heard(self, step: int, figures: Mapping[str, float]) -> bool:
        """A step is over. True: others were better by then, and the trial may raise Hopeless."""

    def enough(self) -> None:
        """This rank has seen all that the trial is for, and ends: the others, which may not see it, are to end too."""

    def is_over(self) -> bool:
        """Whether a rank has had enough."""


@dataclass(frozen=True)
class Rank:
    """Which part of a gang this process is. One process by itself is rank 0 of 1.

    device: as torch names it: "cpu", or "cuda" for CUDA and ROCm alike
    ranks_per_node: as many neighbours in number as are on one node wherever they begin
    node_rank, nodes, local_rank: which of the gang's nodes this is, and which of the ranks on it
    node_devices: all that the gang has on this node, as CUDA_VISIBLE_DEVICES names them; empty on a CPU
    listener: whom a workload that `tells_steps` tells them, as soon as each is over
    timeout_s: after so long one that `tells_steps` ends itself (TookTooLong); any other is ended from outside
    meeting: host:port where rank 0 listens for the others; the same for every trial of a gang, so `turn`, which is
    another for each, keeps them apart
    """

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    ranks_per_node: int = 1
    meeting: str = ""
    turn: int = 0
    local_rank: int = 0
    node_rank: int = 0
    nodes: int = 1
    node_devices: str = ""
    listener: Listener | None = None
    timeout_s: float = math.inf


@dataclass(frozen=True)
class Machine:
    """What is known of the devices of a trial before anything runs.

    memory_gib: of one device; None: not known
    matrix_tflops: of one device, by data type: what products reached on it, else a share of the vendor's dense peak
    link_gb_s, network_gb_s: of one device, each way, within a node and between nodes
    memory_gb_s: what its memory moves; None: not known
    """

    kind: str
    architecture: str
    world_size: int
    ranks_per_node: int
    memory_gib: float | None = None
    matrix_tflops: Mapping[str, float] = field(default_factory=dict)
    link_gb_s: float = 25.0
    network_gb_s: float = 25.0
    memory_gb_s: float | None = None


@dataclass(frozen=True)
class Foreseen:
    """What a point of a space is expected to do, on paper. why_not: it is not to be tried, and why, with the rule that
    forbids it, which many points may break; figures: of what it would measure, under the same names, and `memory_gib`
    of a device; said: the point in words."""

    why_not: str = ""
    rule: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    said: str = ""


@dataclass(frozen=True)
class Measurement:
    """What one rank saw, raw. Every derived figure is computed from it in `sweeper/metrics.py`.

    executed         the parameters as executed, read back from what ran; must equal what was asked
    step_times_s     seconds of each timed step, warm-up left out
    sustained_step_times_s  seconds a step in each window of a run back to back, where one was asked for
    independent      whether each rank measured its own device, none waiting for another
    of_gang          whether it is of the whole gang, not of this rank: of several with steps the first counts
    unranked         why there is no speed to rank, such as emulated arithmetic; empty where there is one
    baseline_step_times_s  seconds of each step of what it is compared with, in turns with it
    bytes_per_step   bytes that one step has to move through the device's memory
    statistic        which one of the steps a figure is made of: median, mean or fastest
    flops_per_step   floating-point operations that the model or product needs in one step on this rank;
                     recomputation and emulation are not counted
    hardware_flops_per_step  those that the device does, with what it computes again; 0 where that is the same
    tokens_per_step  tokens that one step trains on, on this rank; 0 where there are none
    matrix_dtype     the data type that the matrix units ran in, which decides the peak of an MFU; a recipe's name where
                     they ran in several, which have no peak together
    figures          further raw figures, each named with its unit
    facts            what the process saw of its device and its software
    files            what is kept beside the figures, by file name: a trace

    Raises ValueError for what no figure can be made of: it is the workload's error, and said on the rank that made it.
    """

    executed: Mapping[str, Scalar]
    step_times_s: tuple[float, ...]
    sustained_step_times_s: tuple[float, ...] = ()
    independent: bool = False
    of_gang: bool = False
    unranked: str = ""
    baseline_step_times_s: tuple[float, ...] = ()
    bytes_per_step: float = 0.0
    statistic: str = "median"
    flops_per_step: float = 0.0
    hardware_flops_per_step: float = 0.0
    tokens_per_step: int = 0
    matrix_dtype: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, Scalar] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("step_times_s", "sustained_step_times_s", "baseline_step_times_s"):
            if wrong := [time_s for time_s in getattr(self, name) if not 0 < time_s < math.inf]:
                raise ValueError(f"{name} has {wrong[0]!r}: a step takes some time, and comes to an end")
        if self.statistic not in STATISTICS:
            raise ValueError(f"statistic={self.statistic!r}: it may be {', '.join(STATISTICS)}")
        if wrong_figures := [name for name, value in self.figures.items() if not isinstance(value, Real)]:
            name = wrong_figures[0]
            raise ValueError(f"figures[{name!r}] is {self.figures[name]!r}, which is no number")


class Workload(Protocol):
    """One kind of trial.

    `Parameters` is a frozen dataclass of every parameter. Its types say what each may be (`Literal` for
    choices), `field(metadata={"min": …})` bounds a number, and a field without a default must be given. With
    `"file": True` a text is the path of one that has to be there, with `"host_memory": True` a number is GiB of its
    node's memory that a process takes, which is reserved for it; `"cpu_gib"` says of a value how many GiB it takes at
    the least on a processor. It is read in the driver, so the module that defines it imports no torch; `run` may.

    `exclusive`, where it has it, is "node" for what another trial on the same node would disturb; else "gpu".

    `tells_steps`, where it has it and it is true: it says each step of a trial while it runs, and ends one in time.

    `method` names how the figures are taken, with a version: figures of different methods do not compare.
    `max_world_size` is how many processes one trial may span, None for any number. `sets_ceiling` says whether its
    best rate is what other workloads on the same device are held against.

    It may have `Settings`, a dataclass of what its section of the configuration says (under the workload's name), and
    `with_settings(settings)`, the workload that does so.

    It may have `foresee(parameters, machine) -> Foreseen`, on paper and without torch: then only points that nothing
    speaks against are tried, the most promising first.
    """

    Parameters: type[Any]
    method: str
    max_world_size: int | None
    sets_ceiling: bool

    def run(self, parameters: Any, rank: Rank) -> Measurement:
        """Run one trial on this rank. Raises Infeasible, or anything else for an error in the code."""
