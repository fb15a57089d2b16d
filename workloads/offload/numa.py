"""Host memory on the NUMA node of a GPU: copies from another node cross the link between the processors.

Pages are bound by mbind, and their nodes are read back by get_mempolicy (man 2 mbind, get_mempolicy). Both act on a
range of memory, so that it does not matter which thread touches a page first, nor where it runs. Docker's default
seccomp profile allows them only with the capability SYS_NICE; without it memory is where the kernel puts it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from pathlib import Path

import torch

from workloads.instruments.telemetry import find_gpu

# The numbers of the calls: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
MBIND = {"x86_64": 237, "aarch64": 235}
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
MPOL_PREFERRED = 1  # a node without enough free memory is no error: the rest comes from another
MPOL_MF_MOVE = 2  # pages that are touched already move
MPOL_F_NODE, MPOL_F_ADDR = 1, 2
MAX_NODES = 1024
SAMPLED_PAGES = 64


def node_of(device: torch.device) -> int | None:
    """Return the NUMA node of a GPU among the nodes that this process may use; None if unknown, or if there is one."""
    gpu = find_gpu(device)
    node = gpu.identity.numa_node if gpu else None
    nodes = _usable_nodes()
    return node if len(nodes) > 1 and node in nodes else None


def _usable_nodes(root: Path = Path("/")) -> set[int]:
    """Return the nodes that have memory and that this process's cpuset allows; empty if the kernel does not say."""
    try:
        status = (root / "proc/self/status").read_text()
        with_memory = (root / "sys/devices/system/node/has_memory").read_text()
    except OSError:
        return set()
    allowed = next((line for line in status.splitlines() if line.startswith("Mems_allowed_list:")), ":")
    return parse_node_list(with_memory) & parse_node_list(allowed.partition(":")[2])


def parse_node_list(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it, such as `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def bind_pages(block: torch.Tensor, node: int) -> str:
    """Let the pages of a block come from a node where it has enough memory. Return why that failed; empty if not."""
    mask = (ctypes.c_ulong * (MAX_NODES // 64))()
    mask[node // 64] = 1 << (node % 64)
    start, size = _whole_pages(block)
    return _call(
        MBIND,
        ctypes.c_void_p(start),
        ctypes.c_ulong(size),
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(MAX_NODES),
        ctypes.c_uint(MPOL_MF_MOVE),
    )


def read_nodes(block: torch.Tensor) -> set[int]:
    """Return the nodes of some pages of a block that was touched; empty if the kernel does not tell."""
    start, size = _whole_pages(block)
    nodes = set()
    for offset in range(0, size, max(mmap.PAGESIZE, size // SAMPLED_PAGES // mmap.PAGESIZE * mmap.PAGESIZE)):
        node, address = ctypes.c_int(), ctypes.c_void_p(start + offset)
        flags = ctypes.c_ulong(MPOL_F_NODE | MPOL_F_ADDR)
        if not _call(GET_MEMPOLICY, ctypes.byref(node), None, ctypes.c_ulong(0), address, flags):
            nodes.add(node.value)
    return nodes


def _whole_pages(block: torch.Tensor) -> tuple[int, int]:
    """Return the address and the size in bytes of the pages that lie within a block."""
    start = -(-block.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (block.data_ptr() + block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(0, end - start)


def _call(numbers: dict[str, int], *arguments: object) -> str:
    """Call the kernel and return its error; empty if there is none."""
    number = numbers.get(platform.machine())
    if number is None:
        return f"not known on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    return "" if libc.syscall(ctypes.c_long(number), *arguments) == 0 else os.strerror(ctypes.get_errno())
