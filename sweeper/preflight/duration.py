"""How long a sweep takes by the cost model, before its first trial."""

from __future__ import annotations

from collections.abc import Mapping

from sweeper.config.environment import without_variables
from sweeper.config.space import Parameters
from sweeper.preflight.sweep_plan import SweepPlan

# Of a workload's parameters: with the estimated rate they give the seconds of a trial's steps.
NEEDED = ("global_batch", "sequence_length", "warmup", "steps")

SAMPLE = 500  # points, of many thousands that a space may have


def estimate_steps_s(plan: SweepPlan) -> float | None:
    """Return the seconds of all steps of the search, on all gangs at once; None where the cost model cannot say.

    Starting, compiling and the finals come on top.
    """
    limit = plan.config.budget.trials
    if plan.estimates is None or limit is None:
        return None
    valid = plan.estimates.valid
    sample = valid[:: 1 + len(valid) // SAMPLE]
    seconds = [_steps_s(plan, candidate.point, candidate.estimate.metrics) for candidate in sample]
    known = [value for value in seconds if value is not None]
    if not known:
        return None
    trials = min(limit, len(valid))
    return sum(known) / len(known) * trials / max(1, plan.resources.gangs)


def _steps_s(plan: SweepPlan, point: Parameters, metrics: Mapping[str, float]) -> float | None:
    parameters = plan.workload.Parameters(**without_variables({**plan.space.constants, **point}))
    rate = metrics.get("tokens_per_s")
    if not rate or not all(hasattr(parameters, name) for name in NEEDED):
        return None
    batch, length, warmup, steps = (getattr(parameters, name) for name in NEEDED)
    return float((warmup + steps) * batch * length / rate)
