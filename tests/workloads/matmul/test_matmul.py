"""The matrix product: its result and tolerance, operands and backends, on the device that the tests run on."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.api.contract import Infeasible, Measurement, ParameterMismatch, Rank
from workloads.api.recipes import RECIPES, unsupported_rate_reason
from workloads.api.trial import describe_mismatches, run_trial
from workloads.instruments import device as devices
from workloads.instruments import timing
from workloads.instruments.products import E2M1, TOLERANCE, relative_error, take_rows, tolerance
from workloads.matmul import Matmul, MatmulParameters
from workloads.matmul.operands import make_operands
from workloads.models.model import TRAINED_MODELS, GemmShape, gemm_shape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_measurement_reports_the_executed_parameters(device: str) -> None:
    parameters = MatmulParameters(m=64, n=192, k=128, dtype="fp32", repeats=5)
    measurement = Matmul().run(parameters, Rank(device=device))
    assert measurement.flops_per_step == 2 * 64 * 192 * 128
    assert len(measurement.step_times_s) == 5
    assert all(time_s > 0 for time_s in measurement.step_times_s)
    assert measurement.executed == {name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
    assert measurement.metrics["relative_error"] < TOLERANCE["fp32"]
    # torch.__version__ has a class of its own: a driver that unpickles it imports torch.
    assert {type(value) for value in measurement.machine_info.values()} <= {str, int, float, bool, type(None)}


@pytest.mark.parametrize("device", DEVICES)
def test_a_sustained_run_lasts_as_long_as_requested_and_is_as_fast_on_a_cool_machine(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # whose rate never settles while other tests run; a window is short even on a busy machine
        monkeypatch.setitem(timing.LONGEST_SETTLING_S, "cpu", 0.1)
        monkeypatch.setattr(timing, "WINDOW_S", 0.005)
    size = 256 if device == "cpu" else 4096
    parameters = MatmulParameters(m=size, n=size, k=size, dtype="fp32", statistic="median_warm", sustained_s=0.5)
    measurement = Matmul().run(parameters, Rank(device=device))
    assert len(measurement.sustained_step_times_s) >= 2 and measurement.metrics["sustained_settling_s"] > 0
    # The fastest: on a busy processor the median, and every window, may be dominated by the scheduler.
    burst, sustained = min(measurement.step_times_s), min(measurement.sustained_step_times_s)
    assert 0.2 < sustained / burst < (5 if device == "cuda" else 50)
    assert Matmul().run(replace(parameters, sustained_s=0.0), Rank(device=device)).sustained_step_times_s == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 4096])
def test_a_correct_product_is_within_the_tolerance_and_a_wrong_one_is_not(dtype: torch.dtype, k: int) -> None:
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    a, b = torch.randn(96, k, dtype=dtype), torch.randn(k, 80, dtype=dtype)
    c = torch.mm(a, b)
    assert relative_error((a, b, c)) < TOLERANCE[name]
    halved = torch.mm(a[:, : k // 2], b[: k // 2])  # half of the sum is missing
    assert relative_error((a, b, halved)) > TOLERANCE[name]
    stale = c.clone()
    stale[-1] = 0  # a row that was never written
    assert relative_error((a, b, stale)) > TOLERANCE[name]


def test_a_product_of_nan_is_never_correct() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert not relative_error((a, b, torch.full((8, 8), torch.nan))) <= TOLERANCE["fp32"]


def test_a_product_that_does_not_fit_in_memory_is_infeasible() -> None:
    with pytest.raises(Infeasible, match="out of memory"):
        run_trial("matmul", {"m": 2**24, "n": 2**24, "k": 2**24, "dtype": "fp32"}, Rank(device="cpu"))


def test_an_error_in_the_code_is_raised_unchanged() -> None:
    with pytest.raises(RuntimeError, match="told to raise"):
        run_trial("probe", {"behaviour": "raise"}, Rank())


def test_executed_parameters_must_equal_the_requested_ones() -> None:
    measurement = Measurement(executed={"m": 64, "n": 64}, step_times_s=(1.0,))
    assert describe_mismatches(measurement, {"m": 64}) == ""
    assert describe_mismatches(measurement, {"m": 128}) == "m=64, requested 128"
    assert describe_mismatches(measurement, {"k": 1}) == "k=<missing>, requested 1"
    with pytest.raises(ParameterMismatch, match="rank 0 executed x=3"):
        run_trial("probe", {"x": 2, "behaviour": "lie"}, Rank())


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_layout_gives_the_product_and_is_the_layout_in_memory(layout: str, device: str) -> None:
    parameters = MatmulParameters(m=96, n=64, k=160, dtype="fp32", layout=layout, repeats=3)  # type: ignore[arg-type]
    generator = torch.Generator(device=device).manual_seed(0)
    operands = make_operands(parameters, torch.device(device), generator, "sm90")
    assert operands.a.is_contiguous() == (layout[0] == "n") and operands.b.is_contiguous() == (layout[1] == "n")
    torch.testing.assert_close(operands.multiply(), operands.a @ operands.b)
    assert Matmul().run(parameters, Rank(device=device)).machine_info["layout"] == layout


@given(
    st.sampled_from(list(TRAINED_MODELS)),
    st.sampled_from(["qkv", "output", "gate_up", "down", "lm_head"]),
    st.integers(1, 10_000),
)
def test_the_three_products_of_a_layer_cost_the_same(model: str, layer: str, tokens: int) -> None:
    """Forward and both gradients sum over inputs, outputs and tokens respectively."""
    passes = ("forward", "input_gradient", "weight_gradient")
    products = [gemm_shape(model, layer, pass_name, tokens) for pass_name in passes]
    assert len({shape.m * shape.n * shape.k for shape in products}) == 1
    assert len({tuple(sorted((shape.m, shape.n, shape.k))) for shape in products}) == 1


def test_the_products_of_a_model_are_those_of_its_checkpoint() -> None:
    assert gemm_shape("llama3_8b", "qkv", "forward", 10) == GemmShape(10, 4096 + 2 * 1024, 4096, "nt")
    assert gemm_shape("llama3_70b", "gate_up", "input_gradient", 10) == GemmShape(10, 8192, 2 * 28672, "nn")
    assert gemm_shape("qwen2_5_7b", "qkv", "weight_gradient", 10) == GemmShape(3584 + 2 * 4 * 128, 3584, 10, "tn")
    assert gemm_shape("qwen2_5_7b", "lm_head", "forward", 10) == GemmShape(10, 152064, 3584, "nt")


def test_either_a_model_or_a_shape_must_be_given() -> None:
    with pytest.raises(ValueError, match="m, n and k have to be given"):
        MatmulParameters(m=4, n=4)
    with pytest.raises(ValueError, match=r"m and model: .*set m=null"):
        MatmulParameters(m=4, model="llama3_8b")
    parameters = MatmulParameters(model="llama3_8b", tokens=8, layer="output", dtype="fp32", repeats=2)
    measurement = Matmul().run(parameters, Rank())
    assert measurement.metrics["m"] == 8 and measurement.metrics["n"] == measurement.metrics["k"] == 4096


def test_a_format_without_matrix_units_is_refused_with_the_reason() -> None:
    with pytest.raises(Infeasible, match="dtype=fp8_rowwise is emulated on this device: cpu lacks fp8"):
        Matmul().run(MatmulParameters(m=64, n=64, k=64, dtype="fp8_rowwise"), Rank())


def test_a_backend_for_gpus_is_refused_on_a_cpu() -> None:
    with pytest.raises(Infeasible, match="backend=triton is for GPUs only"):
        Matmul().run(MatmulParameters(m=64, n=64, k=64, dtype="fp32", backend="triton"), Rank())


def test_the_measurement_has_the_requested_statistic_of_the_repeats() -> None:
    measurement = Matmul().run(MatmulParameters(m=8, n=8, k=8, dtype="fp32", statistic="fastest_warm"), Rank())
    assert measurement.statistic == "fastest"


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_operands_of_8_and_4_bits_hold_normal_values_or_all_values(recipe: str) -> None:
    """A CPU cannot multiply them, but it can decode them."""
    parameters = MatmulParameters(m=64, n=48, k=96, dtype=recipe)  # type: ignore[arg-type]
    operands = make_operands(parameters, torch.device("cpu"), torch.Generator().manual_seed(0), "sm100")
    a = take_rows(operands.a, torch.arange(64))
    assert a.shape == (64, 96)
    assert take_rows(operands.b.t(), torch.arange(48)).shape == (48, 96)
    if recipe != "mxfp8":
        assert set(a.flatten().tolist()) == set(E2M1.tolist())
    else:
        assert abs(float(a.std()) - 1) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_native_format_gives_a_correct_product(recipe: str) -> None:
    device = torch.device("cuda", 0)
    parameters = MatmulParameters(m=1024, n=2048, k=512, dtype=recipe, sustained_s=0.05)  # type: ignore[arg-type]
    if unsupported_rate_reason(recipe, devices.architecture(device)):
        with pytest.raises(Infeasible, match=recipe):
            Matmul().run(parameters, Rank(device="cuda"))
        return
    measurement = Matmul().run(parameters, Rank(device="cuda"))
    assert 0 < measurement.metrics["relative_error"] < tolerance(measurement.matrix_dtype, devices.architecture(device))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "cublas", "cublaslt", "triton"])
@pytest.mark.parametrize("output_dtype", ["auto", "fp32"])
def test_every_backend_gives_the_product(backend: str, output_dtype: str) -> None:
    shape = {"m": 512, "n": 1024, "k": 256}
    parameters = {**shape, "backend": backend, "output_dtype": output_dtype, "accumulation": "fp32"}
    if backend == "triton" and output_dtype == "fp32":
        with pytest.raises(Infeasible, match=f"backend={backend}"):
            run_trial("matmul", parameters, Rank(device="cuda"))
        return
    measurement = run_trial("matmul", parameters, Rank(device="cuda"))
    assert measurement.machine_info["output_dtype"] == ("float32" if output_dtype == "fp32" else "bfloat16")


MI300X, H200 = "gfx942:sramecc+:xnack-", "sm90"


def drop_bits(x: torch.Tensor, bits: int, *, nearest: bool) -> torch.Tensor:
    """Return fp32 numbers without the last bits of their mantissa, rounded to nearest or truncated."""
    integers = x.view(torch.int32)
    if nearest:
        integers = integers + (1 << (bits - 1))
    return (integers & -(1 << bits)).view(torch.float32)


@pytest.fixture(params=[512, 4096])
def operands(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, request.param, generator=generator), torch.randn(request.param, 64, generator=generator)


def error_of(operands: tuple[torch.Tensor, torch.Tensor], bits: int, *, nearest: bool) -> float:
    a, b = operands
    rounded = [drop_bits(x, bits, nearest=nearest).double() for x in operands]
    return relative_error((a, b, (rounded[0] @ rounded[1]).float()))


def test_tf32_passes_with_the_rounding_of_either_vendor(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    rounded, truncated = (error_of(operands, 13, nearest=nearest) for nearest in (True, False))
    assert rounded == pytest.approx(2.9e-4, rel=0.1) and rounded < tolerance("tf32", H200)
    assert truncated == pytest.approx(7.7e-4, rel=0.1) and 2 * truncated < tolerance("tf32", MI300X)


def test_a_product_in_bf16_does_not_pass_for_tf32(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert error_of(operands, 16, nearest=True) > max(tolerance("tf32", H200), tolerance("tf32", MI300X))
