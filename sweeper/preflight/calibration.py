"""Rates measured on a kind of GPU, in a file that plans use instead of the rates in the tables.

`python -m sweeper calibrate` writes `calibration/<hardware>.yaml` in the folder of the sweeps, and a topology with the
measured links, `<hardware>_topology.yaml`. You can also write both files by hand.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sweeper.common.files import write_whole
from sweeper.config.schema import Hardware
from sweeper.config.validation import build
from workloads.api.errors import UserInputError, first_line
from workloads.hardware.cluster import AttentionRates, Device

FOLDER = "calibration"
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Figure:
    """A measured value with its 95% interval, if it has one."""

    value: float = field(metadata={"min": 1e-9})
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Attention:
    """Measured attention rates, as in `workloads.hardware.cluster.AttentionRates`."""

    forward_share: float = field(metadata={"min": 0.001, "max": 2})
    backward_share: float = field(metadata={"min": 0.001, "max": 2})
    half_tokens: float = field(metadata={"min": 0})


@dataclass(frozen=True)
class Calibration:
    hardware: str  # its name in conf/hardware
    device: str  # the driver's name for it
    date: str  # of the measurement
    torch: str = ""  # the version of torch
    conditions: str = ""  # how long the load lasted, and at which clock and power
    sustained_tflops: dict[str, Figure] = field(default_factory=dict)  # of large GEMMs, by data type
    power_headroom: float = field(default=1.0, metadata={"min": 1.0, "max": 3.0})  # of a short run over a long one
    copy_gb_s: Figure | None = None  # what copies read and write per second
    attention: dict[str, Attention] = field(default_factory=dict)  # by the planner's names of kernels

    def describe(self) -> str:
        names = [f"products in {' and '.join(self.sustained_tflops)}"] if self.sustained_tflops else []
        names += ["copies"] if self.copy_gb_s else []
        names += [f"attention by {' and '.join(self.attention)}"] if self.attention else []
        return f"measured on {self.device}, {self.date}: {', '.join(names) or 'nothing'}"


@dataclass(frozen=True)
class CalibrationFile:
    path: Path
    rates: Calibration

    @property
    def topology_path(self) -> Path:
        """The file with the topology that was measured with the device; it does not exist for a single GPU."""
        return self.path.with_name(f"{self.path.stem}_topology.yaml")

    def describe(self) -> str:
        return f"{self.rates.describe()} ({self.path})"


def calibrate_device(device: Device, calibration: Calibration) -> Device:
    """Return the planner's view of a device, with its measured rates."""
    products, copies = calibration.sustained_tflops, calibration.copy_gb_s
    attention = {name: AttentionRates(**asdict(rates)) for name, rates in calibration.attention.items()}
    return replace(
        device,
        sustained_tflops={**device.sustained_tflops, **{dtype: rate.value for dtype, rate in products.items()}},
        power_headroom=calibration.power_headroom if products else device.power_headroom,
        copy_gb_s=copies.value if copies else device.copy_gb_s,
        attention={**device.attention, **attention},
    )


def device_key(hardware: Hardware) -> str:
    """Return the name under which a device's rates are stored; a partition has its own, since its rates differ."""
    part = re.sub(r"\W+", "_", hardware.partition or "").lower()
    return f"{hardware.name}_{part}" if part else hardware.name


def find_calibration(choice: str, folder: Path, hardware: str, *, is_gpu: bool = True) -> CalibrationFile | None:
    """Return a device's measured rates; None if there are none, or for a CPU, where estimates only order the points.

    `choice` is `auto` (the file in the folder of the sweeps, if it exists), `none`, or the path of a file or folder.

    Raises UserInputError if the given path has no such file, or the file is not valid.
    """
    if choice == NONE:
        return None
    place = folder / FOLDER if choice == AUTO else Path(choice).expanduser()
    path = place if place.suffix in (".yaml", ".yml") else place / f"{hardware}.yaml"
    if choice == AUTO and not path.exists():
        return None
    if not is_gpu and not path.exists():
        raise UserInputError(f"calibration={choice}: there is no {path}")
    if not is_gpu:
        return None
    rates = read_calibration(path)
    if rates.hardware != hardware:
        raise UserInputError(f"calibration={choice}: {path} was measured on {rates.hardware}, not on {hardware}")
    return CalibrationFile(path, rates)


def read_calibration(path: Path) -> Calibration:
    """Return the measured rates in a file. Raises UserInputError if it cannot be read or a key is missing or wrong."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserInputError(f"calibration={path}: cannot be read ({first_line(error)})") from error
    if not isinstance(values, dict):
        raise UserInputError(f"calibration={path}: has no keys; write one with python -m sweeper calibrate")
    values = {str(name): value for name, value in values.items() if value is not None}
    if "date" in values:
        values["date"] = str(values["date"])  # YAML reads it as a date object
    return build(Calibration, values, f"{path}: ")


def write_calibration(path: Path, calibration: Calibration) -> None:
    values = {name: value for name, value in asdict(calibration).items() if value not in (None, {}, "")}
    write_yaml(path, values, "Measured by python -m sweeper calibrate; plans use it for this device.")


def write_yaml(path: Path, values: Mapping[str, Any], comment: str) -> None:
    """Write values to a YAML file under a comment, atomically."""
    write_whole(path, f"# {comment}\n{yaml.safe_dump(dict(values), sort_keys=False)}")
