"""How long a sweep will take: before it by the cost model, and as soon as its first trials have ended."""

from __future__ import annotations

from sweeper.common.format import count, format_duration
from sweeper.common.trials import TrialStatus
from sweeper.preflight.duration import estimate_steps_s
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.search.front import MAX_POINTS
from sweeper.search.progress import SweepProgress

LONG_S = 60.0  # nobody needs an estimate of a sweep that is shorter
MIN_TRIALS = 3  # the first one also warms caches up


def describe_plan(plan: SweepPlan) -> str:
    """Return the duration by the cost model; empty for a short sweep, and where there is no such estimate."""
    steps_s = estimate_steps_s(plan)
    if steps_s is None or steps_s < LONG_S:
        return ""
    return f"estimate about {format_duration(steps_s)} of steps by the cost model; starting and compiling come on top"


class DurationNote:
    """The estimate from a run's first trials, which is shown once."""

    def __init__(self, plan: SweepPlan) -> None:
        self._plan = plan
        self._is_due = True

    def next_line(self, progress: SweepProgress, trials: int | None, gangs: int) -> str:
        """Return the estimate when enough trials have ended; empty before, after, and for a short sweep.

        Args:
            progress: of the search.
            trials: the budget; None without a limit.
            gangs: trials that run at once.
        """
        remaining_s = progress.estimated_remaining_s(trials)
        has_enough = progress.finished_in_this_run >= max(MIN_TRIALS, gangs) and progress.counts[TrialStatus.COMPLETE]
        if not self._is_due or remaining_s is None or not has_enough:
            return ""
        self._is_due = False
        finals = self._plan.config.finals
        top = max(finals.top, MAX_POINTS) if finals.top and self._plan.criteria.has_front else finals.top
        measurements = min(top, top if trials is None else trials) * finals.rounds
        finals_s = measurements * progress.mean_trial_s
        if remaining_s + finals_s < LONG_S:
            return ""
        then = f", then {format_duration(finals_s)} of finals ({count(measurements, 'measurement')})"
        return (
            f"estimate about {format_duration(remaining_s)} until the budget is used up{then if measurements else ''}"
        )
