"""Read this machine's properties and state, without torch."""

import contextlib
import os
import platform
import re
import resource
import shutil
import socket
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from workloads.api.contract import Scalar
from workloads.api.cores import CoreWatch
from workloads.api.gpus import Gpu, GpuIdentity, nvidia, open_gpus
from workloads.tables import read_toml

_TABLE = read_toml(__file__, "host.toml")
PACKAGES, CPU_FORMATS, KERNEL_PARAMETERS = (_TABLE[name] for name in ("packages", "cpu_formats", "kernel_parameters"))
# Counters of network cards and ports that rise on an error or a retry. "cqe" counters also rise if a queue closes.
NETWORK_ERRORS = re.compile(r"(?!.*cqe).*(err|retr|link_downed|out_of_sequence|oos_drop)")


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """Return the processor's name as the kernel reports it, or the architecture if there is no name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_architecture() -> str:
    """Return `cpu` and the 16-bit formats that the CPU has instructions for, as in `workloads.api.recipes`."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return " ".join(["cpu", *(name for name, instructions in CPU_FORMATS.items() if flags.intersection(instructions))])


def _cpuinfo(key: str, proc: Path = Path("/proc")) -> str:
    """Return the first processor's entry, or an empty string. Reading all processors' entries can be slow."""
    with contextlib.suppress(OSError), open(proc / "cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def memory_bytes() -> int:
    """Return the total memory, in bytes, of this machine or of the container that limits this process."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)


def available_memory_bytes() -> int:
    """Return the available memory, in bytes, of this machine or this process's container; 2**63 - 1 if unknown."""
    available = [2**63 - 1]
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable"))
        available.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" means that there is no limit
        limit, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = Path("/sys/fs/cgroup/memory.stat").read_text().split()
        reclaimable = int(statistics[statistics.index("inactive_file") + 1])  # file cache, which the kernel evicts
        available.append(limit - used + reclaimable)
    return min(available)


def node_activity() -> dict[str, Scalar]:
    """Return this machine's load average over the last minute and the number of other processes on its GPUs."""
    activity: dict[str, Scalar] = {"node_load": round(os.getloadavg()[0], 1)}
    with open_gpus() as gpus:
        processes = [ids for gpu in gpus if (ids := gpu.process_ids()) is not None]
    if processes:
        activity["other_gpu_processes"] = len(set[int]().union(*processes) - {os.getpid()})
    return activity


def gpu_identities() -> tuple[GpuIdentity, ...]:
    with open_gpus() as gpus:
        return tuple(gpu.identity for gpu in gpus)


def gpus_used_gib() -> tuple[float, ...]:
    """Return the GiB in use on each GPU, ordered by CUDA or HIP device index; 0 if a GPU does not report its memory."""
    with open_gpus() as gpus:
        return tuple(gpu.used_gib() or 0.0 for gpu in gpus)


def read_node_state(folder: str) -> dict[str, Any]:
    """Return this node's versions, kernel settings, memory, disk space, and each GPU's clocks, power limit and errors.
    All values are plain. The disk space is the free space in `folder`, the results directory."""
    results, shared = Path(folder), Path("/dev/shm")
    with open_gpus() as opened:
        gpus = [describe_gpu(gpu) for gpu in opened]
    return {
        "node": socket.gethostname(),
        "versions": {"python": platform.python_version()} | {name: version_of(name) for name in PACKAGES},
        "kernel": read_kernel(),
        "cpus": len(os.sched_getaffinity(0)),
        "governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")).strip(),
        "niceness": os.nice(0),
        "networks": read_networks(),
        "network_errors": read_network_errors(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1] % 2**63,  # Ray raises the soft limit; none is -1
        "shared_gib": shutil.disk_usage(shared).total / 2**30 if shared.is_dir() else 0.0,
        "free_gib": available_memory_bytes() / 2**30,
        "disk_gib": shutil.disk_usage(results if results.is_dir() else "/").free / 2**30,
        "gpus": gpus,
    }


class NodeWatch:
    """Reads this node's state, the use of its cores, and its GPUs' XID errors since this object was created."""

    def __init__(self) -> None:
        self._xid_watch = nvidia.XidWatch()

    def read_state(self, folder: str) -> dict[str, Any]:
        """Return the state. Takes half a second, or two seconds if other processes use the cores all the time."""
        use, busiest = CoreWatch().find_use()
        state, xids = read_node_state(folder) | {"use": use, "busiest": busiest}, self._xid_watch.read()
        for gpu in state["gpus"]:
            if gpu["vendor"] == "nvidia" and gpu["number"] in xids:
                gpu["xids"] = xids[gpu["number"]]
        return state


def read_networks(sys: Path = Path("/sys")) -> dict[str, str]:
    """Return the rate and state of each InfiniBand or RoCE port, and the rate and MTU of each network card."""
    networks = {}
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate, state = (_read(port / name).strip() for name in ("rate", "state"))
        networks[f"{port.parts[-3]} port {port.name}"] = f"{rate}, {state.partition(': ')[2].lower()}"
    for card in sorted(sys.glob("class/net/*")):
        if (card / "device").exists():  # not a bridge or a loopback
            speed, mtu = (_read(card / name).strip() for name in ("speed", "mtu"))
            networks[card.name] = f"{speed} Mb/s, MTU {mtu}" if speed.isdigit() else f"MTU {mtu}"  # virtual cards: -1
    return networks


def read_network_errors(sys: Path = Path("/sys")) -> dict[str, int]:
    """Return the error and retry counters of each InfiniBand or RoCE port and each network card."""
    cards = [file for file in sys.glob("class/net/*/statistics/*") if (file.parents[1] / "device").exists()]
    files = {f"{file.parts[-3]} {file.name}": file for file in cards}
    for file in sys.glob("class/infiniband/*/ports/*/*counters/*"):
        files[f"{file.parts[-5]} port {file.parts[-3]} {file.name}"] = file
    counts = {name: _read(file).strip() for name, file in files.items() if NETWORK_ERRORS.match(file.name)}
    return {name: int(text) for name, text in counts.items() if text.isdigit()}


def describe_gpu(gpu: Gpu) -> dict[str, Any]:
    """Return a GPU's driver data, limits, errors, links and processes, as plain values without None."""
    identity = gpu.identity
    values = asdict(identity)
    if identity.responds:
        values |= {"used_gib": gpu.used_gib(), **asdict(gpu.limits()), **asdict(gpu.errors()), **asdict(gpu.links())}
        values["processes"] = len(ids) if (ids := gpu.process_ids()) is not None else None
        values["local_cores"] = count_local_cores(identity.numa_node)
    return {"responds": identity.responds} | {name: value for name, value in values.items() if value is not None}


def count_local_cores(numa_node: int | None, sys: Path = Path("/sys")) -> int | None:
    """Return the number of cores on a NUMA node that this process may use, or None if unknown."""
    here = parse_numbers(_read(sys / f"devices/system/node/node{numa_node}/cpulist"))
    return len(here & os.sched_getaffinity(0)) if here else None


def parse_numbers(text: str) -> set[int]:
    """Return the numbers in a list in the kernel's format, such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def read_kernel(proc: Path = Path("/proc")) -> dict[str, Any]:
    """Return the Linux kernel's release and the settings that affect GPUs. `is_guest` is true in a virtual machine."""
    words = _read(proc / "cmdline").split()
    settings = {
        "release": platform.release(),
        "command_line": [w for w in words if w.partition("=")[0].partition(".")[0] in KERNEL_PARAMETERS],
        "is_guest": "hypervisor" in _cpuinfo("flags", proc).split(),
    }
    numa_balancing = _read(proc / "sys/kernel/numa_balancing").strip()
    return settings | ({"numa_balancing": numa_balancing} if numa_balancing else {})
