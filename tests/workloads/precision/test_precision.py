"""Low-precision formats and recipes. On a CPU they are emulated, so that only their numerics are tested."""

import importlib.util
from typing import Any

import pytest
import torch

from sweeper.metrics.derivation import derive
from tests.conftest import Workspace
from tests.support.amd_device import MI355X, amd_device
from workloads.api.contract import Infeasible, Machine, Measurement, Rank
from workloads.api.registry import load
from workloads.api.trial import run_trial
from workloads.precision import formats, layers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GEMM = {"model": "llama_tiny", "layer": "gate_up", "tokens": 128, "repeats": 3}

# The SQNR in dB of rounded normal numbers: e4m3 keeps 3 bits of mantissa, e2m1 one, and nvfp4 has twice the scales.
EXPECTED_DB = {
    "bf16": (45, 60),
    "fp8_tensorwise": (27, 30),
    "fp8_rowwise": (27, 30),
    "fp8_blockwise": (27, 30),
    "mxfp8": (27, 30),
    "mxfp4": (14, 17),
    "nvfp4": (16, 19),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["forward", "input_gradient", "weight_gradient"])
@pytest.mark.parametrize("recipe", EXPECTED_DB)
def test_the_error_of_a_gemm_is_that_of_its_format(recipe: str, which: str, device: str) -> None:
    measured = run_trial("precision", {**GEMM, "recipe": recipe, "product": which}, Rank(device=device))
    low, high = EXPECTED_DB[recipe]
    assert low < measured.metrics["sqnr_db"] < high
    assert bool(measured.step_times_s) == (measured.machine_info["support"] == "native")


def test_an_emulated_format_has_an_error_but_no_speed() -> None:
    measured = run_trial("precision", {**GEMM, "recipe": "mxfp8"}, Rank())
    assert measured.unranked.startswith("emulated: cpu lacks") and measured.step_times_s == ()
    assert "tflops" not in derive([measured], {"fp8": 1000.0})


def test_a_shape_that_does_not_fit_the_blocks_is_infeasible_with_the_reason() -> None:
    parameters = {**GEMM, "recipe": "fp8_blockwise", "product": "weight_gradient", "tokens": 100}
    with pytest.raises(Infeasible, match="fp8_blockwise needs k in multiples of 128, not 100"):
        run_trial("precision", parameters, Rank())


def test_the_speed_up_is_the_ratio_of_the_medians() -> None:
    measured = Measurement(
        {}, (1.0, 1.0, 1.1) * 2, baseline_step_times_s=(2.0, 2.1, 2.0) * 2, bytes_per_step=3e9, flops_per_step=1e12
    )
    metrics = derive([measured], {}, bandwidth_tb_s=0.006)
    assert metrics["speedup"] == pytest.approx(2.0)
    assert metrics["speedup_ci_low"] <= 2.0 <= metrics["speedup_ci_high"]
    assert metrics["gb_per_s"] == pytest.approx(3.0) and metrics["bandwidth_utilization"] == pytest.approx(0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", ["rows", "columns", "both"])
@pytest.mark.parametrize(
    ("name", "bytes_per_number"),
    [("fp8_rowwise", 1), ("fp8_blockwise", 1), ("mxfp8", 1 + 1 / 32), ("mxfp4", 0.5 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)],
)
def test_a_cast_moves_the_bytes_of_its_format(name: str, bytes_per_number: float, direction: str, device: str) -> None:
    parameters = {"format": name, "direction": direction, "implementation": "eager", "rows": 256, "columns": 384}
    measured = run_trial("precision_casts", {**parameters, "repeats": 2}, Rank(device=device))
    casts = 2 if direction == "both" else 1
    assert measured.bytes_per_step == pytest.approx(256 * 384 * (2 + casts * bytes_per_number), rel=0.04)
    assert len(measured.step_times_s) == 2


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"format": "fp8_tensorwise", "direction": "columns"}, "one scale for the whole matrix"),
        ({"format": "mxfp8", "implementation": "kernel"}, "implementation=kernel needs a GPU"),
    ],
)
def test_an_unsupported_cast_is_infeasible_with_the_reason(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        run_trial("precision_casts", {"implementation": "eager", "rows": 128, "columns": 128, **parameters}, Rank())


def test_torchaos_kernels_are_refused_on_architectures_that_lack_them() -> None:
    from workloads.precision.casts import _kernel_cast

    for name, architecture, reason in [
        ("mxfp8", "sm90", "need sm100"),
        ("fp8_rowwise", "sm80", "need sm89"),
        ("nvfp4", "sm100", "mslk"),
    ]:
        with pytest.raises(Infeasible, match=reason):
            _kernel_cast(name, "rows", architecture)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("part", ["qkv", "mlp"])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "mxfp8"])
def test_the_errors_of_a_layer_are_those_of_its_recipe(
    recipe: str, part: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu" and part == "mlp":  # only bf16 is compiled on a CPU, of which one part is enough: 30 s for this
        monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    parameters = {"recipe": recipe, "part": part, "model": "llama_tiny", "tokens": 128, "repeats": 2, "warmup": 1}
    measured = run_trial("precision_linear", parameters, Rank(device=device))
    errors = [measured.metrics[f"sqnr_{name}db"] for name in ("", "input_gradient_", "weight_gradient_")]
    assert all(18 < error < 60 for error in errors)
    if recipe == "fp8_rowwise_gw_hp":  # weight gradients in bf16
        assert errors[2] > errors[0]
    assert measured.flops_per_step == 6 * 128 * (128 * 256 if part == "qkv" else 128 * 768 + 384 * 128)


def test_blockwise_layers_are_infeasible_where_they_are_not_native() -> None:
    parameters = {"recipe": "fp8_blockwise", "model": "llama_tiny", "tokens": 128}
    with pytest.raises(Infeasible, match="no emulation of its fp8_blockwise layer, and cpu lacks"):
        run_trial("precision_linear", parameters, Rank())


@pytest.mark.parametrize(
    ("workload", "parameters", "rocm", "reason"),
    [
        ("precision", {"recipe": "mxfp8"}, "6.4.1", "mxfp8 needs ROCm 7.0 or later; this PyTorch was built with 6.4.1"),
        ("precision", {"recipe": "mxfp4", "tokens": 16}, "7.2.1", "mxfp4 needs m in multiples of 32, not 16"),
    ],
)
def test_formats_of_gfx950_are_infeasible_before_the_gpu_is_touched(
    workload: str, parameters: dict[str, Any], rocm: str, reason: str
) -> None:
    """The GPU is a stand-in: a trial that got further would fail."""
    with amd_device(MI355X, rocm=rocm), pytest.raises(Infeasible, match=reason):
        run_trial(workload, {**GEMM, **parameters}, Rank(device="cuda"))


def test_torchaos_mxfp8_layer_is_infeasible_on_amd_gpus() -> None:
    layer = torch.nn.Linear(64, 64, bias=False)
    with pytest.raises(Infeasible, match="torchao's mxfp8 layer is for NVIDIA GPUs"):
        layers.apply_recipe(layer, "mxfp8", "gfx950:sramecc+:xnack-", tokens=64)
    assert layers.apply_recipe(layer, "mxfp8", "gfx942", tokens=64)[1].startswith("emulated")


def test_an_error_of_a_tenth_has_an_sqnr_of_20_db() -> None:
    x = torch.randn(64, 64)
    assert formats.sqnr_db(x, x + 0.1 * x) == pytest.approx(20, abs=1e-3)


@pytest.mark.soak
def test_a_sweep_keeps_emulated_trials_unranked(workspace: Workspace) -> None:
    overrides = ["workload=precision", "space.layer=qkv", "space.product=forward", "progress=never"]
    result = workspace.run(*overrides)
    assert result.code == 0, result.err
    assert "7 complete" in result.out and "every point of the space was tried" in result.out
    assert "not ranked by speed: emulated: cpu lacks fp8 matrix units" in result.out and "SQNR dB" in result.out
    runs = workspace.runs("trial")
    assert {run.data.tags["outcome"] for run in runs} == {"complete"}
    assert all("sqnr_db" in run.data.metrics for run in runs)
    assert sum("tflops" in run.data.metrics for run in runs) <= 1


def test_a_missing_torchao_is_infeasible_with_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else find_spec(name))
    with pytest.raises(Infeasible, match=r"torchao is not installed: pip install 'gpu-sweeper\[precision\]'"):
        run_trial("precision", {"recipe": "bf16"}, Rank())


def preview(workload: str, architecture: str) -> list[str]:
    """Return the lines that a plan shows for this architecture."""
    return load(workload).preview(None, Machine("gpu", architecture, 1, 1)).splitlines()


def test_a_plan_shows_what_is_native_on_the_device() -> None:
    assert "  fp8_rowwise     native" in preview("precision", "sm90")
    reason = "sm90 lacks units with a scale for each 32 (sm100, gfx950 or later)"
    assert f"  mxfp8           emulated: {reason}" in preview("precision", "sm90")
    assert "  mxfp8           native" in preview("precision", "sm100")
    assert "  fp8_rowwise_gw_hp  native" in preview("precision_linear", "gfx942")
    (blockwise,) = [line for line in preview("precision_linear", "gfx942") if "blockwise" in line]
    assert blockwise.startswith("  fp8_blockwise      unsupported: gfx942 lacks 1x128")
    (mxfp8,) = [line for line in preview("precision_linear", "gfx950") if "mxfp8" in line]
    assert mxfp8.startswith("  mxfp8              unsupported: torchao's mxfp8 layer is for NVIDIA GPUs")
    assert "  mxfp8           native" in preview("precision", "gfx950")
    assert "a cast is timed on any device" in preview("precision_casts", "gfx942")[-1]
    assert "is unknown" in preview("precision", "")[0]
