"""What is reported of an AMD GPU. The device is a stand-in: it replaces what torch says, nothing runs on it."""

import pytest
import torch

from tests.support.amd_device import MI250X, MI300X, MI355X, StandInProperties, amd_device
from workloads.instruments import device as devices


@pytest.mark.parametrize("properties", [MI300X, MI355X, MI250X])
def test_an_amd_gpu_is_described_by_its_own_properties(properties: StandInProperties) -> None:
    with amd_device(properties, hip="7.2.1"):
        info = devices.machine_info(torch.device("cuda", 0))
    assert info["architecture"] == properties.gcnArchName and info["device"] == properties.name
    assert info["compute_units"] == properties.multi_processor_count
    assert (info["hip"], info["cuda"]) == ("7.2.1", None)
    assert info["device_memory_gib"] == pytest.approx(properties.total_memory / 2**30, abs=0.1)


def test_a_stand_in_leaves_nothing_behind() -> None:
    before = (torch.version.hip, torch.version.cuda, torch.cuda.get_device_properties)
    with pytest.raises(RuntimeError, match="inside"), amd_device():
        raise RuntimeError("inside")
    assert (torch.version.hip, torch.version.cuda, torch.cuda.get_device_properties) == before
