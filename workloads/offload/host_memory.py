"""Host memory within a budget, on the GPU's NUMA node: copies from other nodes cross the link between processors.

mbind binds pages, and get_mempolicy reads their nodes back (man 2 mbind, get_mempolicy). Both calls act on a range of
memory, so it does not matter which thread first touches a page or where that thread runs. Docker's default seccomp
profile allows these calls only with the capability SYS_NICE. Otherwise, the kernel decides where memory is placed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import torch

from workloads.api.contract import OutOfMemory, Scalar
from workloads.api.host import available_memory_bytes, parse_numbers
from workloads.instruments.telemetry import find_gpu

# System call numbers: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
MBIND = {"x86_64": 237, "aarch64": 235}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_PREFERRED = 1  # a node without enough free memory is not an error: other nodes provide the rest
MPOL_MF_MOVE = 2  # also move pages that were already touched
MPOL_F_NODE, MPOL_F_ADDR = 1, 2
MAX_NODES = 1024
SAMPLED_PAGES = 64
ALIGNMENT_BYTES = 512


class Arena:
    """The only host memory for a run's state: one block, pinned if there is a GPU. Its parts are never freed."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        """Allocate the block on the GPU's NUMA node and pin it. Raises OutOfMemory if the host cannot provide it."""
        self.size_bytes, self.used_bytes = size_bytes, 0
        if size_bytes > (available := available_memory_bytes()):
            raise OutOfMemory(
                f"the arena for host_gib needs {size_bytes / 2**30:.1f} GiB of host memory, "
                f"{available / 2**30:.1f} GiB are available"
            )
        self._block = torch.empty(size_bytes, dtype=torch.uint8)
        node = node_of(device)
        error = bind_pages(self._block, node) if node is not None else ""
        self._block.zero_()  # pinning touched pages takes an eighth of the time
        self.placement: dict[str, Scalar] = {}  # the nodes of the GPU and of the pages, if the machine has several
        if node is not None:
            nodes = " ".join(map(str, sorted(read_nodes(self._block)))) or "unknown"
            nodes += f" (not bound: {error})" if error else ""
            self.placement = {"gpu_numa_node": node, "host_numa_nodes": nodes}
        self._pinned = device.type == "cuda" and size_bytes > 0
        if self._pinned:
            error = torch.cuda.cudart().cudaHostRegister(self._block.data_ptr(), size_bytes, 0)
            if int(error) != 0:
                raise OutOfMemory(
                    f"cudaHostRegister failed with error {int(error)}: the host does not pin {size_bytes / 2**30:.1f} "
                    "GiB for host_gib"
                )

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of `numel` elements. Raises OutOfMemory if the arena has too little memory left."""
        size_bytes = numel * dtype.itemsize
        start = -(-self.used_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if start + size_bytes > self.size_bytes:
            missing = start + size_bytes - self.size_bytes
            raise OutOfMemory(f"the host arena of {self.size_bytes / 2**30:.2f} GiB is {missing} bytes too small")
        self.used_bytes = start + size_bytes
        return self._block[start : start + size_bytes].view(dtype)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        """Unpin the block. Its tensors must not be used afterwards."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._block.data_ptr())
            self._pinned = False


def node_of(device: torch.device) -> int | None:
    """Return a GPU's NUMA node among the nodes that this process may use; None if unknown or if there is only one."""
    gpu, nodes = find_gpu(device), _usable_nodes()
    node = gpu.identity.numa_node if gpu else None
    return node if len(nodes) > 1 and node in nodes else None


def _usable_nodes(root: Path = Path("/")) -> set[int]:
    """Return the nodes that have memory and that this process's cpuset allows; empty if they are unknown."""
    try:
        status = (root / "proc/self/status").read_text()
        with_memory = (root / "sys/devices/system/node/has_memory").read_text()
    except OSError:
        return set()
    allowed = next((line for line in status.splitlines() if line.startswith("Mems_allowed_list:")), ":")
    return parse_numbers(with_memory) & parse_numbers(allowed.partition(":")[2])


def bind_pages(block: torch.Tensor, node: int) -> str:
    """Place the pages of a block on a node if the node has enough memory. Return the reason for a failure, or ""."""
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    start, size = _whole_pages(block)
    policy = ctypes.c_int(MPOL_PREFERRED), mask, ctypes.c_ulong(MAX_NODES), ctypes.c_uint(MPOL_MF_MOVE)
    return _call(MBIND, ctypes.c_void_p(start), ctypes.c_ulong(size), *policy)


def read_nodes(block: torch.Tensor) -> set[int]:
    """Return the NUMA nodes of sampled pages in a touched block; empty if the kernel does not report them."""
    start, size = _whole_pages(block)
    nodes, flags = set(), ctypes.c_ulong(MPOL_F_NODE | MPOL_F_ADDR)
    for offset in range(0, size, max(mmap.PAGESIZE, size // SAMPLED_PAGES // mmap.PAGESIZE * mmap.PAGESIZE)):
        node, address = ctypes.c_int(), ctypes.c_void_p(start + offset)
        if not _call(GET_MEMPOLICY, ctypes.byref(node), None, ctypes.c_ulong(0), address, flags):
            nodes.add(node.value)
    return nodes


def _whole_pages(block: torch.Tensor) -> tuple[int, int]:
    start = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (block.data_ptr() + block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(0, end - start)


def _call(numbers: dict[str, int], *arguments: object) -> str:
    number = numbers.get(platform.machine())
    if number is None:
        return f"not known on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    return "" if libc.syscall(ctypes.c_long(number), *arguments) == 0 else os.strerror(ctypes.get_errno())
