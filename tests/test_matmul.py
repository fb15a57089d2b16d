"""The product itself, on whatever device the tests run on."""

import statistics
from dataclasses import replace

import pytest
import torch

from workloads.contract import Infeasible, Measurement, Rank
from workloads.matmul import Matmul, MatmulParameters
from workloads.matmul.product import TOLERANCE, relative_error
from workloads.trial import NotAsAsked, differences, run_trial

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_measurement_says_what_ran(device: str) -> None:
    asked = MatmulParameters(m=64, n=192, k=128, dtype="fp32", repeats=5)
    measured = Matmul().run(asked, Rank(device=device))
    assert measured.flops_per_step == 2 * 64 * 192 * 128
    assert len(measured.step_times_s) == 5
    assert all(time_s > 0 for time_s in measured.step_times_s)
    assert measured.executed == {name: getattr(asked, name) for name in asked.__dataclass_fields__}
    assert measured.figures["relative_error"] < TOLERANCE["fp32"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_sustained_run_lasts_as_long_as_asked_and_costs_no_speed_on_a_cool_machine(device: str) -> None:
    size = 256 if device == "cpu" else 4096
    asked = MatmulParameters(m=size, n=size, k=size, dtype="fp32", cache="warm", sustained_s=0.5)
    measured = Matmul().run(asked, Rank(device=device))
    assert len(measured.sustained_step_times_s) >= 5
    burst, sustained = statistics.median(measured.step_times_s), statistics.median(measured.sustained_step_times_s)
    assert 0.2 < sustained / burst < 5
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
    with pytest.raises(NotAsAsked, match="rank 0 ran x=3"):
        run_trial("probe", {"x": 2, "behaviour": "lie"}, Rank())
