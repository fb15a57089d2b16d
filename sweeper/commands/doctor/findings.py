"""What the doctor reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy.

    Attributes:
        location: the node, GPU or store that has the problem.
        affects_results: measurements are wrong or slow because of it.
    """

    location: str
    problem: str
    remedy: str
    affects_results: bool = True
