"""`workload=memory`: the bandwidth of a device's memory or host link, measured by passes over a buffer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from workloads.api.contract import Infeasible, Measurement, Rank, Workload

# Bytes that each operation moves per byte of the buffer.
MOVED = {"copy": 2, "read": 1, "write": 1, "to_device": 1, "from_device": 1, "update": 7}


@dataclass(frozen=True)
class MemoryParameters:
    """Parameters of one pass over the memory.

    Attributes:
        operation: copy a buffer into another buffer, read it (a sum), write it (a constant), copy it from pinned memory
            on the host to the device or back, or update it as weights by PyTorch's fused AdamW: weights, gradients and
            two moments in fp32 are read, and all but the gradients are written.
        mib: size of a buffer; it must be much larger than the last-level cache, or the cache is measured.
        warmup: calls that are not timed.
        repeats: timed calls.
    """

    operation: Literal["copy", "read", "write", "to_device", "from_device", "update"] = "copy"
    mib: int = field(default=1024, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})


class Memory(Workload):
    """A pass over a device's memory whose result is checked."""

    name = "memory"
    Parameters = MemoryParameters
    measures = "bytes_per_step"
    benchmark_version = "memory/1"
    work = ("operation",)
    ways = ("warmup", "repeats")
    max_world_size = None  # each rank measures its own device, all at the same time
    finalists = 0  # each point is a result

    def run(self, parameters: MemoryParameters, rank: Rank) -> Measurement:
        """Time the operation on a buffer of ones, with the last-level cache flushed before each call on a GPU.

        Raises ArithmeticError if the result is wrong, and Infeasible for a copy between host and device on a CPU.
        """
        import torch

        from workloads.instruments import device as devices
        from workloads.instruments.runs import time_untainted
        from workloads.instruments.timing import event_metrics, time_steps

        device, operation = devices.device_of(rank), parameters.operation
        if operation in ("to_device", "from_device") and device.type == "cpu":
            raise Infeasible(f"operation={operation}: a CPU has no memory of its own beside the host's")
        source = torch.ones(parameters.mib * devices.MIB // 4, device=device)
        target = torch.zeros(1 if operation == "read" else source.numel(), device=device)
        if operation == "update":
            target.grad = source  # equal gradients move each weight by the learning rate in each step
            optimizer = torch.optim.AdamW([target], lr=1.0, weight_decay=0.0, eps=0.0, fused=True)
        if operation == "to_device":
            source = source.cpu().pin_memory()
        elif operation == "from_device":
            target = target.cpu().pin_memory()
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: target.fill_(1),
            "read": lambda: torch.sum(source, dim=0, keepdim=True, out=target),
            "update": lambda: optimizer.step(),
        }
        counts = {"warmup": parameters.warmup, "repeats": parameters.repeats}
        call = calls.get(operation, lambda: target.copy_(source, non_blocking=True))
        read = partial(time_steps, call, device, **counts, cold_cache=device.type != "cpu")
        times_s, readings = time_untainted(read, device)
        if operation == "read":
            is_right = abs(float(target) / source.numel() - 1) < 1e-3  # a sum of many ones in fp32 is rounded
        elif operation == "update":
            steps = float(optimizer.state[target]["step"])
            is_right = torch.allclose(target, source * -steps, rtol=1e-4)
        else:
            is_right = torch.equal(target.to(device), source.to(device))
        if not is_right:
            raise ArithmeticError(f"operation={operation}: the result is wrong")
        return Measurement(
            executed=vars(parameters) | {"mib": source.nbytes // devices.MIB, "repeats": len(times_s)},
            step_times_s=times_s,
            independent=True,
            bytes_per_step=MOVED[operation] * source.nbytes,
            metrics=readings.metrics() | event_metrics(device),
            machine_info=devices.machine_info(device) | readings.machine_info(),
        )
