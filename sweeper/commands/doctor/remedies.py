"""What to do about a GPU's problem, with the tools of its vendor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remedies:
    """The remedies for one vendor's GPUs; `{number}` and `{watts}` are the GPU's number and its default power limit."""

    no_response: str
    foreign_use: str
    power_limit: str
    clock_limit: str
    retired_pages: str
    slow: str


REMEDIES = {
    "nvidia": Remedies(
        no_response="look for its Xid error in dmesg; reset the GPU or restart the node",
        foreign_use="run nvidia-smi to see which processes use it",
        power_limit="nvidia-smi -i {number} -pl {watts:.0f}, unless the limit is intended",
        clock_limit="nvidia-smi -i {number} -rac, unless the limit is intended",
        retired_pages="nvidia-smi -i {number} -q -d PAGE_RETIREMENT; replace it if their number grows",
        slow="compare its clock, power and temperature (nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE)",
    ),
    # amd-smi comes with ROCm 6 and later; rocm-smi does the same in older releases.
    "amd": Remedies(
        no_response="look for errors of amdgpu in dmesg; amd-smi reset --gpu {number} --gpureset, or restart the node",
        foreign_use="run amd-smi process --gpu {number} (rocm-smi --showpids) to see which processes use it",
        power_limit="amd-smi set --gpu {number} --power-cap {watts:.0f}, unless the limit is intended",
        clock_limit="amd-smi reset --gpu {number} --clocks, unless the limit is intended",
        retired_pages="amd-smi bad-pages --gpu {number} lists them; replace it if their number grows",
        slow="compare its clock, power and temperature (amd-smi metric --clock --power --temperature)",
    ),
}


def remedies_of(vendor: str) -> Remedies:
    """Return the remedies for GPUs of a vendor; NVIDIA's for an unknown one."""
    return REMEDIES.get(vendor, REMEDIES["nvidia"])
