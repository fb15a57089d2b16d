"""The product itself, on whatever device the tests run on."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads import device as devices
from workloads.api.contract import Infeasible, Measurement, Rank
from workloads.api.recipes import RECIPES, unsupported_rate_reason
from workloads.api.trial import ParameterMismatch, differences, run_trial
from workloads.llama.shapes import MODELS, GemmShape, gemm_shape
from workloads.matmul import Matmul, MatmulParameters, operands, tinygrad_backend
from workloads.matmul.gemm import TOLERANCE, relative_error

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_measurement_says_what_ran(device: str) -> None:
    asked = MatmulParameters(m=64, n=192, k=128, dtype="fp32", repeats=5)
    measured = Matmul().run(asked, Rank(device=device))
    assert measured.flops_per_step == 2 * 64 * 192 * 128
    assert len(measured.step_times_s) == 5
    assert all(time_s > 0 for time_s in measured.step_times_s)
    assert measured.executed == {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    assert measured.metrics["relative_error"] < TOLERANCE["fp32"]
    # torch.__version__ is none of these: a driver that reads it loads all of torch.
    assert {type(fact) for fact in measured.machine_info.values()} <= {str, int, float, bool, type(None)}


@pytest.mark.parametrize("device", DEVICES)
def test_a_sustained_run_lasts_as_long_as_asked_and_costs_no_speed_on_a_cool_machine(device: str) -> None:
    size = 256 if device == "cpu" else 4096
    asked = MatmulParameters(m=size, n=size, k=size, dtype="fp32", statistic="median_warm", sustained_s=0.5)
    measured = Matmul().run(asked, Rank(device=device))
    assert len(measured.sustained_step_times_s) >= 2
    # The fastest: on a busy processor the median is the scheduler's, and so may be every window.
    burst, sustained = min(measured.step_times_s), min(measured.sustained_step_times_s)
    assert 0.2 < sustained / burst < (5 if device == "cuda" else 50)
    assert Matmul().run(replace(asked, sustained_s=0.0), Rank(device=device)).sustained_step_times_s == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [64, 4096])
def test_a_right_product_is_within_the_tolerance_and_a_wrong_one_is_not(dtype: torch.dtype, k: int) -> None:
    name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    a, b = torch.randn(96, k, dtype=dtype), torch.randn(k, 80, dtype=dtype)
    c = torch.mm(a, b)
    assert relative_error(a, b, c) < TOLERANCE[name]
    halved = torch.mm(a[:, : k // 2], b[: k // 2])  # half of the sum left out
    assert relative_error(a, b, halved) > TOLERANCE[name]
    stale = c.clone()
    stale[-1] = 0  # a row that was never written
    assert relative_error(a, b, stale) > TOLERANCE[name]


def test_a_product_of_nan_is_never_right() -> None:
    a, b = torch.randn(8, 8), torch.randn(8, 8)
    assert not relative_error(a, b, torch.full((8, 8), torch.nan)) <= TOLERANCE["fp32"]


def test_too_large_a_product_is_infeasible_not_failed() -> None:
    with pytest.raises(Infeasible, match="out of memory"):
        run_trial("matmul", {"m": 2**24, "n": 2**24, "k": 2**24, "dtype": "fp32"}, Rank(device="cpu"))


def test_an_error_in_the_code_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="told to raise"):
        run_trial("probe", {"behaviour": "raise"}, Rank())


def test_what_ran_has_to_be_what_was_asked() -> None:
    ran = Measurement(executed={"m": 64, "n": 64}, step_times_s=(1.0,))
    assert differences(ran, {"m": 64}) == ""
    assert differences(ran, {"m": 128}) == "m=64, asked was 128"
    assert "k=nothing" in differences(ran, {"k": 1})
    with pytest.raises(ParameterMismatch, match="rank 0 ran x=3"):
        run_trial("probe", {"x": 2, "behaviour": "lie"}, Rank())


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_layout_gives_the_product_and_is_what_lies_in_memory(layout: str, device: str) -> None:
    asked = MatmulParameters(m=96, n=64, k=160, dtype="fp32", layout=layout, repeats=3)  # type: ignore[arg-type]
    pair = operands.make(asked, torch.device(device), torch.Generator(device=device).manual_seed(0), "sm90")
    assert pair.a.is_contiguous() == (layout[0] == "n") and pair.b.is_contiguous() == (layout[1] == "n")
    torch.testing.assert_close(pair.multiply(), pair.a @ pair.b)
    assert Matmul().run(asked, Rank(device=device)).machine_info["layout"] == layout


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_tinygrad_gives_the_product_of_the_same_operands(layout: str, name: str) -> None:
    """On its device without hardware, an interpreter: the copies, the layouts and the way back are the GPU's."""
    dtype = operands.TORCH_DTYPES[name]
    a = torch.randn(24, 16, dtype=dtype) if layout[0] == "n" else torch.randn(16, 24, dtype=dtype).t()
    b = torch.randn(16, 8, dtype=dtype) if layout[1] == "n" else torch.randn(8, 16, dtype=dtype).t()
    multiply, fetch = tinygrad_backend.product(a, b, "PYTHON", beam=0)
    c = fetch(multiply())
    assert (c.shape, c.dtype) == ((24, 8), dtype)
    assert relative_error(a, b, c, rows=24) < TOLERANCE[name]


@given(
    st.sampled_from(list(MODELS)),
    st.sampled_from(["qkv", "output", "gate_up", "down", "lm_head"]),
    st.integers(1, 10_000),
)
def test_the_three_products_of_a_layer_cost_the_same(model: str, layer: str, tokens: int) -> None:
    """Forward and both gradients each sum over another of tokens, inputs and outputs."""
    products = [gemm_shape(model, layer, which, tokens) for which in ("forward", "input_gradient", "weight_gradient")]
    assert len({p.m * p.n * p.k for p in products}) == 1
    assert len({tuple(sorted((p.m, p.n, p.k))) for p in products}) == 1


def test_a_models_products_are_those_of_its_checkpoint() -> None:
    assert gemm_shape("llama3_8b", "qkv", "forward", 10) == GemmShape(10, 4096 + 2 * 1024, 4096, "nt")
    assert gemm_shape("llama3_70b", "gate_up", "input_gradient", 10) == GemmShape(10, 8192, 2 * 28672, "nn")
    assert gemm_shape("qwen2_5_7b", "qkv", "weight_gradient", 10) == GemmShape(3584 + 2 * 4 * 128, 3584, 10, "tn")
    assert gemm_shape("qwen2_5_7b", "lm_head", "forward", 10) == GemmShape(10, 152064, 3584, "nt")


def test_a_model_or_a_shape_has_to_be_given_and_not_both() -> None:
    with pytest.raises(ValueError, match="m, n and k have to be given"):
        MatmulParameters(m=4, n=4)
    with pytest.raises(ValueError, match="m and model"):
        MatmulParameters(m=4, model="llama3_8b")
    measured = Matmul().run(MatmulParameters(model="llama3_8b", tokens=8, layer="output", dtype="fp32"), Rank())
    assert measured.metrics["m"] == 8 and measured.metrics["n"] == measured.metrics["k"] == 4096


def test_a_format_without_units_is_refused_with_its_reason() -> None:
    with pytest.raises(Infeasible, match="dtype=fp8_rowwise is emulated on this device: cpu lacks fp8"):
        Matmul().run(MatmulParameters(m=64, n=64, k=64, dtype="fp8_rowwise"), Rank())


def test_the_statistic_is_that_of_the_repeats() -> None:
    measured = Matmul().run(MatmulParameters(m=8, n=8, k=8, dtype="fp32", statistic="fastest_warm"), Rank())
    assert measured.statistic == "fastest"


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_operands_of_a_few_bits_hold_normal_or_all_values(recipe: str) -> None:
    """No GPU here multiplies them; that what they decode to is the format's is seen anywhere."""
    asked = MatmulParameters(m=64, n=48, k=96, dtype=recipe)  # type: ignore[arg-type]
    pair = operands.make(asked, torch.device("cpu"), torch.Generator().manual_seed(0), "sm100")
    a = operands.take_rows(pair.a, torch.arange(64))
    assert a.shape == (64, 96)
    assert operands.take_rows(pair.b.t(), torch.arange(48)).shape == (48, 96)
    if recipe != "mxfp8":
        assert set(a.flatten().tolist()) == set(operands.E2M1.tolist())
    else:
        assert abs(float(a.std()) - 1) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_format_that_the_gpu_has_is_multiplied_right(recipe: str) -> None:
    device = torch.device("cuda", 0)
    asked = MatmulParameters(m=1024, n=2048, k=512, dtype=recipe, sustained_s=0.05)  # type: ignore[arg-type]
    if unsupported_rate_reason(recipe, devices.architecture(device)):
        with pytest.raises(Infeasible, match=recipe):
            Matmul().run(asked, Rank(device="cuda"))
        return
    measured = Matmul().run(asked, Rank(device="cuda"))
    assert 0 < measured.metrics["relative_error"] < TOLERANCE[measured.matrix_dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("route", ["torch", "cublas", "cublaslt", "triton", "tinygrad"])
@pytest.mark.parametrize("output_dtype", ["auto", "fp32"])
def test_every_route_gives_the_product(route: str, output_dtype: str) -> None:
    asked = {"m": 512, "n": 1024, "k": 256, "route": route, "output_dtype": output_dtype, "accumulation": "fp32"}
    if route in ("triton", "tinygrad") and output_dtype == "fp32":
        with pytest.raises(Infeasible, match=f"route={route}"):
            run_trial("matmul", asked, Rank(device="cuda"))
        return
    measured = run_trial("matmul", asked, Rank(device="cuda"))
    assert measured.machine_info["output_dtype"] == ("float32" if output_dtype == "fp32" else "bfloat16")


@pytest.mark.gpu
def test_the_kernel_that_tinygrad_finds_for_a_large_product_is_right() -> None:
    """Its search looks at speed alone, and had taken a wrong one (tinygrad 0.14)."""
    asked = {"m": 4096, "n": 4096, "k": 4096, "route": "tinygrad"}
    assert run_trial("matmul", asked, Rank(device="cuda")).metrics["relative_error"] < TOLERANCE["bf16"]
