"""Track a sweep's progress: the trials' outcomes, the best trial so far, and the remaining budget."""

import math
import time
from collections import Counter
from collections.abc import Iterable

from sweeper.common.clock import SECONDS_PER_HOUR
from sweeper.common.format import format_number
from sweeper.common.trials import BAD, TrialRecord, TrialStatus
from sweeper.config.schema import Budget
from sweeper.metrics.criteria import Criteria, dominates

DESCRIPTIONS = {TrialStatus.FAILED: "failed", TrialStatus.LOST: "were lost", TrialStatus.TIMED_OUT: "timed out"}
SUCCESSES = (TrialStatus.COMPLETE, TrialStatus.PRUNED)  # a pruned trial did run
# The limits of the budget. The search ends when it reaches any of them.
LIMITS = ("trials", "time_s", "patience", "gpu_hours", "cost")


class RepeatedFailures:
    """Counts failures by status and reason since the last success. Infeasible trials do not count as failures.

    `limit` failures of one kind stop the sweep. If `limit` is None, failures never stop the sweep. Failures on only one
    of several nodes do not stop it either, because that node may be faulty and will then be drained."""

    def __init__(self, limit: int | None, nodes: int = 1) -> None:
        self._limit, self._nodes = limit, nodes
        self._counts: Counter[tuple[TrialStatus, str]] = Counter()
        self._places: dict[tuple[TrialStatus, str], set[str]] = {}  # the nodes where each kind of failure occurred
        self._any_success = False
        self.stop_reason = ""  # empty while the sweep continues; cleared if a trial in flight succeeds

    def add(self, record: TrialRecord) -> None:
        if record.status in SUCCESSES:
            self._counts.clear()
            self._places.clear()
            self._any_success = True
            self.stop_reason = ""
        elif record.status in BAD:
            kind = record.status, record.kind_of_reason
            self._counts[kind] += 1
            places = self._places.setdefault(kind, set())
            places.update(str(record.where.get("node_ids") or "").split())
            is_on_one_node = self._nodes > 1 and len(places) == 1
            if self._limit is not None and self._counts[kind] >= self._limit and not is_on_one_node:
                count, how = self._counts[kind], DESCRIPTIONS[record.status]
                between = " with no success in between" if self._any_success else ""
                self.stop_reason = f"{count} trials {how} for the same reason{between}: {record.reason}"


class SweepProgress:
    """A running summary of the ended trials, updated as trials end so that reading it costs nothing."""

    def __init__(
        self,
        criteria: Criteria,
        budget: Budget,
        records: Iterable[TrialRecord],
        *,
        repeated: Iterable[TrialRecord] = (),
        gpus: int = 1,
        nodes: int = 1,
        gpu_price_per_hour: float | None = None,
    ) -> None:
        """Start from the records of search trials that ended in earlier runs.

        `repeated` are earlier attempts at trials that were or will be tried again. Only their time counts toward the
        budget. `gpus` is the number of GPUs per trial, and `nodes` the number of nodes in the sweep.
        """
        self._criteria, self._budget = criteria, budget
        self._gpus, self._gpu_price_per_hour = gpus, gpu_price_per_hour or 0.0
        self._failures = RepeatedFailures(None)
        self._records: list[TrialRecord] = []
        self.counts: Counter[TrialStatus] = Counter()
        self.best: TrialRecord | None = None  # with several objectives, the best by the leading objective
        self.front: list[TrialRecord] = []  # with several objectives: sorted by the leading objective, best first
        self.varying: set[str] = set()  # parameters in which trials differ
        self._trials_since_best = 0
        repeated = list(repeated)
        self._trial_s = sum(record.duration_s for record in repeated)
        self._attempts = len(repeated)
        self._timed_s = 0.0
        for record in sorted(records, key=lambda record: record.elapsed_s):
            self.add(record)
        self._earlier_elapsed_s = max((record.elapsed_s for record in [*self._records, *repeated]), default=0.0)
        self._earlier_finished = self.finished_trials
        self._started_s: float | None = None
        # Failures in earlier runs do not stop this run.
        self._failures = RepeatedFailures(budget.same_failures, nodes)

    def start(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """The search time in seconds, summed over all runs of this sweep."""
        this_run_s = time.monotonic() - self._started_s if self._started_s is not None else 0.0
        return self._earlier_elapsed_s + this_run_s

    @property
    def finished_trials(self) -> int:
        """The number of trials that count toward the budget. Cancelled trials do not count because they run again."""
        return self.counts.total() - self.counts[TrialStatus.CANCELLED]

    @property
    def finished_in_this_run(self) -> int:
        return self.finished_trials - self._earlier_finished

    @property
    def mean_trial_s(self) -> float:
        """The mean duration of a trial in seconds, including earlier attempts, or 0 before the first trial."""
        return self._trial_s / self._attempts if self._attempts else 0.0

    @property
    def timed_share(self) -> float:
        """The share of the trials' time spent in timed steps. The rest goes into startup, compilation and warmup."""
        return min(1.0, self._timed_s / self._trial_s) if self._trial_s else 0.0

    def add(self, record: TrialRecord, *, was_forgotten: bool = False) -> bool:
        """Add an ended trial. Return whether the trial is better than all earlier trials, or joins the front."""
        self._records.append(record)
        first = self._records[0].params
        self.varying.update(name for name, value in record.params.items() if first.get(name) != value)
        self.counts[record.status] += 1
        if not was_forgotten:
            self._attempts += 1
            self._trial_s += record.duration_s
            self._timed_s += record.metrics.get("steps", 0.0) * record.metrics.get("step_time_ms", 0.0) / 1e3
        self._failures.add(record)
        losses, is_better = self._criteria.ranked_losses(record), False
        if losses is not None and not self._criteria.has_front:
            is_better = self.best is None or losses < self._losses_of(self.best)
            self.best = record if is_better else self.best
        elif losses is not None and not any(dominates(self._losses_of(other), losses) for other in self.front):
            kept = [other for other in self.front if not dominates(losses, self._losses_of(other))]
            self.front = sorted([*kept, record], key=self._losses_of)
            self.best, is_better = self.front[0], True
        if is_better:
            self._trials_since_best = 0
        elif record.status is not TrialStatus.CANCELLED:
            self._trials_since_best += 1
        return is_better

    def forget(self, record: TrialRecord) -> None:
        """For a trial that is tried again, count only its time. The trial must not be the best or on the front."""
        self._records = [other for other in self._records if other is not record]
        self.counts[record.status] -= 1

    def _losses_of(self, record: TrialRecord) -> tuple[float, ...]:
        losses = self._criteria.ranked_losses(record)
        assert losses is not None
        return losses

    def ranked_trials(self) -> list[TrialRecord]:
        """Return the trials that have a rank, best first."""
        return self._criteria.rank(self._records)

    @property
    def stop_reason(self) -> str:
        """Why the search stops before its budget is used up, or an empty string while the search continues."""
        return self._failures.stop_reason

    def has_budget_for_more(self, in_flight: int, running_s: float = 0.0) -> bool:
        """Return whether the budget allows another trial if `in_flight` trials have run for `running_s` in total."""
        needed = {**self._needed(running_s), "trials": self.finished_trials + in_flight}
        return all(needed[name] < limit for name, limit in self._limits().items())

    def exhausted_limits(self) -> dict[str, int | float]:
        needed = self._needed(0.0)
        return {name: limit for name, limit in self._limits().items() if needed[name] >= limit}

    def describe_exhausted(self) -> str:
        """Describe the limits that have been reached, and how much of each is used."""
        limits, used = self.exhausted_limits(), self.used()
        notes = {"trials": " with a larger budget"} if used["trials"] > limits.get("trials", math.inf) else {}
        spent = {name: f"{format_number(used[name])} used{notes.get(name, '')}" for name in limits}
        return " and ".join(f"budget.{name}={limit:g} ({spent[name]})" for name, limit in limits.items())

    def _limits(self) -> dict[str, int | float]:
        limits = {name: getattr(self._budget, name) for name in LIMITS}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def used(self, running_s: float = 0.0) -> dict[str, int | float]:
        """Return how much of each limit is used. `running_s` is the time of trials in flight."""
        gpu_hours = (self._trial_s + running_s) * self._gpus / SECONDS_PER_HOUR
        return {
            "trials": self.finished_trials,
            "time_s": self.elapsed_s,
            "patience": self._trials_since_best,
            "gpu_hours": gpu_hours,
            "cost": gpu_hours * self._gpu_price_per_hour,
        }

    def _needed(self, running_s: float) -> dict[str, int | float]:
        """Return how much of each limit is used. The time includes another trial of mean duration, which must fit."""
        return {**self.used(running_s), "time_s": self.elapsed_s + self.mean_trial_s}

    def binding_limit(self, trials: int | None) -> tuple[float, str]:
        """Return the largest used share of any limit except patience, and the limit as text unless it is `trials`."""
        limits, used = {"trials": trials, **self._limits(), "patience": None}, self.used(0.0)
        shares = {name: used[name] / limit for name, limit in limits.items() if limit}
        name = max(shares, key=shares.__getitem__, default="trials")
        text = "" if name == "trials" else f"{name} {format_number(used[name])} of {format_number(limits[name] or 0)}"
        return min(1.0, shares.get(name, 0.0)), text

    def estimated_remaining_s(self, trials: int | None) -> float | None:
        """Estimate the seconds until `trials` have ended or a limit is reached. Return None if there is no estimate."""
        estimates_s = []
        if trials is not None and self.finished_in_this_run > 0:
            seconds_per_trial = (self.elapsed_s - self._earlier_elapsed_s) / self.finished_in_this_run
            estimates_s.append(seconds_per_trial * (trials - self.finished_trials))
        if self._budget.time_s is not None:
            estimates_s.append(self._budget.time_s - self.elapsed_s)
        used = self.used(0.0)
        for name, limit in self._limits().items():
            if name in ("gpu_hours", "cost") and used[name] > 0:  # assume that the rate stays the same
                estimates_s.append(self.elapsed_s * (limit / used[name] - 1))
        return max(0.0, min(estimates_s)) if estimates_s else None
