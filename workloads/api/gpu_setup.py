"""Find out why a machine's GPUs cannot be used: Ray does not see them, or torch is built for another platform.

Without this check, a sweep on a machine with GPUs would run on its CPU. This module does not import torch.
"""

import ast
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.api.visible_devices import CUDA, HIP

DEVICES = Path("/dev")
# PyTorch's wheels for ROCm. The release notes of PyTorch 2.13 name 2.13.0+rocm7.2.
ROCM_WHEELS = "https://download.pytorch.org/whl/rocm7.2"
AMDSMI_SOURCE = "/opt/rocm/share/amd_smi"  # AMD's own Python package; part of the ROCm SDK's wheel since ROCm 7.14


@dataclass(frozen=True)
class GpuProblem:
    """The reason why a machine's GPUs cannot be used, and the remedy, in one line each."""

    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}; remedy: {self.remedy}"


@dataclass(frozen=True)
class Vendor:
    """A vendor's GPUs: how to detect them on a machine, and commands for them."""

    name: str
    device_files: str  # pattern of the files in /dev that programs use to reach the GPUs
    variable: str  # the environment variable that selects GPUs
    platform: str  # the platform of a torch build
    reinstall: str  # the command that installs a torch build for this platform
    list_command: str
    container_options: str


REINSTALL = "pip install --force-reinstall"
NVIDIA = Vendor("NVIDIA", "nvidia[0-9]*", CUDA, "CUDA", f"{REINSTALL} torch", "nvidia-smi -L", "--gpus all")
REINSTALL_ROCM = f"{REINSTALL} --index-url {ROCM_WHEELS} torch"
AMD = Vendor("AMD", "kfd", HIP, "ROCm", REINSTALL_ROCM, "amd-smi list", "--device=/dev/kfd --device=/dev/dri")
VENDORS = (NVIDIA, AMD)


def find_problems(gpus: int, environment: Mapping[str, str]) -> list[GpuProblem]:
    """Return why GPUs cannot be used. Ray sees `gpus` GPUs. `environment` is Ray's environment; empty if unknown."""
    vendors = present_vendors()
    devices = [_check_devices(vendor, gpus, environment) for vendor in vendors]
    problems = [problem for problem in devices if problem]
    build = read_torch_build()
    if vendors and build is not None and not any(build.supports(vendor) for vendor in vendors):
        name, platform = vendors[0].name, vendors[0].platform
        problem = f"there are {name} GPUs, but torch {build.version} is built without {platform}"
        problems.append(GpuProblem(problem, vendors[0].reinstall))
    return problems


def find_broken_amdsmi() -> GpuProblem | None:
    """Return the problem if `amdsmi` is installed but its import fails. Ray does not start in this case.

    Ray catches only ImportError. The package of that name on PyPI raises KeyError if libamd_smi.so is not installed.
    Importing torch for ROCm then raises KeyError too (pytorch/pytorch, pull request 188724).
    """
    try:
        importlib.import_module("amdsmi")
    except ImportError:
        return None
    except Exception as error:
        return GpuProblem(
            f"the installed Python package amdsmi does not work ({type(error).__name__}: {error}), and Ray needs it to",
            f"pip uninstall amdsmi; on a machine with AMD GPUs then {_install_amdsmi()}",
        )
    return None


def _install_amdsmi() -> str:
    """Return the command that installs AMD's amdsmi. The package in the SDK's wheel loads the library next to it."""
    spec = importlib.util.find_spec("_rocm_sdk_core")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (amdsmi := Path(folder, "share", "amd_smi")).is_dir():
            return f"echo {amdsmi} > {Path(folder).parent}/amdsmi_of_rocm.pth"
    return f"pip install {AMDSMI_SOURCE}"


def present_vendors() -> list[Vendor]:
    return [vendor for vendor in VENDORS if any(DEVICES.glob(vendor.device_files))]


def _check_devices(vendor: Vendor, gpus: int, environment: Mapping[str, str]) -> GpuProblem | None:
    """Check that this user may open the vendor's device files, and that Ray sees the GPUs."""
    device = min(DEVICES.glob(vendor.device_files))
    if not os.access(device, os.R_OK | os.W_OK):
        remedy = f"add the user, or the container by --group-add, to the group {device.stat().st_gid}"
        return GpuProblem(f"this user may not open {device}", remedy)
    if gpus:
        return None
    unseen = f"there is {device}, but Ray sees no GPU"
    if environment.get(vendor.variable) in ("", "NoDevFiles"):  # Slurm writes NoDevFiles for no GPUs
        return GpuProblem(f"{unseen}, because {vendor.variable} leaves none", f"unset {vendor.variable}")
    if vendor is AMD and importlib.util.find_spec("amdsmi") is None:
        return GpuProblem(f"{unseen}, because AMD's amdsmi is not installed", _install_amdsmi())
    return GpuProblem(unseen, f"see what `{vendor.list_command}` lists; a container needs {vendor.container_options}")


@dataclass(frozen=True)
class TorchBuild:
    """The platform of the installed torch, from the fields of torch.version."""

    version: str
    cuda: str | None
    hip: str | None
    folder: Path  # torch's installation folder, which the Makefile reads

    def supports(self, vendor: Vendor) -> bool:
        return bool(self.hip if vendor is AMD else self.cuda)


def read_torch_build() -> TorchBuild | None:
    """Return the installed torch build, or None if torch is not installed or its version.py lacks a field."""
    spec = importlib.util.find_spec("torch")  # imports nothing for a top-level package
    folders = spec.submodule_search_locations if spec else None
    if not folders:
        return None
    try:
        text = Path(folders[0], "version.py").read_text()
    except OSError:
        return None
    fields = dict(re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *(['\"].*['\"]|None) *$", text, re.MULTILINE))
    if len(fields) < 3:
        return None
    version, cuda, hip = (ast.literal_eval(fields[name]) for name in ("__version__", "cuda", "hip"))
    return TorchBuild(version, cuda, hip, Path(folders[0]).parent)
