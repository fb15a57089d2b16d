"""Segments grow where the device supports it and the environment does not say otherwise."""

from __future__ import annotations

import pytest
import torch

from tests.support.amd_device import amd_device
from workloads.offload import allocator
from workloads.offload.allocator import enable_expandable_segments, supports_expandable_segments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the settings that PyTorch gets, without a variable that names any."""
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings: list[str] = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    return settings


def test_segments_grow_on_cuda_and_on_rocm_from_7() -> None:
    assert supports_expandable_segments(GPU) and not supports_expandable_segments(CPU)
    for hip, expected in (("6.4.43484", False), ("7.0.51831", True), ("7.2.26015", True), ("10.0.1", True)):
        with amd_device(hip=hip):
            assert supports_expandable_segments(GPU) == expected


def test_a_device_without_them_gets_no_settings(applied: list[str]) -> None:
    enable_expandable_segments(CPU)
    with amd_device(hip="6.4.43484"):
        enable_expandable_segments(GPU)
    assert applied == []


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("PYTORCH_ALLOC_CONF", "", ["expandable_segments:True"]),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False", []),
        ("PYTORCH_HIP_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:False", []),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512", ["max_split_size_mb:512,expandable_segments:True"]),
    ],
)
def test_the_environments_settings_are_kept(
    name: str, value: str, expected: list[str], applied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    enable_expandable_segments(GPU)
    assert applied == expected


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.cuda.empty_cache()
    enable_expandable_segments(GPU)
    kept = torch.empty(1 << 26, device=GPU)
    assert allocator.describe(GPU) == {"expandable_segments": supports_expandable_segments(GPU)}
    del kept
