"""Copies between the GPUs of a host by copy engines, which leave all multiprocessors free for computation.

NCCL's collectives run on multiprocessors. While matrix products run, two H200s receive 129 GB/s through NCCL and 370
GB/s through copy engines; NCCL slows the products by 4%, while copies do not (benchmarks/results/offload_gang_h100.md).

The memory comes from CUDA itself, since copies between PyTorch's expandable segments reach only 113 GB/s. Streams wait
for each other through counters in the same memory, without a kernel. The calls are documented at
https://docs.nvidia.com/cuda/cuda-driver-api.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALIGNMENT_BYTES = 512
BLOCK_BYTES = 2 << 20  # smaller allocations can share a block, and a handle opens the whole block
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag defined


class GangOutOfMemory(torch.OutOfMemoryError):
    """A rank ran out of memory before it exchanged anything. All ranks raise it."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)  # CU_IPC_HANDLE_SIZE


class CudaDriver:
    """The CUDA driver on the current device and stream. Every call raises RuntimeError if the driver rejects it.

    Raises torch.OutOfMemoryError if memory runs out. Addresses are integers. Copies and counters run in stream order.
    """

    def __init__(self, device: torch.device) -> None:
        torch.empty(1, device=device)  # makes the context current
        self._device, self._library = device, ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: Any) -> None:
        if error := getattr(self._library, name)(*arguments):
            kind = torch.OutOfMemoryError if error == 2 else RuntimeError  # 2: CUDA_ERROR_OUT_OF_MEMORY
            raise kind(f"{name} failed with error {error}")

    def allocate(self, size_bytes: int) -> int:
        """Allocate zeroed memory and return its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size_bytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))
        self._call("cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Return the address of memory that another process has exported."""
        address, flags = ctypes.c_uint64(), ctypes.c_uint(LAZY_PEER_ACCESS)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), flags)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def view(self, address: int, size_bytes: int) -> Tensor:
        # https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
        interface = {"shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        return torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": interface})(), device=self._device)

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        addresses = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(size_bytes), self._stream())

    def write(self, address: int, value: int) -> None:
        """Write a number, preceded by a memory fence, which the CUDA driver adds by default."""
        self._queue_counter("cuStreamWriteValue32_v2", address, value)

    def wait(self, address: int, value: int) -> None:
        """Make the stream wait until a 32-bit counter reaches `value`, modulo 2^32. Only NIC writes need a flush."""
        self._queue_counter("cuStreamWaitValue32_v2", address, value)

    def _queue_counter(self, name: str, address: int, value: int) -> None:
        self._call(name, self._stream(), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(0))

    def _stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


class PeerMemory:
    """Flat device tensors that the group's other processes copy into. Every process has tensors of the same sizes."""

    def __init__(self, driver: CudaDriver, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        """Allocate a tensor of zeros for each size, and map the other processes' tensors. If the driver refuses one
        process, all processes raise RuntimeError, or GangOutOfMemory if memory ran out."""
        self._driver, self._rank, ranks = driver, dist.get_rank(), dist.get_world_size()
        padded = [-(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for numel in sizes]
        starts = list(accumulate(padded, initial=ALIGNMENT_BYTES))  # one counter per process comes first
        self.size_bytes = -(-starts[-1] // BLOCK_BYTES) * BLOCK_BYTES
        self._own, self._met, self._others = 0, 0, dict[int, int]()
        others, failure = [n for n in range(ranks) if n != self._rank], "memory that GPUs share: "
        try:
            handles = agree(self._export, failure)
            agree(lambda: self._others.update((n, driver.open(handles[n])) for n in others), failure)
        except RuntimeError:
            self.close()
            raise
        memory = driver.view(self._own, self.size_bytes)
        self.tensors = [
            memory[start : start + numel * dtype.itemsize].view(dtype)
            for start, numel in zip(starts, sizes, strict=False)
        ]

    def _export(self) -> bytes:
        self._own = self._driver.allocate(self.size_bytes)
        return self._driver.export(self._own)

    def push(self, copies: Sequence[tuple[int, Tensor, Tensor]]) -> None:
        """Queue copies, given as (process, target, source), to other processes on the current stream.

        A target is part of this process's tensors; the copy writes the same part of the other process's tensors, once
        all processes' streams have reached this point. Work queued afterwards sees the copies of all processes.
        """
        self._meet()
        for number, target, source in copies:
            address = self._others[number] + target.data_ptr() - self._own
            self._driver.copy(address, source.data_ptr(), source.nbytes)
        self._meet()

    def _meet(self) -> None:
        self._met = (self._met + 1) % 2**32
        own = self._own + 4 * self._rank
        self._driver.write(own, self._met)
        for address in self._others.values():
            self._driver.copy(address + 4 * self._rank, own, 4)
        for number in self._others:
            self._driver.wait(self._own + 4 * number, self._met)

    def close(self) -> None:
        """Free the memory. All processes call this together; the tensors must not be used afterwards."""
        for address in self._others.values():
            self._driver.close(address)
        dist.barrier()
        if self._own:
            self._driver.free(self._own)


def open_peer_memory(device: torch.device, dtype: torch.dtype, sizes: Sequence[int]) -> PeerMemory | None:
    """Return memory that the GPUs share, or None if they cannot share it, as on AMD GPUs and CPUs."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        return PeerMemory(CudaDriver(device), dtype, sizes)
    except RuntimeError:
        return None


def agree(call: Callable[[], Any], failure: str = "") -> list[Any]:
    """Run a call in all processes and return all results. If one fails, all raise RuntimeError or GangOutOfMemory."""
    result: Any
    try:
        result = call()
    except RuntimeError as error:
        result = error
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if errors := [result for result in results if isinstance(result, RuntimeError)]:
        kind = GangOutOfMemory if isinstance(errors[0], torch.OutOfMemoryError) else RuntimeError
        raise kind(f"{failure}{errors[0]}") from (result if isinstance(result, RuntimeError) else None)
    return results
