"""Test matrices of which `make test` runs a part and `make soak` the rest."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def covering(*axes: Sequence[Any], strength: int, build: Callable[..., Any] | None = None) -> list[Any]:
    """Return every combination of the axes' values as a test's parameters.

    A part of them that has every combination of the values of any `strength` axes is run by `make test`. The other
    cases are marked as soak tests. `build` makes the one parameter of a test from a case; without it each axis is a
    parameter.
    """
    cases = list(product(*axes))
    fast = _choose(cases, strength)
    return [
        pytest.param(*([build(*case)] if build else case), marks=[] if case in fast else [pytest.mark.soak])
        for case in cases
    ]


def _choose(cases: Sequence[Case], strength: int) -> list[Case]:
    """Choose greedily: each time the first of the cases that have the most combinations that are not covered."""
    missing = set().union(*(_tuples(case, strength) for case in cases))
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: len(missing & _tuples(case, strength)))
        missing -= _tuples(best, strength)
        chosen.append(best)
    return chosen


def _tuples(case: Case, strength: int) -> set[tuple[tuple[int, Any], ...]]:
    """Return the combinations of `strength` values that the case has, each value with its axis."""
    return set(combinations(enumerate(case), strength))
