"""tinygrad runs on the device of the worker, by the interface that PyTorch is built for."""

import importlib.util

import pytest
import torch

from tests.support.amd_device import amd_device
from workloads.api.contract import Infeasible
from workloads.matmul.tinygrad_backend import device_name


def test_the_device_is_named_by_the_build_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert device_name(torch.device("cuda", 0)) == "CUDA:0"
    with amd_device():
        assert device_name(torch.device("cuda", 0)) == "HIP:0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Infeasible, match="tinygrad is not installed"):
        device_name(torch.device("cuda", 0))
