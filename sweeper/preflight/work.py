"""Identify a trial's work and its fixed parameters. Only results of equal work are comparable."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from sweeper.config.environment import is_variable, only_variables, without_variables
from workloads.api.contract import Measurement, Scalar, Workload, is_path
from workloads.api.secrets import masked

if TYPE_CHECKING:  # importing Hydra's grammar takes 0.1 s, and a report uses this module
    from sweeper.config.space import Parameters, Space

SEARCHED = "searched"
MAX_VALUE_LENGTH = 200


@lru_cache
def _hash_file(path: Path, size: int, modified_ns: int) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()[:12]}"


@dataclass(frozen=True)
class WorkIdentifier:
    workload: Workload
    space: Space

    def fixed_parameters(self, point: Parameters) -> dict[str, Scalar]:
        """Return a trial's recorded parameters that are not searched: constants, defaults and settings."""
        return {name: value for name, value in self._recorded(point).items() if name not in point}

    def identify(self, point: Parameters, measurements: Iterable[Measurement] = ()) -> dict[str, str]:
        """Return the identity of a trial's work, excluding environment variables (see `Workload.work` and `.ways`)."""
        identity = {"workload": self.workload.name, "benchmark_version": self.workload.benchmark_version}
        for name, value in self._recorded(point).items():
            if name in self.workload.ways or value is None or is_variable(name):
                continue
            is_searched = name in self.space.dimensions and name not in self.workload.work
            text = SEARCHED if is_searched else f"{value} {self._hash_content(name, value)}".strip()
            if len(text) > MAX_VALUE_LENGTH:  # tags have a limited length; the digest keeps values distinct
                digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                text = f"{text[: MAX_VALUE_LENGTH - 14]}… {digest}"
            identity[name] = text
        for measurement in measurements:
            identity["type"] = measurement.matrix_dtype
            identity.setdefault("statistic", measurement.statistic)
            break
        return {name: value for name, value in identity.items() if value}

    def _hash_content(self, name: str, value: Scalar) -> str:
        parameter = self.workload.Parameters.__dataclass_fields__.get(name)
        if parameter is None or not is_path(value, parameter) or not (path := Path(str(value))).is_file():
            return ""
        return _hash_file(path, path.stat().st_size, path.stat().st_mtime_ns)

    def _recorded(self, point: Parameters) -> Mapping[str, Scalar]:
        values = {**self.space.constants, **point}
        try:
            recorded = self.workload.recorded_parameters(self.workload.Parameters(**without_variables(values)))
        except (TypeError, ValueError):  # contradictory values, which will make the trial fail
            recorded = without_variables(values)
        checked: dict[str, Scalar] = masked({**recorded, **only_variables(values)})
        return checked
