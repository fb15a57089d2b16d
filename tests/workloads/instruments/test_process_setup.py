"""Segments grow where the device supports it and the environment does not say otherwise."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.conftest import environment
from tests.support.amd_device import amd_device
from workloads.instruments import process_setup
from workloads.instruments.process_setup import enable_expandable_segments, supports_expandable_segments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_segments_grow_on_cuda_and_on_rocm_from_7() -> None:
    assert supports_expandable_segments(GPU) and not supports_expandable_segments(CPU)
    for hip, expected in (("6.4.43484", False), ("7.0.51831", True), ("7.2.26015", True), ("10.0.1", True)):
        with amd_device(hip=hip):
            assert supports_expandable_segments(GPU) == expected


@pytest.fixture
def initialized(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Return what the first use of a GPU finds in PYTORCH_ALLOC_CONF, of an environment without settings."""
    for name in process_setup.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    enable_expandable_segments.cache_clear()
    values: list[str | None] = []
    monkeypatch.setattr(torch, "empty", lambda *_, **__: values.append(os.environ.get("PYTORCH_ALLOC_CONF")))
    yield values
    enable_expandable_segments.cache_clear()


def test_a_device_without_them_gets_no_settings(initialized: list[str | None]) -> None:
    enable_expandable_segments(CPU)
    with amd_device(hip="6.4.43484"):
        enable_expandable_segments(GPU)
    assert initialized == []


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
    name: str, value: str, expected: list[str], initialized: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    before = dict(os.environ)
    enable_expandable_segments(GPU)
    assert initialized == expected and dict(os.environ) == before


@pytest.mark.parametrize(
    ("enabled_before", "settings", "named"), [(False, "", 1), (True, "", 0), (False, "expandable_segments:False", 0)]
)
def test_a_setting_that_comes_too_late_is_named_unless_an_earlier_trial_or_the_user_made_it(
    enabled_before: bool,
    settings: str,
    named: int,
    initialized: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    if enabled_before:
        enable_expandable_segments(GPU)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    enable_expandable_segments(GPU)
    assert len(initialized) == enabled_before
    assert capsys.readouterr().err.count("expandable_segments is off") == named


@pytest.mark.gpu
def test_the_allocator_of_a_gpu_says_what_it_does() -> None:
    """In a process of its own, which has not used the GPU yet."""
    program = """
import torch
from workloads.instruments import process_setup
gpu = torch.device("cuda", 0)
process_setup.enable_expandable_segments(gpu)
kept = torch.empty(1 << 26, device=gpu)
print(process_setup.describe_segments(gpu)["expandable_segments"] == process_setup.supports_expandable_segments(gpu))
"""
    variables = {name: value for name, value in environment().items() if name not in process_setup.VARIABLES}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert result.stdout.split() == ["True"], result.stderr
