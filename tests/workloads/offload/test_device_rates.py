"""The rates of a GPU are kept for a day, and measured again whenever something else could be meant."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workloads.api.contract import Rank
from workloads.api.trial import run_trial
from workloads.offload.cost_model import DeviceRates
from workloads.offload.device_rates import KEPT_FOR_S, MeasuredDevice, keep, load_or_measure
from workloads.offload.optimizer import Precision

RATES = DeviceRates(1e-6, 2e-6, {"full": 0.0, "input": 1e-6}, 1e-7, 1e-11, 1e-11, 1e-12, 1000.0, 8192)
KEY = {"gpu_uuid": "GPU-1", "model": "llama3_1b", "precision": Precision()}


class Device:
    """Counts its measurements."""

    def __init__(self, measured_at: float | None = None) -> None:
        self.count = 0
        self.measured = MeasuredDevice(RATES, "cudnn", time.time() if measured_at is None else measured_at)

    def __call__(self) -> MeasuredDevice:
        self.count += 1
        return self.measured


def test_the_second_process_measures_nothing(tmp_path: Path) -> None:
    device = Device()
    assert [keep(tmp_path, KEY, device) for _ in range(2)] == [device.measured] * 2
    assert device.count == 1


@pytest.mark.parametrize(
    "other", [{"gpu_uuid": "GPU-2"}, {"precision": replace(Precision(), master_weights=True)}, {"torch": "2.12"}]
)
def test_another_gpu_or_precision_is_measured(tmp_path: Path, other: dict[str, object]) -> None:
    device = Device()
    for key in (KEY, KEY | other):
        keep(tmp_path, key, device)
    assert device.count == 2


@pytest.mark.parametrize("age_s", [KEPT_FOR_S, -60])
def test_old_rates_and_those_of_the_future_are_measured_again(tmp_path: Path, age_s: float) -> None:
    keep(tmp_path, KEY, Device(time.time() - age_s))
    device = Device()
    assert keep(tmp_path, KEY, device) == device.measured
    assert device.count == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rates": {"speed": 1}, "attention": "cudnn", "measured_at": 0}'])
def test_a_file_that_cannot_be_read_is_replaced(tmp_path: Path, text: str) -> None:
    keep(tmp_path, KEY, Device())
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    device = Device()
    for _ in range(2):
        keep(tmp_path, KEY, device)
    assert device.count == 1
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    device = Device()
    assert keep(tmp_path / "absent", KEY, device) == device.measured


def test_a_cpu_is_measured_in_each_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = load_or_measure("llama_tiny", 32, torch.device("cpu"), Precision(torch.float32))
    assert measured.attention == "cpu" and not list(tmp_path.rglob("*.json"))


@pytest.mark.gpu
def test_a_trial_uses_the_rates_of_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parameters = {"model": "llama_tiny", "sequence_length": 128, "sequences_per_step": 4, "steps": 1}
    parameters |= {"host_gib": 1.0, "device_gib": 2.0, "dtype": "bf16"}
    predicted = [
        run_trial("offload", parameters, Rank(device="cuda")).metrics["predicted_tokens_per_s"] for _ in range(2)
    ]
    (file,) = (tmp_path / "gpu-sweeper" / "rates").iterdir()
    assert predicted[0] == predicted[1]
    file.write_text(file.read_text().replace('"lm_head_s_per_token": ', '"lm_head_s_per_token": 1'))
    slower = run_trial("offload", parameters, Rank(device="cuda")).metrics["predicted_tokens_per_s"]
    assert slower < predicted[0] / 2
