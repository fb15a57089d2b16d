"""Read and write files of rates measured on a kind of GPU. Plans prefer measured rates to the rates in the tables.

`python -m sweeper calibrate` writes `calibration/<hardware>.yaml` in the results directory. For several GPUs, the
command also writes the measured links to `<hardware>_topology.yaml`. You can write both files by hand, too.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sweeper.common.files import write_whole
from sweeper.config.schema import Hardware
from workloads.api.errors import UserInputError, first_line
from workloads.api.validation import build
from workloads.hardware.cluster import AttentionRates, Device

FOLDER = "calibration"
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Figure:
    """A measured value and, if available, its 95% interval."""

    value: float = field(metadata={"min": 1e-9})
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Calibration:
    hardware: str  # the device's name in conf/hardware
    device: str  # the driver's name for the device
    date: str  # the date of the measurement
    torch: str = ""  # the torch version
    conditions: str = ""  # how long the load lasted, and the clock and power
    busy: str = ""  # which other processes used the device, so the rates may be too low
    sustained_tflops: dict[str, Figure] = field(default_factory=dict)  # rates of large GEMMs, by dtype
    power_headroom: float = field(default=1.0, metadata={"min": 1.0, "max": 3.0})  # rate of a short run over a long one
    grouped_tflops: dict[str, Figure] = field(default_factory=dict)  # rates of grouped GEMMs, by dtype
    copy_gb_s: Figure | None = None  # the reads plus writes of copies, in GB/s
    update_gb_s: Figure | None = None  # the reads plus writes of AdamW's update, in GB/s
    launch_us: Figure | None = None  # the time between two kernels that the host launches one by one
    attention: dict[str, AttentionRates] = field(default_factory=dict)  # rates by the planner's kernel names

    def describe(self) -> str:
        names = [f"products in {' and '.join(self.sustained_tflops)}"] if self.sustained_tflops else []
        names += [f"grouped products in {' and '.join(self.grouped_tflops)}"] if self.grouped_tflops else []
        parts = {"copies": self.copy_gb_s, "AdamW's update": self.update_gb_s, "launches": self.launch_us}
        names += [part for part, figure in parts.items() if figure]
        names += [f"attention by {' and '.join(self.attention)}"] if self.attention else []
        busy = ", while other processes used it" if self.busy else ""
        return f"measured on {self.device}, {self.date}{busy}: {', '.join(names) or 'nothing'}"


@dataclass(frozen=True)
class CalibrationFile:
    path: Path
    rates: Calibration

    @property
    def topology_path(self) -> Path:
        """The path of the topology that was measured with the device. No such file exists for a single GPU."""
        return self.path.with_name(f"{self.path.stem}_topology.yaml")

    def describe(self) -> str:
        return f"{self.rates.describe()} ({self.path})"


def calibrate_device(device: Device, calibration: Calibration) -> Device:
    """Return the planner's device with rates replaced by measured rates."""
    products = calibration.sustained_tflops
    figures = {name: getattr(calibration, name) for name in ("copy_gb_s", "update_gb_s", "launch_us")}
    return replace(
        device,
        sustained_tflops={**device.sustained_tflops, **{dtype: rate.value for dtype, rate in products.items()}},
        power_headroom=calibration.power_headroom if products else device.power_headroom,
        grouped_tflops={dtype: rate.value for dtype, rate in calibration.grouped_tflops.items()},
        **{name: figure.value for name, figure in figures.items() if figure},
        attention={**device.attention, **calibration.attention},
    )


def device_key(hardware: Hardware) -> str:
    """Return the name under which a device's rates are stored. A partition has its own name and rates."""
    part = re.sub(r"\W+", "_", hardware.partition or "").lower()
    return f"{hardware.name}_{part}" if part else hardware.name


def find_calibration(choice: str, folder: Path, hardware: str, *, is_gpu: bool = True) -> CalibrationFile | None:
    """Return a device's measured rates, if there are any. A CPU has none, as its estimates only order points.

    `choice` is `auto` (the file in the results directory, if it exists), `none`, or the path of a file or folder.

    Raises UserInputError if there is no file at the given path, or if the file is invalid.
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
    """Read measured rates from a file. Raises UserInputError if the file is unreadable or a key is missing or wrong."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UserInputError(f"calibration={path}: cannot be read ({first_line(error)})") from error
    if not isinstance(values, dict):
        raise UserInputError(f"calibration={path}: has no keys; write one with python -m sweeper calibrate")
    values = {str(name): value for name, value in values.items() if value is not None}
    if "date" in values:
        values["date"] = str(values["date"])  # YAML reads a date as a date object
    return build(Calibration, values, f"{path}: ")


def write_calibration(path: Path, calibration: Calibration) -> None:
    values = {name: value for name, value in asdict(calibration).items() if value not in (None, {}, "")}
    write_yaml(path, values, "Measured by python -m sweeper calibrate; plans use it for this device.")


def write_yaml(path: Path, values: Mapping[str, Any], comment: str) -> None:
    """Write a comment and values to a YAML file atomically."""
    write_whole(path, f"# {comment}\n{yaml.safe_dump(dict(values), sort_keys=False)}")
