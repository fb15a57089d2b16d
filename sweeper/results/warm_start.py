"""Reading the sweep that `search.warm_start` names."""

from __future__ import annotations

from pathlib import Path

from sweeper.config.schema import Config
from sweeper.preflight.warm_start import POINTS, WarmStart
from sweeper.results.stored import StoredSweep, find_sweep, rank_searched
from workloads.api.errors import UserInputError


def read_warm_start(config: Config) -> WarmStart | None:
    """Return the better half of the other sweep's trials, at least as many as are used; None if none is named.

    Raises:
        UserInputError: there is no such sweep, or no trial of it is complete.
    """
    name = config.search.warm_start
    if name is None:
        return None
    key = "search.warm_start="
    if "/" in name:
        sweep = StoredSweep(Path(name).expanduser().resolve())
    else:
        sweep = find_sweep(Path(config.dir).expanduser().resolve(), name, option=key)
    description = sweep.description
    if description is None:
        raise UserInputError(f"{key}{name}: this is no folder of a sweep (it has no sweep.json)")
    ranked = rank_searched(sweep.records, description)
    if not ranked:
        raise UserInputError(f"{key}{name}: no trial of it is complete")
    better = ranked[: max(POINTS, len(ranked) // 2)]
    return WarmStart(name, description.study, tuple(record.all_params for record in better))
