"""One result of another tool, as its file has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NOT_THE_SAME = 0.02  # from where on a claim disagrees with what it is held against


@dataclass(frozen=True)
class Imported:
    """One result. `claims` are the tool's own figures by this project's names; `step_times_s` and `tokens_per_step` are
    what they are computed again from.

    contradictions: what in the file does not fit together, in words
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


def whole(value: object) -> int | None:
    """A whole number above zero, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
