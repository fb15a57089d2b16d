"""`--record` writes what the drivers returned, enough for a stand-in, and nothing that identifies the machine."""

import json
import socket
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sweeper.commands.doctor.record import mask_text, record_calls, write_record
from sweeper.config.hardware import Node
from tests.support.amd import use_stand_in
from workloads.api.gpus import amd, open_gpus
from workloads.api.host import describe_gpu

pytestmark = pytest.mark.xdist_group("recorded")
HOST = "gpu-node-17.cluster.example"
PLANTED = {
    "WANDB_API_KEY": "planted-wandb-key-1234",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/secret",
    "SITE_NOTE": "planted-in-an-unsuspicious-variable",
}
NODE = Node(
    "10.11.12.13", cpus=8, cpu_name="AMD EPYC 9654", gpus=8, id="c0ffee" * 8, accelerator="AMD-Instinct-MI300X-OAM"
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The record of a machine with eight MI300X and secrets in its environment, as text."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_stand_in(monkeypatch, "mi300x_cpx_nps4")
        monkeypatch.setattr(socket, "gethostname", lambda: HOST)
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0,1,2")
        monkeypatch.setenv("USER", "planted-user")
        monkeypatch.setenv("LOGNAME", "planted-user")
        for name, value in PLANTED.items():
            monkeypatch.setenv(name, value)
        path = tmp_path_factory.mktemp("record") / "machine.json"
        write_record(path, [NODE])
        yield path.read_text()


def test_the_record_has_no_secret_and_no_identifier(recorded: str) -> None:
    serials = [f"0x{0xA000 + number:016X}" for number in range(8)]
    for planted in [*PLANTED.values(), *PLANTED, HOST, "gpu-node-17", NODE.address, str(NODE.id), *serials, "planted"]:
        assert planted not in recorded, planted


def test_the_record_has_what_a_stand_in_needs(recorded: str) -> None:
    record = json.loads(recorded)
    assert record["visible_devices"] == {"HIP_VISIBLE_DEVICES": "0,1,2"}
    assert record["torch"]["version"] and record["torch"]["hip"] is None and record["torch"]["devices"] == []
    assert record["ray"][0]["accelerator"] == "AMD-Instinct-MI300X-OAM" and record["ray"][0]["gpus"] == 8
    assert record["versions"]["ray"] and record["kernel"]["release"] and len(record["gpus"]) == 64
    assert record["driver_calls"]["nvml"][0]["raises"]  # there is no NVIDIA driver
    serials = {gpu["uuid"] for gpu in record["gpus"]}
    assert len(serials) == 8  # partitions of one GPU still share its serial number


def test_a_stand_in_made_from_the_record_is_read_alike(recorded: str) -> None:
    record = json.loads(recorded)
    calls: dict[tuple[str, str], Any] = {}
    for entry in record["driver_calls"]["amdsmi"]:
        calls[entry["call"], str(entry["arguments"])] = entry["returns"]
    handles = calls["amdsmi_get_processor_handles", "[]"]

    def call(name: str) -> Any:
        return lambda *arguments: calls[name, str([getattr(value, "name", value) for value in arguments])]

    stand_in = SimpleNamespace(**{name: call(name) for name, _ in calls})
    stand_in.AmdSmiClkType = SimpleNamespace(GFX=SimpleNamespace(name="GFX"))
    gpus = [amd.AmdGpu(stand_in, index, handle) for index, handle in enumerate(handles)]  # type: ignore[arg-type]
    assert [describe_gpu(gpu) for gpu in gpus] == record["gpus"]
    assert gpus[0].read().power_w == 748


def test_calls_that_raise_are_recorded_and_the_module_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_in(monkeypatch, "raising")
    module = amd.load_amdsmi()
    assert module is not None
    before = dict(vars(module))
    with record_calls(module, "amdsmi") as calls, open_gpus() as gpus:
        assert not gpus[0].identity.responds
    raised = [entry for entry in calls if "raises" in entry]
    assert raised and all("AmdSmiLibraryException" in entry["raises"] for entry in raised)
    assert {name: vars(module)[name] for name in before if name.startswith("amdsmi")} == {
        name: value for name, value in before.items() if name.startswith("amdsmi")
    }


def test_nvmls_structures_are_recorded_as_plain_values() -> None:
    import pynvml

    def get_memory(handle: object) -> Any:
        return pynvml.c_nvmlMemory_t(total=80, free=50, used=30)

    module = ModuleType("nvml")
    module.nvmlDeviceGetHandleByIndex = lambda index: object()  # type: ignore[attr-defined]
    module.nvmlDeviceGetMemoryInfo = get_memory  # type: ignore[attr-defined]
    module.nvmlDeviceGetName = lambda handle: b"NVIDIA H200"  # type: ignore[attr-defined]
    with record_calls(module, "nvml") as calls:
        handle = module.nvmlDeviceGetHandleByIndex(0)
        module.nvmlDeviceGetMemoryInfo(handle)
        module.nvmlDeviceGetName(handle)
    assert [entry["returns"] for entry in calls] == ["handle 0", {"total": 80, "free": 50, "used": 30}, "NVIDIA H200"]
    assert calls[1]["arguments"] == ["handle 0"]


def test_logs_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    text = f"on {HOST} (10.0.3.7) GPU-12345678-9abc-def0-1234-56789abcdef0 api_key=abcdef driver 6.12.12"
    masked = mask_text(text)
    assert masked == "on <host> (masked-2) GPU-masked-1 api_key=*** driver 6.12.12"
