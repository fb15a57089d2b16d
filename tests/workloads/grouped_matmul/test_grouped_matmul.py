"""Grouped products: how tokens are dealt out, the result of each backend, and what is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workloads.api.contract import Infeasible, Rank
from workloads.grouped_matmul import GroupedMatmul, GroupedMatmulParameters, rules
from workloads.grouped_matmul.run import make_operands, relative_error
from workloads.models.routing import tokens_of_experts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PRODUCTS = ["forward", "input_gradient", "weight_gradient"]
SIZES = {"hidden_size": 64, "expert_size": 32, "experts": 8, "experts_per_token": 2, "tokens": 96}


@given(st.integers(0, 5000), st.integers(1, 64), st.floats(0, 1), st.integers(0, 9))
def test_no_token_is_lost_and_the_busiest_expert_has_its_share(
    tokens: int, experts: int, share: float, seed: int
) -> None:
    imbalance = 1 + share * (experts - 1)
    loads = tokens_of_experts(tokens, experts, imbalance, seed)
    assert sum(loads) == tokens and len(loads) == experts and min(loads) >= 0
    assert max(loads) == pytest.approx(imbalance * tokens / experts, abs=1.001)


def test_loads_follow_zipfs_law() -> None:
    """The nth busiest of Zipf's law has the first's load over n to the power of s: logarithms lie on a line."""
    first, second, *_, last = sorted(tokens_of_experts(10_000_000, 32, 4.0), reverse=True)
    exponent = torch.tensor(first / second).log() / torch.tensor(2.0).log()
    assert first / last == pytest.approx(float(32**exponent), rel=1e-3)


@pytest.mark.parametrize("imbalance", [1.0, 3.5])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("layer", ["gate_up", "down"])
@pytest.mark.parametrize("device", DEVICES)
def test_the_product_is_that_of_each_expert_by_itself(device: str, layer: str, product: str, imbalance: float) -> None:
    dtype = "fp32" if device == "cpu" else "bf16"
    parameters = GroupedMatmulParameters(**SIZES, layer=layer, product=product, imbalance=imbalance, dtype=dtype)
    generator = torch.Generator(device=device).manual_seed(3)
    operands = make_operands(parameters, torch.device(device), generator, "sm90" if device == "cuda" else "cpu")
    found, a, b = operands.multiply(), operands.a.double(), operands.b.double()
    for expert, (start, end) in enumerate(pairwise([0, *operands.ends.tolist()])):
        if product == "weight_gradient":
            exact, part = a[:, start:end] @ b[start:end], found[expert]
        else:
            exact, part = a[start:end] @ b[expert], found[start:end]
        torch.testing.assert_close(part.double(), exact, rtol=0.02, atol=0.15 if device == "cuda" else 1e-4)
    assert relative_error(operands, found) < (1e-2 if device == "cuda" else 1e-5)
    assert relative_error(operands, found.roll(1, -1)) > 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_a_measurement_says_what_was_executed(device: str) -> None:
    parameters = GroupedMatmulParameters(
        **SIZES, expert_parallel=2, imbalance=2.0, dtype="fp32" if device == "cpu" else "bf16", repeats=3
    )
    measurement = GroupedMatmul().run(parameters, Rank(device=device))
    assert measurement.flops_per_step == 2 * (96 * 2) * 64 * (2 * 32)
    assert measurement.metrics["experts_held"] == 4 and measurement.metrics["rows"] == 192
    assert measurement.metrics["executed_imbalance"] == pytest.approx(2.0, abs=0.03)
    assert len(measurement.step_times_s) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("backend", "dtype"), [("quack", "bf16"), ("torch", "fp8_rowwise")])
def test_other_kernels_give_the_product(backend: str, dtype: str, product: str) -> None:
    """`run` raises where the result is wrong."""
    if backend == "quack":
        pytest.importorskip("quack")
    parameters = GroupedMatmulParameters(
        hidden_size=512, expert_size=256, experts=8, experts_per_token=2, tokens=1024, imbalance=2.0, product=product,
        backend=backend, dtype=dtype, repeats=3,
    )  # fmt: skip
    assert GroupedMatmul().run(parameters, Rank(device="cuda")).metrics["relative_error"] < 0.01


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": None}, "hidden_size, expert_size, experts and experts_per_token have to be given, or a model"),
        ({"model": "mixtral_8x7b"}, "hidden_size and model: the model defines the sizes; set hidden_size=null"),
        ({"expert_parallel": 3}, "expert_parallel=3 does not divide experts=8"),
        ({"imbalance": 9.0}, "imbalance=9: of 8 experts the busiest has at most 8 times the mean"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        GroupedMatmulParameters(**SIZES | changes)  # type: ignore[arg-type]


def test_a_backend_for_nvidia_gpus_is_refused_on_others() -> None:
    with pytest.raises(Infeasible, match="backend=quack is for NVIDIA GPUs"):
        GroupedMatmul().run(GroupedMatmulParameters(**SIZES, dtype="fp32", backend="quack"), Rank(device="cpu"))
    bf16 = GroupedMatmulParameters(**SIZES, backend="quack")
    assert "for NVIDIA GPUs" in rules.unsupported_reason(bf16, "gfx942:sramecc+:xnack-")


def test_rows_that_fp8_cannot_load_are_refused_before_a_trial() -> None:
    with pytest.raises(ValueError, match="tokens=3: dtype=fp8_rowwise needs rows in multiples of 16, not 6"):
        GroupedMatmulParameters(model="mixtral_8x7b", tokens=3, dtype="fp8_rowwise")
