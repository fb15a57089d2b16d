"""One imported result, with the values of its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CLAIM_TOLERANCE = 0.02  # relative difference from which a claim contradicts the value that it is compared with


@dataclass(frozen=True)
class ImportedResult:
    """One result of another tool.

    Attributes:
        step_times_s, tokens_per_step: what the metrics are derived from.
        devices: number of devices; None means unknown.
        device: name of one device; empty means unknown.
        feasible: the configuration worked.
        claims: the tool's own metrics, under this project's names.
        contradictions: messages about values of the file that contradict each other.
    """

    name: str
    params: dict[str, Any]
    step_times_s: tuple[float, ...] = ()
    tokens_per_step: int = 0
    devices: int | None = None
    device: str = ""
    feasible: bool = True
    claims: dict[str, float] = field(default_factory=dict)
    machine_info: dict[str, Any] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()


def as_positive_int(value: object) -> int | None:
    """Return `value` if it is an integer above zero, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
