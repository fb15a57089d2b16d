"""The energy of a program's GPUs. AMD SMI is a stand-in, whose GPUs draw 748 W each."""

import time

import pytest

from tests.support.amd import use_stand_in
from workloads.api.contract import Energy, Rank
from workloads.api.gpus import amd
from workloads.command.energy import EnergyMeter, add_energies, select_gpus

ON_TWO_GPUS = Rank(device="cuda", world_size=2, node_devices="1,3")


def measure(rank: Rank, *, seconds: float, step_time_s: float = 0.05) -> Energy | None:
    """Return the energy of a program whose lines are as long apart, after one of two warm-up steps."""
    with EnergyMeter(rank) as meter:
        meter.mark_step(-1)
        meter.mark_step(0)
        time.sleep(seconds)
        meter.mark_step(10)
        time.sleep(0.05)  # what comes after the last step does not count
    return meter.energy(step_time_s)


def test_the_gpus_of_a_program_are_summed_over_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, "mi300x")
    monkeypatch.setattr(amd.AmdGpu, "interval_s", 0.02)
    energy = measure(ON_TWO_GPUS, seconds=1.1)
    assert energy is not None and energy.source == "counter"
    assert energy.joules / energy.seconds == pytest.approx(2 * 748, rel=0.05)
    assert energy.steps == pytest.approx(energy.seconds / 0.05)


def test_no_energy_has_a_reason_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, "mi300x")
    short = measure(ON_TWO_GPUS, seconds=0.02)
    assert short is not None and "needs 1 s" in short.missing
    several = measure(Rank(device="cuda", nodes=2, node_devices="0"), seconds=0.0)
    assert several is not None and "2 nodes" in several.missing
    assert measure(Rank(), seconds=0.0) is None


def test_gpus_are_named_by_number_or_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, "mi300x")
    gpus = amd.open_gpus()
    uuid = gpus[4].identity.uuid
    assert [gpu.identity.number for gpu in select_gpus(gpus, f"6,{uuid}")] == [6, 4]
    assert select_gpus(gpus, "0,17") == []  # half of the energy would look like all of it


def test_one_device_without_energy_leaves_the_sum_without_it() -> None:
    known = Energy(100.0, 1.0, 10, "counter")
    assert add_energies([known, known]) == Energy(200.0, 1.0, 10, "counter")
    assert add_energies([known, Energy(50.0, 1.0, 10, "power")]) == Energy(150.0, 1.0, 10, "power")
    assert add_energies([known, Energy(missing="too short")]) == Energy(missing="too short")
    assert add_energies([known, None]) is None and add_energies([]) is None
