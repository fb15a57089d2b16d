"""GPU readings during a measurement, and measurements that they taint."""

import statistics

import pytest
import torch

from workloads.api.contract import Rank
from workloads.api.gpus import GpuReading
from workloads.instruments import runs
from workloads.instruments.telemetry import GpuReadings, monitor_gpu
from workloads.matmul import MatmulParameters, gemm


def test_a_cpu_has_no_readings() -> None:
    with monitor_gpu(torch.device("cpu")) as readings:
        pass
    assert readings.metrics() == {} and readings.machine_info() == {} and not readings.tainted


def test_a_power_cap_is_recorded_and_a_thermal_slowdown_taints() -> None:
    seen = ([1980, 1500, 1410], [690, 701], [60, 61], {"software_power_cap"})
    capped = GpuReadings(*seen, reasons_known=True, started_s=5.0, ended_s=6.5)
    assert capped.metrics() == {"sm_clock_mhz": 1500, "power_w": 701, "temperature_c": 61}
    assert capped.machine_info() == {"slowed_by": "software_power_cap", "tainted": False}
    assert GpuReadings([900], [300], [90], {"hardware_thermal"}, reasons_known=True).machine_info()["tainted"] is True


def test_a_measurement_of_less_than_a_second_has_no_power() -> None:
    """The driver's power is a mean over about a second: 89 W were read at 1,478 TFLOP/s."""
    burst = GpuReadings([1980], [89], [47], started_s=5.0, ended_s=5.022)
    assert burst.metrics() == {"sm_clock_mhz": 1980, "temperature_c": 47}


HOT: list[set[str]] = [{"hardware_thermal"}, {"software_thermal"}, set()]


@pytest.mark.parametrize(
    ("reasons", "clocks_mhz", "expected_s"),
    [
        (HOT, [1000, 1000, 1980], runs.PAUSES_S),
        ([set()] * 3, [1395, 1500, 1950], runs.CLOCK_PAUSES_S[:2]),
        ([set()] * 4, [1395] * 4, runs.CLOCK_PAUSES_S),
    ],
)
def test_a_measurement_is_repeated_after_a_pause_while_the_gpu_is_hot_or_its_clock_low(
    reasons: list[set[str]], clocks_mhz: list[float], expected_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has cooled down for the last measurement, or the clock is as before, or all pauses are over."""
    measurements, pauses_s = [], []

    class Cooling(GpuReadings):
        def __enter__(self) -> GpuReadings:
            self.reasons, self.clocks_mhz = reasons[len(measurements)], [clocks_mhz[len(measurements)]]
            measurements.append(self)
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(runs, "monitor_gpu", lambda device: Cooling([1000], [1], [90], reasons_known=True))
    monkeypatch.setattr(runs.time, "sleep", pauses_s.append)
    parameters = MatmulParameters(m=64, n=64, k=64, dtype="fp32", repeats=3)
    measurement = gemm.measure(parameters, Rank(clock_mhz=1980))
    # On a busy host the measurement also waits for hundredths of a second.
    assert len(measurements) == len(reasons) and [s for s in pauses_s if s >= 0.5] == list(expected_s)
    assert measurement.machine_info["tainted"] is False and len(measurement.step_times_s) == 3


@pytest.mark.gpu
def test_a_gpu_reports_its_state_and_a_cold_cache_is_slower() -> None:
    rank = Rank(device="cuda")
    small = {"m": 4096, "n": 512, "k": 4096, "repeats": 50}  # 40 MB: fits an H200's cache, and is longer than a launch
    cold = gemm.measure(MatmulParameters(**small, statistic="median_cold"), rank)
    warm = gemm.measure(MatmulParameters(**small, statistic="median_warm"), rank)
    assert sorted(cold.step_times_s)[25] > sorted(warm.step_times_s)[25]
    assert cold.metrics["sm_clock_mhz"] > 300 and cold.metrics["temperature_c"] > 10
    assert "power_w" not in cold.metrics  # 50 products take milliseconds
    assert "tainted" in cold.machine_info
    assert float(str(cold.machine_info["power_limit_w"])) > 30


@pytest.mark.gpu
def test_the_energy_of_a_gpu_agrees_with_its_power() -> None:
    measurement = gemm.measure(MatmulParameters(m=8192, n=8192, k=8192, sustained_s=6.0), Rank(device="cuda"))
    energy = measurement.energy
    assert energy is not None and energy.source == "counter" and energy.seconds > 5
    assert energy.joules / energy.seconds == pytest.approx(measurement.metrics["sustained_power_w"], rel=0.15)
    assert energy.steps * statistics.mean(measurement.sustained_step_times_s) == pytest.approx(energy.seconds, rel=0.01)
    burst = gemm.measure(MatmulParameters(m=8192, n=8192, k=8192), Rank(device="cuda"))
    assert burst.energy is not None and "sustained_s" in burst.energy.missing


def test_a_drift_is_that_of_the_steps_alone_where_the_warm_up_had_no_clock() -> None:
    readings = GpuReadings()
    for n in range(40):
        if n == 20:
            readings.begin_steps()
        clock_mhz = None if n < 20 else 1400.0 + 10 * (n - 20)
        readings.add(GpuReading(clock_mhz=clock_mhz, power_w=700.0, energy_j=None, temperature_c=60.0), {}, float(n))
    assert readings.drifts()["sm_clock_drift_mhz"] == 160.0
