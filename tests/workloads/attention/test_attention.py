"""Attention: its results, the kernel that ran, its operations and the rules of kernels, on the device of the tests."""

from dataclasses import asdict, replace
from typing import get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.amd_device import amd_device
from workloads.api.contract import Infeasible, ParameterMismatch, Rank
from workloads.api.trial import run_trial
from workloads.attention import Attention, AttentionParameters, rules, run
from workloads.attention.rules import KernelName, unsupported_kernel_reason
from workloads.attention.run import TOLERANCE, build_calls, draw_inputs, selected
from workloads.llama.attention import exact_results, largest_error

SMALL = AttentionParameters(
    sequence_length=48, heads=4, kv_heads=2, head_size=16, dtype="fp32", statistic="median_warm", warmup=1, repeats=2
)


@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_measurement_reports_the_executed_parameters(mode: str, kernel: str) -> None:
    parameters = replace(SMALL, mode=mode, kernel=kernel, causal=kernel == "math")
    measurement = Attention().run(parameters, Rank())
    assert measurement.executed == {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    assert measurement.flops_per_step == parameters.flops and measurement.matrix_dtype == "fp32"
    assert measurement.metrics["relative_error"] < TOLERANCE["fp32"]


def test_the_operations_are_those_of_the_papers() -> None:
    """Flash attention's published rates at 16 sequences of 1,024 tokens and 16 heads of 128: 4·s²·heads·d·batch."""
    whole = AttentionParameters(sequence_length=1024, batch=16, heads=16, kv_heads=16, causal=False)
    assert whole.flops == 4 * 1024**2 * 16 * 128 * 16
    assert replace(whole, mode="backward").flops == 2.5 * whole.flops
    assert replace(whole, causal=True).flops / whole.flops == pytest.approx(0.5, rel=1e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("dtype", "kernel"), [("fp32", "flash"), ("bf16", "flash"), ("bf16", "math")])
def test_results_are_right_over_grouped_heads_and_several_sequences(causal: bool, dtype: str, kernel: str) -> None:
    parameters = replace(SMALL, batch=2, causal=causal, dtype=dtype, kernel=kernel)
    with selected(kernel):
        calls = build_calls(parameters, draw_inputs(parameters, torch.device("cpu"), torch.Generator().manual_seed(1)))
        results = (calls.forward(), *calls.backward())
    inputs = calls.inputs
    *exact, _ = exact_results(inputs.q, inputs.k, inputs.v, inputs.d_out, causal=causal)
    assert calls.kernel == kernel
    assert largest_error(results, exact) < TOLERANCE[dtype]
    *wrong, _ = exact_results(inputs.q, inputs.k, inputs.v, inputs.d_out, causal=not causal)
    for result, other in zip(results, wrong, strict=True):
        assert largest_error([result], [other]) > TOLERANCE[dtype]
    assert not largest_error([results[0] * torch.nan], exact[:1]) <= TOLERANCE[dtype]


def test_the_reference_is_the_same_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = draw_inputs(SMALL, torch.device("cpu"), torch.Generator().manual_seed(1))
    whole = exact_results(inputs.q, inputs.k, inputs.v, inputs.d_out, causal=True)
    monkeypatch.setattr("workloads.llama.attention.CHUNK_QUERIES", 20)
    parts = exact_results(inputs.q, inputs.k, inputs.v, inputs.d_out, causal=True)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", ["forward", "backward"])
def test_a_wrong_result_fails_the_trial(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functional.scaled_dot_product_attention

    def attend_to_all(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
        return attend(q, k, v, is_causal=False, enable_gqa=enable_gqa)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attend_to_all)
    with pytest.raises(ArithmeticError, match=f"{mode} attention by flash in fp32 is wrong: relative error"):
        Attention().run(replace(SMALL, mode=mode), Rank())


def test_another_kernel_than_the_requested_one_fails_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.KERNELS, "flash", replace(rules.KERNELS["flash"], backend="MATH"))
    with pytest.raises(ParameterMismatch, match="kernel=math, requested flash"):
        run_trial("attention", asdict(SMALL), Rank())


def test_unfused_attention_multiplies_in_the_type_of_its_inputs_and_the_setting_is_restored() -> None:
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    with selected("math"):
        assert (
            torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() and not torch.backends.cuda.flash_sdp_enabled()
        )
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == before
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("cpu bf16", "flash math"),
        ("sm75", "efficient math"),
        ("sm80", "flash cudnn efficient math"),
        ("sm90", "flash cudnn efficient math flash4"),
        ("sm100", "flash cudnn efficient math flash4"),
        ("sm120", "flash cudnn efficient math"),
        ("gfx942:sramecc+:xnack-", "math aotriton ck aotriton_efficient aiter flash_attn"),
        ("gfx1100", "math aotriton aotriton_efficient"),
    ],
)
def test_a_device_has_these_kernels(architecture: str, names: str) -> None:
    supported = [name for name in get_args(KernelName) if not unsupported_kernel_reason(name, architecture)]
    assert supported == names.split()


def test_a_kernel_that_the_device_lacks_is_refused_with_the_reason() -> None:
    with pytest.raises(Infeasible, match=r"kernel=cudnn is for an NVIDIA GPU .*; this device is cpu"):
        Attention().run(replace(SMALL, kernel="cudnn"), Rank())
    fp32 = replace(SMALL, kernel="flash")
    assert rules.unsupported_reason(fp32, "sm90") == "kernel=flash does not support dtype=fp32: set one of bf16, fp16"
    assert rules.unsupported_reason(fp32, "cpu") == ""


def test_a_library_that_this_pytorch_lacks_is_infeasible() -> None:
    with pytest.raises(Infeasible, match=r"kernel=flash4: pip install 'gpu-sweeper\[flash4\]'"), selected("flash4"):
        pass
    with amd_device(), pytest.raises(Infeasible, match="kernel=ck: this PyTorch is built without CK"), selected("ck"):
        pass


def test_a_product_of_fp32_by_tf32_has_no_peak() -> None:
    efficient = replace(SMALL, kernel="efficient")
    assert rules.matrix_dtype(efficient, "sm90") == "tf32x3"
    assert rules.matrix_dtype(efficient, "sm70") == "fp32"
    assert rules.matrix_dtype(replace(efficient, dtype="bf16"), "sm90") == "bf16"


def test_heads_of_keys_must_divide_those_of_queries() -> None:
    with pytest.raises(ValueError, match="kv_heads=3 does not divide heads=4"):
        AttentionParameters(heads=4, kv_heads=3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["forward", "backward"])
@pytest.mark.parametrize("kernel", get_args(KernelName))
def test_every_kernel_of_a_gpu_is_right_and_read_back(kernel: KernelName, mode: str) -> None:
    parameters = AttentionParameters(sequence_length=1000, heads=8, kv_heads=2, mode=mode, kernel=kernel, repeats=3)
    try:
        measurement = Attention().run(parameters, Rank(device="cuda"))
    except Infeasible as reason:
        pytest.skip(str(reason))
    assert measurement.executed["kernel"] == kernel
    assert measurement.metrics["relative_error"] < TOLERANCE["bf16"]


@pytest.mark.gpu
def test_attention_on_a_gpu_sustains_less_than_it_reaches_in_a_burst_and_no_more_than_a_product() -> None:
    parameters = AttentionParameters(sequence_length=8192, kernel="math" if torch.version.hip else "cudnn")
    measurement = run.measure(replace(parameters, sustained_s=1.0), Rank(device="cuda"))
    burst, sustained = min(measurement.step_times_s), min(measurement.sustained_step_times_s)
    assert 0.8 < sustained / burst < 3
