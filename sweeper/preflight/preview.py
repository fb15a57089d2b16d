"""What a workload shows of a plan's first point."""

from __future__ import annotations

from sweeper.config.environment import without_variables
from sweeper.config.space import Interval, Parameters
from sweeper.preflight.sweep_plan import SweepPlan


def first_point(plan: SweepPlan) -> Parameters:
    """Return the most promising point, the first initial one, or the first value of every dimension."""
    if plan.estimates:
        return plan.estimates.valid[0].point
    if plan.initial_points:
        return {**_first_values(plan), **plan.initial_points[0]}
    return _first_values(plan)


def preview(plan: SweepPlan) -> str:
    """Return what the workload shows of the first point; empty if it shows nothing, or its values contradict."""
    try:
        parameters = plan.workload.Parameters(**without_variables({**plan.space.constants, **first_point(plan)}))
    except ValueError:  # the trial fails for it, and others may not
        return ""
    return plan.workload.preview(parameters, plan.machine)


def _first_values(plan: SweepPlan) -> Parameters:
    return {
        name: dimension.low if isinstance(dimension, Interval) else next(iter(dimension.points()))
        for name, dimension in plan.space.dimensions.items()
    }
