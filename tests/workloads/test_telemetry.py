"""What the machine did to a GPU meanwhile, and what is made of it."""

from __future__ import annotations

import pytest
import torch

from workloads import telemetry
from workloads.api.contract import Rank
from workloads.matmul import MatmulParameters, gemm
from workloads.telemetry import Watch, watching


def test_nothing_is_made_up_for_a_cpu() -> None:
    with watching(torch.device("cpu")) as watch:
        pass
    assert watch.metrics() == {} and watch.machine_info() == {} and not watch.tainted


def test_a_power_cap_is_noted_and_a_thermal_slowdown_taints() -> None:
    capped = Watch([1980, 1500, 1410], [690, 701], [60, 61], {"software_power_cap"}, reasons_known=True)
    assert capped.metrics() == {"sm_clock_mhz": 1500, "power_w": 701, "temperature_c": 61}
    assert capped.machine_info() == {"slowed_by": "software_power_cap", "tainted": False}
    assert Watch([900], [300], [90], {"hardware_thermal"}, reasons_known=True).machine_info()["tainted"] is True


def test_a_tainted_figure_is_taken_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is hot for the first two measurements and has cooled down for the third."""
    heat = [{"hardware_thermal"}, {"software_thermal"}, set()]
    watches, pauses = [], []

    class Hot(Watch):
        def __enter__(self) -> Watch:
            self.reasons = heat[len(watches)]
            watches.append(self)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(gemm, "watching", lambda device: Hot([1000], [1], [90], reasons_known=True))
    monkeypatch.setattr(gemm.time, "sleep", pauses.append)
    parameters = MatmulParameters(m=64, n=64, k=64, dtype="fp32", statistic="median_warm", repeats=3)
    measured = gemm.measure(parameters, Rank())
    assert len(watches) == 3 and pauses == list(gemm.PAUSES_S)
    assert measured.machine_info["tainted"] is False and len(measured.step_times_s) == 3


def test_an_amd_gpu_tells_what_it_can_and_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD SMI as torch reads it: power in W, zero for what is not known, an error for what is not there."""

    def broken(device: torch.device) -> int:
        raise RuntimeError("AMDSMI_STATUS_NOT_SUPPORTED")

    monkeypatch.setattr(torch.cuda, "clock_rate", lambda device: 2100)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "temperature", broken)
    watch = Watch()
    telemetry._read_amdsmi(torch.device("cuda", 0), watch)
    assert watch.metrics() == {"sm_clock_mhz": 2100.0}
    assert watch.machine_info() == {}  # not "slowed by nothing": that is not known


@pytest.mark.gpu
def test_a_gpu_tells_its_state_and_a_cold_cache_costs_time() -> None:
    rank = Rank(device="cuda")
    small = {"m": 4096, "n": 512, "k": 4096, "repeats": 50}  # 40 MB: within an H200's cache, and longer than a launch
    cold = gemm.measure(MatmulParameters(**small, statistic="median_cold"), rank)
    warm = gemm.measure(MatmulParameters(**small, statistic="median_warm"), rank)
    assert sorted(cold.step_times_s)[25] > sorted(warm.step_times_s)[25]
    assert cold.metrics["sm_clock_mhz"] > 300 and cold.metrics["temperature_c"] > 10 and cold.metrics["power_w"] > 30
    assert "tainted" in cold.machine_info
    assert float(str(cold.machine_info["power_limit_w"])) > 30
