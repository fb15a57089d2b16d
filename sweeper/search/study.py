"""Track which parameters were tried, and choose the next parameters with Optuna.

A sweep has two Optuna studies. The journal on disk is the source of truth. A single driver writes each trial's
parameters when the trial is created, and the complete record when the trial ends. The sampler and the pruner see only
the sampling study in memory, so a new trial costs one line on disk instead of one line per parameter.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from optuna.samplers import BaseSampler
from optuna.trial import TrialState, create_trial

from sweeper.common.trials import Remeasurement, Retry, Trial, TrialRecord, TrialStatus
from sweeper.config.schema import Search
from sweeper.config.space import Parameters, Range, Space, Value, point_key
from sweeper.metrics.criteria import Criteria
from sweeper.search import sampling
from sweeper.search.journal import RECORD, Journal, StoredTrial, check_identity, describe_differences

optuna.logging.set_verbosity(optuna.logging.WARNING)

# The journal's states for incomplete trials. Other statuses become FAIL, from which no sampler learns. Samplers do
# learn from PRUNED: an infeasible trial cannot work and is not tried again.
STATES = {TrialStatus.INFEASIBLE: TrialState.PRUNED, TrialStatus.PRUNED: TrialState.PRUNED}
AGAIN = "again"  # the study attribute with the trials that a run queued for remeasurement at its end
RUNS = "runs"  # the study attribute with each run's state and the number of its first trial
MAX_RANDOM_PROPOSALS = 100  # from the random sampler, before the space is enumerated
MAX_PROPOSALS_AMONG_FEW = 30  # from any sampler, if only some points are allowed


class Study:
    """The search of a sweep: `ask` returns trials, and `tell` stores their records in any order.

    If a driver was killed, opening the study repairs the state that it left behind. `ask` then returns the unfinished
    trials again, with the same numbers, before any new trial.

    Trials of earlier runs may run again on request. The earlier attempt stays in the journal. When the retry ends with
    any outcome except cancelled, it replaces the earlier attempt, which is then left out of all counts, rankings and
    sampling."""

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        space: Space,
        search: Search,
        seed: int,
        criteria: Criteria,  # objectives and limits
        initial_points: Sequence[Parameters] = (),
        retry: Collection[TrialStatus] = (),
        run_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Open or create the study in the journal at `path`.

        Args:
            identity: the settings that must not change between the runs of a sweep.
            initial_points: points to try first. The sampler chooses any values that a point lacks.
            retry: the statuses of earlier runs' trials that this run will try again.
            run_state: the state that may change between runs. A retry records what has changed in it.

        Raises:
            UserInputError: the journal belongs to a sweep with another identity.
        """
        self._space = space
        self._sampler, self._seed, self._criteria = search.sampler, seed, criteria
        self.distributions = {name: sampling.to_distribution(dimension) for name, dimension in space.dimensions.items()}
        self._journal = Journal(path, *criteria.directions, metrics=criteria.metrics)
        self.id = check_identity(self._journal.study, identity)  # because sweep names are not unique
        self._sampling = sampling.SamplingStudy(search, criteria, self.distributions)
        self.sync, self.should_prune = self._journal.sync, self._sampling.should_prune
        self.trial_count = 0  # trials in the journal, including remeasurements
        self._search_trial_count = 0  # trials in the journal that are not remeasurements
        self._known_keys: set[str] = set()  # keys of points that must not be proposed again
        self.records: dict[int, TrialRecord] = {}  # records of all trials that have ended
        self.unfinished: list[Trial] = []  # search trials that a killed driver left
        self.abandoned: list[int] = []  # remeasurements that a killed driver left, which are not run again
        self.replaced: set[int] = set()  # trials that a retry replaced, and retries that replaced no earlier attempt
        self.retried: set[int] = set()  # trials that this run tries again; replaced when the retries end
        self._retried_statuses = retry
        self._retry_marks: dict[str | Remeasurement, Retry] = {}  # by point key, or by round of the finals
        self.retry_points: list[Parameters] = []  # points to retry that have no new trial yet
        self._queued_points: list[Parameters] = []
        self._allowed_keys = None if space.only is None else {point_key(point) for point in space.only}
        self._remaining_points: Iterator[Parameters] | None = None
        self._load(run_state or {})
        self._queue_initial_points(initial_points)

    @property
    def exhausted(self) -> bool:
        """Whether every point of the space has been sampled."""
        if self._allowed_keys is not None:  # points allowed in an earlier run may not be allowed now
            return self._allowed_keys <= self._known_keys
        return len(self._known_keys) >= self._space.size

    @property
    def retries(self) -> list[Retry]:
        """The trials that this run tries again on request."""
        return list(self._retry_marks.values())

    @property
    def current_records(self) -> list[TrialRecord]:
        """The records of all trials that no retry has replaced."""
        return [record for record in self.records.values() if record.number not in self.replaced]

    def ask(self) -> Trial | None:
        """Return the next trial, or None if every point already has a trial."""
        if self.unfinished:
            return self.unfinished.pop(0)
        proposal = self._propose(self._search_trial_count)
        if proposal is None:
            return None
        self._search_trial_count += 1
        params = self._snap_to_space(proposal.params)
        sampler_state = self._sampling.accept(self.trial_count, proposal)
        key = point_key(params)
        self._known_keys.add(key)
        return self._add_trial(Trial(self.trial_count, params, retry=self._retry_marks.get(key)), sampler_state)

    def ask_remeasurement(self, params: Parameters, remeasurement: Remeasurement, clock_mhz: float = 0.0) -> Trial:
        """Return a trial that remeasures known parameters. The sampler does not see this trial."""
        retry = self._retry_marks.get(remeasurement)
        return self._add_trial(Trial(self.trial_count, dict(params), remeasurement, retry, clock_mhz))

    def _add_trial(self, trial: Trial, sampler_state: Mapping[str, Any] | None = None) -> Trial:
        self.trial_count += 1
        marks = {"remeasurement": trial.remeasurement, "retry": trial.retry}
        self._journal.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=trial.params,
                distributions=self.distributions,
                user_attrs={
                    **{name: asdict(mark) for name, mark in marks.items() if mark},
                    **({sampling.SAMPLER_STATE: dict(sampler_state)} if sampler_state else {}),
                },
            )
        )
        return trial

    def _propose(self, number: int) -> optuna.trial.Trial | None:
        if self.exhausted:
            return None
        name, seed = self._sampler, self._seed
        sampler = self._sampling.make_sampler(seed, number)
        while queue := self.retry_points or self._queued_points:
            if proposal := self._ask_sampler(sampler, queue.pop(0)):
                return proposal
        # After a resume, QMC restarts its sequence and must skip all points that were already tried.
        max_proposals = 10 + (len(self._known_keys) if name == "qmc" else 0)
        attempts = [(sampler, max_proposals), (sampling.make_sampler("random", seed, number), MAX_RANDOM_PROPOSALS)]
        if self._allowed_keys is not None:
            # If only some points are allowed, the next allowed point is better than a random point.
            attempts = [(sampler, MAX_PROPOSALS_AMONG_FEW)]
        for attempt_sampler, proposals in attempts if name != "grid" else ():
            for _ in range(proposals):
                if proposal := self._ask_sampler(attempt_sampler):
                    return proposal
        if self._remaining_points is None:
            self._remaining_points = self._space.points()
        return next((trial for point in self._remaining_points if (trial := self._ask_sampler(sampler, point))), None)

    def _ask_sampler(self, sampler: BaseSampler, point: Parameters | None = None) -> optuna.trial.Trial | None:
        if point is not None and point_key(point) in self._known_keys:
            return None
        proposal = self._sampling.ask(sampler, point)
        key = point_key(self._snap_to_space(proposal.params))
        if key not in self._known_keys and (self._allowed_keys is None or key in self._allowed_keys):
            return proposal
        self._sampling.drop(proposal)
        return None

    def tell(self, record: TrialRecord) -> None:
        """Store how a trial ended, and the steps that it reported, for the pruner of a later run."""
        if steps := self._sampling.steps(record.number):  # one line for all; Optuna would write one for each step
            self._journal.set_attr(record.number, "steps", steps)
        # The record comes before the state: if the driver is killed in between, the next driver finds the record.
        self._journal.set_attr(record.number, RECORD, asdict(record))
        self._finish(record)

    def _finish(self, record: TrialRecord) -> None:
        ending = self._ending_of(record)
        self._journal.tell(record.number, ending.values, ending.state)
        self.records[record.number] = record
        if record.superseded is not None:
            self.replaced.add(record.superseded)
        if not record.remeasurement:
            self._sampling.finish(record.number, ending)

    def _ending_of(self, record: TrialRecord) -> sampling.Ending:
        if record.status is not TrialStatus.COMPLETE:
            is_infeasible = record.status is TrialStatus.INFEASIBLE
            return sampling.Ending(STATES.get(record.status, TrialState.FAIL), infeasible=is_infeasible)
        if values := self._criteria.values(record):
            return sampling.Ending(TrialState.COMPLETE, values, excess=self._criteria.excess(record))
        return sampling.Ending(TrialState.FAIL)  # a trial without an objective cannot be ranked or learned from

    def _load(self, run_state: Mapping[str, Any]) -> None:
        trials = self._journal.trials
        records: list[TrialRecord | None] = []
        earlier: TrialRecord | None = None
        for trial in trials:
            if fields := trial.user_attrs.get(RECORD):
                earlier = TrialRecord.from_fields(fields, earlier)
            records.append(earlier if fields else None)
        self.replaced = {number for record in records if record and (number := record.superseded) is not None}
        finished: list[tuple[int, StoredTrial, sampling.Ending]] = []
        running: dict[int, StoredTrial] = {}
        without_state: list[TrialRecord] = []  # the driver was killed after writing the record
        for trial, record in zip(trials, records, strict=True):
            number, has_ended = trial.number, trial.state.is_finished()
            self.trial_count += 1
            self._known_keys.add(point_key(record.params if record else self._snap_to_space(trial.params)))
            if record and has_ended:
                self.records[number] = record
            if "remeasurement" in trial.user_attrs:
                if record and not has_ended:
                    self._finish(record)
                elif not record:  # not repeated here: the finals will repeat the trial, interleaved
                    if not has_ended:
                        self._journal.tell(number, None, TrialState.FAIL)
                    self.abandoned.append(number)
                continue
            self._search_trial_count += 1
            if record and has_ended:
                ending = self._ending_of(record)
                is_repeated = number in self.replaced or self._selects_retry(record)
                if ending.state in sampling.LEARNED_STATES and not is_repeated:
                    finished.append((number, trial, ending))
                continue
            running[number] = trial
            if record:
                without_state.append(record)
                continue
            retry = Retry.from_dict(attr) if (attr := trial.user_attrs.get("retry")) else None
            self.unfinished.append(Trial(number, dict(trial.params), retry=retry))
            if retry:
                self.retried.add(retry.trial)
        self._sampling.load(finished, running)
        for record in without_state:
            self._finish(record)
        self._queue_cancelled_points()
        self._queue_retries(dict(run_state))
        self._journal.forget_ended()

    def _selects_retry(self, record: TrialRecord) -> bool:
        """Return whether this run is to retry a trial. Node comparisons are never retried."""
        is_comparison = record.remeasurement is not None and not record.remeasurement.group
        return record.status in self._retried_statuses and not is_comparison

    def _queue_retries(self, run_state: dict[str, Any]) -> None:
        """Queue the trials to retry, and note what has changed. Retries in `unfinished` are already queued."""
        study = self._journal.study
        runs: list[dict[str, Any]] = list(study.user_attrs.get(RUNS, []))
        if not runs or runs[-1]["state"] != run_state:
            study.set_user_attr(RUNS, [*runs, {"first_trial": self.trial_count, "state": run_state}])
        for record in self.current_records:
            if self._selects_retry(record) and record.number not in self.retried:
                states = [run["state"] for run in runs if run["first_trial"] <= record.number]
                self.try_again(record, describe_differences(states[-1], run_state) if states else [])
        retries = [record for record in self.records.values() if record.superseded is not None]
        tried = {record.retry.trial for record in retries if record.retry}
        queued = self.again - tried - self.retried  # queued by a run that was then stopped
        for record in [record for record in self.current_records if record.number in queued]:
            self.try_again(record)

    def queue_again(self, records: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Queue trials with `try_again`, and store the queue in case this run is stopped. Return the queued trials."""
        queued = [record for record in records if self.try_again(record)]
        if queued:
            self._journal.study.set_user_attr(AGAIN, sorted(self.again | {record.number for record in queued}))
        return queued

    @property
    def again(self) -> set[int]:
        """The numbers of the trials that `queue_again` has queued, in this and earlier runs."""
        return {*self._journal.study.user_attrs.get(AGAIN, [])}

    def try_again(self, record: TrialRecord, changes: Sequence[str] = ()) -> bool:
        """Queue a point, or a round of the finals, for a new trial that will replace this trial.

        Returns False if the space no longer contains the point."""
        key = record.remeasurement or point_key(record.params)
        if isinstance(key, str):
            if self._allowed_keys is not None and key not in self._allowed_keys:
                return False
            self.retry_points.append(dict(record.params))
            self._known_keys.discard(key)
        self._retry_marks[key] = Retry(record.number, tuple(changes))
        self.retried.add(record.number)
        return True

    def _queue_initial_points(self, points: Sequence[Parameters]) -> None:
        tried: list[Mapping[str, Value]] = [record.params for record in self.records.values()]
        tried += [trial.params for trial in self.unfinished]
        for point in points:
            stored = {}  # values as Optuna returns them: on an interval, 3 becomes 3.0
            for name, value in point.items():
                distribution = self.distributions[name]
                stored[name] = distribution.to_external_repr(distribution.to_internal_repr(value))
            stored = self._snap_to_space(stored)
            if not any(stored.items() <= params.items() for params in [*tried, *self._queued_points]):
                self._queued_points.append(stored)

    def _queue_cancelled_points(self) -> None:
        if not any(record.status is TrialStatus.CANCELLED for record in self.records.values()):
            return  # computing the keys of 100,000 points takes seconds
        cancelled: dict[str, Parameters] = {}
        tried = {point_key(trial.params) for trial in self.unfinished}
        for record in self.records.values():
            if record.status is TrialStatus.CANCELLED:
                cancelled[point_key(record.params)] = dict(record.params)
            else:
                tried.add(point_key(record.params))
        self._known_keys -= cancelled.keys() - tried
        self._queued_points = [point for key, point in cancelled.items() if key not in tried]

    def _snap_to_space(self, params: Mapping[str, Any]) -> Parameters:
        """Return the parameters with the exact values in the space's ranges instead of rounded sums of steps."""
        ranges = {name: item for name, item in self._space.dimensions.items() if isinstance(item, Range)}
        return {name: ranges[name].nearest(value) if name in ranges else value for name, value in params.items()}
