"""A trial as the search creates it."""

from __future__ import annotations

from dataclasses import dataclass

from sweeper.common.trials import Remeasurement, Retry
from sweeper.config.space import Parameters


@dataclass(frozen=True)
class Trial:
    """One point of the space with its number in the study. `params` has the parameters that vary, and no others."""

    number: int
    params: Parameters
    remeasurement: Remeasurement | None = None
    retry: Retry | None = None
