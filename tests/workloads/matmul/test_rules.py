"""What PyTorch refuses or ignores is infeasible before anything runs, by architecture."""

from typing import Any

import pytest

from tests.support.amd_device import MI355X as MI355X_PROPERTIES
from tests.support.amd_device import amd_device
from workloads.api.contract import Infeasible, Rank
from workloads.api.trial import run_trial
from workloads.matmul import MatmulParameters, rules

SHAPE = {"m": 128, "n": 128, "k": 128}
MI300X, MI355X = "gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack-"


@pytest.mark.parametrize(
    ("architecture", "parameters", "reason"),
    [
        ("sm90", {"backend": "ck"}, "backend=ck is for gfx90a, gfx942, gfx950 only"),
        ("sm90", {"backend": "tunable"}, "backend=tunable is for AMD GPUs only"),
        ("gfx1100", {"backend": "ck"}, "backend=ck is for gfx90a, gfx942, gfx950 only"),
        ("cpu bf16", {"backend": "cublas"}, "backend=cublas is for GPUs only"),
        ("cpu bf16", {"accumulation": "reduced"}, "accumulation=reduced is for NVIDIA GPUs only"),
        (MI300X, {"accumulation": "reduced"}, "accumulation=reduced is without effect on ROCm"),
        ("sm90", {"accumulation": "reduced", "dtype": "fp32"}, "does not exist for dtype=fp32"),
        ("sm90", {"accumulation": "reduced", "backend": "triton"}, "backend=triton sum in fp32"),
        (MI300X, {"backend": "ck", "output_dtype": "fp32"}, "CK has no such product"),
        (MI300X, {"backend": "tunable", "output_dtype": "fp32"}, "PyTorch passes TunableOp over"),
        (MI300X, {"backend": "cublaslt", "output_dtype": "fp32"}, "may run hipblasGemmEx instead of hipBLASLt"),
        (MI300X, {"backend": "cublas", "dtype": "tf32"}, "computes fp32 on ROCm, not tf32"),
        (MI300X, {"backend": "ck", "dtype": "tf32"}, "computes fp32 on ROCm, not tf32"),
        (MI300X, {"backend": "ck", "dtype": "fp8_rowwise"}, "backend=ck does not support dtype=fp8_rowwise"),
        (MI355X, {"backend": "tunable", "dtype": "mxfp4"}, "backend=tunable does not support dtype=mxfp4"),
        (MI300X, {"dtype": "fp8_rowwise", "output_dtype": "fp16"}, "on ROCm fp8_rowwise gives bf16 only"),
        (MI355X, {"dtype": "mxfp4", "output_dtype": "fp32"}, "on ROCm mxfp4 gives bf16 or fp16 only"),
        (MI355X, {"dtype": "mxfp8", "m": 16}, "mxfp8 needs m in multiples of 32, not 16"),
        (MI355X, {"dtype": "mxfp4", "k": 96}, "mxfp4 needs k in multiples of 64, not 96"),
        ("sm90", {"dtype": "fp8_rowwise", "layout": "nn"}, "dtype=fp8_rowwise supports layout=nt only"),
        ("sm90", {"backend": "triton", "output_dtype": "fp32"}, "backend=triton computes bf16, not output_dtype=fp32"),
    ],
)
def test_a_combination_without_effect_is_unsupported(
    architecture: str, parameters: dict[str, Any], reason: str
) -> None:
    assert reason in rules.unsupported_reason(MatmulParameters(**{**SHAPE, **parameters}), architecture)


@pytest.mark.parametrize(
    ("architecture", "parameters", "accumulation"),
    [
        ("sm90", {}, "reduced"),
        ("sm90", {"accumulation": "fp32"}, "fp32"),
        ("sm90", {"dtype": "fp8_rowwise"}, "reduced"),
        ("sm90", {"dtype": "fp8_blockwise"}, "fp32"),
        ("sm90", {"dtype": "fp32"}, "fp32"),
        ("sm90", {"backend": "triton", "output_dtype": "bf16"}, "fp32"),
        (MI300X, {}, "fp32"),
        (MI300X, {"dtype": "fp8_tensorwise", "backend": "tunable"}, "fp32"),
        (MI300X, {"backend": "ck"}, "fp32"),
        (MI300X, {"backend": "cublaslt", "dtype": "tf32"}, "fp32"),
        (MI300X, {"output_dtype": "fp32"}, "fp32"),
        ("cpu bf16", {}, "fp32"),
    ],
)
def test_auto_stands_for_what_the_device_does(architecture: str, parameters: dict[str, Any], accumulation: str) -> None:
    supported = MatmulParameters(**{**SHAPE, **parameters})
    assert rules.unsupported_reason(supported, architecture) == ""
    assert rules.executed_accumulation(supported, architecture) == accumulation


@pytest.mark.parametrize(
    ("rocm", "parameters", "reason"),
    [
        ("6.4.1", {"dtype": "mxfp8"}, "mxfp8 needs ROCm 7.0 or later"),
        ("7.2.1", {"dtype": "mxfp4", "k": 96}, "mxfp4 needs k in multiples of 64"),
        ("7.2.1", {"dtype": "fp8_rowwise", "output_dtype": "fp32"}, "fp8_rowwise gives bf16 only"),
        ("7.2.1", {"dtype": "tf32"}, "dtype=tf32 is unsupported on this device: gfx950"),
        ("7.2.1", {"accumulation": "reduced"}, "without effect on ROCm"),
    ],
)
def test_a_trial_on_an_mi355x_ends_infeasible_before_it_touches_the_gpu(
    rocm: str, parameters: dict[str, Any], reason: str
) -> None:
    """There is no GPU here: a trial that got further would fail."""
    with amd_device(MI355X_PROPERTIES, rocm=rocm), pytest.raises(Infeasible, match=reason):
        run_trial("matmul", {**SHAPE, **parameters}, Rank(device="cuda"))
