"""Passes over a device's memory: bytes, results and what was executed."""

from __future__ import annotations

import pytest
import torch

from workloads.api.contract import Rank
from workloads.memory import MOVED, Memory, MemoryParameters

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("operation", MOVED)
@pytest.mark.parametrize("device", DEVICES)
def test_a_measurement_reports_the_bytes_that_it_moved(device: str, operation: str) -> None:
    parameters = MemoryParameters(operation=operation, mib=2, warmup=1, repeats=3)
    measurement = Memory().run(parameters, Rank(device=device))
    assert measurement.executed == {"operation": operation, "mib": 2, "warmup": 1, "repeats": 3}
    assert measurement.bytes_per_step == {"copy": 4, "read": 2, "write": 2}[operation] * 2**20


def test_a_copy_that_does_not_copy_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: self)
    with pytest.raises(ArithmeticError, match="operation=copy: the result is wrong"):
        Memory().run(MemoryParameters(mib=1, warmup=0, repeats=2), Rank())
