"""Passes over a device's memory: bytes, results and what was executed."""

import pytest
import torch

from workloads.api.contract import Infeasible, Rank
from workloads.memory import MOVED, Memory, MemoryParameters

BETWEEN = ("to_device", "from_device")


@pytest.mark.parametrize(
    ("device", "operation"),
    [("cpu", operation) for operation in MOVED if operation not in BETWEEN]
    + [pytest.param("cuda", operation, marks=pytest.mark.gpu) for operation in MOVED],
)
def test_a_measurement_reports_the_bytes_that_it_moved(device: str, operation: str) -> None:
    parameters = MemoryParameters(operation=operation, mib=2, warmup=1, repeats=3)
    measurement = Memory().run(parameters, Rank(device=device))
    assert measurement.executed == {"operation": operation, "mib": 2, "warmup": 1, "repeats": 3}
    assert measurement.bytes_per_step == {"copy": 4, "update": 14}.get(operation, 2) * 2**20


@pytest.mark.parametrize("operation", BETWEEN)
def test_a_cpu_has_no_copies_between_host_and_device(operation: str) -> None:
    with pytest.raises(Infeasible, match="no memory of its own"):
        Memory().run(MemoryParameters(operation=operation, mib=1), Rank())


def test_an_update_that_does_not_move_the_weights_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: self.state[self.param_groups[0]["params"][0]].update(step=3)
    )
    with pytest.raises(ArithmeticError, match="operation=update: the result is wrong"):
        Memory().run(MemoryParameters(operation="update", mib=1, warmup=0, repeats=2), Rank())


def test_a_copy_that_does_not_copy_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source, **_: self)
    with pytest.raises(ArithmeticError, match="operation=copy: the result is wrong"):
        Memory().run(MemoryParameters(mib=1, warmup=0, repeats=2), Rank())
