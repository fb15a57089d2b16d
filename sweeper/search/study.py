"""Optuna: what to try next, and the study that remembers what was tried.

Two studies stand side by side. The one on disk is the truth: an Optuna journal of one sweep, written by one
driver, with every trial's parameters from the moment it is asked and its whole record when it ends. The one
in memory is what the sampler sees. Sampling from a copy is what allows a proposal that was tried before to be
dropped without a trace, and an ask to cost one line on disk instead of one for each parameter.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeper.common.errors import UserInputError
from sweeper.common.trials import Remeasurement, TrialRecord, TrialStatus
from sweeper.config.space import Choice, Dimension, Parameters, Range, Space, Value, point_key

optuna.logging.set_verbosity(optuna.logging.WARNING)
warnings.filterwarnings("ignore", category=ExperimentalWarning)  # of QMC, since 2022

# How the study on disk marks an ending. FAIL is what no sampler learns from; PRUNED is a trial that was ended
# with knowledge, here that it cannot work.
STATES = {
    TrialStatus.COMPLETE: TrialState.COMPLETE,
    TrialStatus.INFEASIBLE: TrialState.PRUNED,
    TrialStatus.PRUNED: TrialState.PRUNED,
}
STARTUP_TRIALS, STARTUP_STEPS = 5, 5  # before which no trial, and no step of one, is held against others
PATIENCE_AMONG_FEW = 30  # proposals of a sampler where only some points are legal
# A constraint as Optuna stores it: above zero means violated.
INFEASIBLE = ("constraints:feasible", 1.0)


@dataclass(frozen=True)
class Trial:
    """One point of the space, with its number in the study. `params` holds what varies, and only that."""

    number: int
    params: Parameters
    remeasurement: Remeasurement | None = None


class Study:
    """The search of one sweep: `ask` for trials, `tell` their records, in any order.

    Opening a study that a killed driver left repairs it: trials it had asked and not told are asked again
    under their own numbers, before anything new.
    """

    def __init__(
        self,
        path: Path,
        identity: dict[str, Any],
        space: Space,
        *,
        sampler: str,
        seed: int,
        objective: str,
        direction: str,
        first: Sequence[Parameters] = (),
        pruner: str = "none",
    ) -> None:
        self._space, self._sampler, self._seed, self._objective = space, sampler, seed, objective
        self.distributions = {name: distribution(d) for name, d in space.dimensions.items()}
        self._disk = open_journal(path, direction)
        self.id = _check_identity(self._disk, identity)
        self._memory = optuna.create_study(direction=direction, pruner=make_pruner(pruner))
        self._in_memory: dict[int, int] = {}  # number on disk: number in memory, of those not told
        self._asked = 0  # how many trials there are on disk
        self._searched = 0  # how many of them are of the search
        self._seen: set[str] = set()  # points that are not to be proposed
        self.records: dict[int, TrialRecord] = {}
        self.unfinished: list[Trial] = []  # asked by a driver that was killed, to be asked again first
        self.abandoned: list[int] = []  # asked again beside the search by such a driver: not asked a third time
        self._wanted: list[Parameters] = []
        self._allowed = None if space.only is None else {point_key(point) for point in space.only}
        self._load()
        self._want_first(first)
        self._enumeration: Iterator[Parameters] | None = None

    # ── asking ──

    @property
    def exhausted(self) -> bool:
        """Whether every point of the space was asked for."""
        if self._allowed is not None:  # what was legal in an earlier run may not be now
            return self._allowed <= self._seen
        return len(self._seen) >= self._space.size

    def ask(self) -> Trial | None:
        """The next trial, or None when the space is used up."""
        if self.unfinished:
            return self.unfinished.pop(0)
        number = self._asked
        asked = self._propose(self._searched)
        if asked is None:
            return None
        self._asked += 1
        self._searched += 1
        params = self._exact(asked.params)
        self._disk.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=self.distributions))
        self._in_memory[number] = asked.number
        self._seen.add(point_key(params))
        return Trial(number, params)

    def ask_again(self, params: Parameters, remeasurement: Remeasurement) -> Trial:
        """A trial beside the search, of parameters that were tried: the sampler never hears of it."""
        number = self._asked
        self._asked += 1
        attrs = {"remeasurement": asdict(remeasurement)}
        self._disk.add_trial(
            create_trial(state=TrialState.RUNNING, params=params, distributions=self.distributions, user_attrs=attrs)
        )
        return Trial(number, dict(params), remeasurement)

    def _propose(self, number: int) -> optuna.trial.Trial | None:
        """A trial in memory whose parameters were not tried before."""
        if self.exhausted:
            return None
        own = make_sampler(self._sampler, self._seed, number)
        self._memory.sampler = own
        while self._wanted:
            if asked := self._ask_in_memory(self._wanted.pop(0)):
                return asked
        # QMC begins its sequence again after a resume, and has to walk past what was tried.
        patience = 10 + (len(self._seen) if self._sampler == "qmc" else 0)
        at_random = make_sampler("random", self._seed, number)
        rounds = [(own, patience), (at_random, 100)]
        if self._allowed is not None:  # few of them may be legal, and the next in order is better than any at random
            rounds = [(own, PATIENCE_AMONG_FEW)]
        for sampler, proposals in rounds if self._sampler != "grid" else ():
            self._memory.sampler = sampler
            for _ in range(proposals):
                if asked := self._ask_in_memory():
                    return asked
        if self._enumeration is None:
            self._enumeration = self._space.points()
        return next((asked for point in self._enumeration if (asked := self._ask_in_memory(point))), None)

    def _ask_in_memory(self, point: Parameters | None = None) -> optuna.trial.Trial | None:
        """Ask for the given point or for one of the sampler's; None if it was tried before."""
        if point is not None:
            if point_key(point) in self._seen:
                return None
            self._memory.enqueue_trial(point)
        asked = self._memory.ask(self.distributions)
        key = point_key(self._exact(asked.params))
        if key not in self._seen and (self._allowed is None or key in self._allowed):
            return asked
        self._memory.tell(asked, state=TrialState.FAIL)
        return None

    # ── telling ──

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Whether a running trial that has this value at this step is to be ended, by what others had there."""
        if number not in self._in_memory:  # it has ended
            return False
        trial = optuna.trial.Trial(self._memory, self._memory_id(self._in_memory[number]))
        trial.report(value, step)
        return trial.should_prune()

    def tell(self, record: TrialRecord) -> None:
        """Store how a trial ended, and for the pruner of a later run what was heard of it meanwhile."""
        store, disk_id = self._disk._storage.set_trial_user_attr, self._disk_id(record.number)
        if not record.remeasurement and (steps := self._steps(record.number)):
            store(disk_id, "steps", steps)  # as one line: each as Optuna's intermediate value is one to be synced
        # The record first, then the state: a driver killed between the two finds the record.
        store(disk_id, "record", record.to_json())
        self._finish(record)

    def _finish(self, record: TrialRecord) -> None:
        state = STATES.get(record.status, TrialState.FAIL)
        value = record.metrics.get(self._objective) if record.status is TrialStatus.COMPLETE else None
        if (
            record.status is TrialStatus.COMPLETE and value is None
        ):  # nothing to rank it by, so nothing to learn from it
            state = TrialState.FAIL
        self._disk.tell(record.number, value, state=state)
        self.records[record.number] = record
        if record.remeasurement:
            return
        in_memory = self._in_memory.pop(record.number)
        if record.status is TrialStatus.INFEASIBLE:
            self._memory._storage.set_trial_system_attr(self._memory_id(in_memory), *INFEASIBLE)
        self._memory.tell(in_memory, value, state=state)

    def _steps(self, number: int) -> dict[int, float]:
        """What a running trial has told of the objective, by its steps."""
        return self._memory._storage.get_trial(self._memory_id(self._in_memory[number])).intermediate_values

    def _disk_id(self, number: int) -> int:
        return self._disk._storage.get_trial_id_from_study_id_trial_number(self._disk._study_id, number)

    def _memory_id(self, number: int) -> int:
        return self._memory._storage.get_trial_id_from_study_id_trial_number(self._memory._study_id, number)

    # ── resuming ──

    def _load(self) -> None:
        for trial in self._disk.get_trials(deepcopy=False):
            self._asked += 1
            self._searched += "remeasurement" not in trial.user_attrs
            self._seen.add(point_key(self._exact(trial.params)))
            record = TrialRecord.from_json(text) if (text := trial.user_attrs.get("record")) else None
            if "remeasurement" in trial.user_attrs and not (record and trial.state.is_finished()):
                if record:  # killed between the record and the state
                    self._finish(record)
                    continue
                if not trial.state.is_finished():  # measured anew beside the other finalists, and never alone
                    self._disk.tell(trial.number, state=TrialState.FAIL)
                self.abandoned.append(trial.number)
                continue
            if record and trial.state.is_finished():
                self.records[trial.number] = record
                if record.status in STATES and not record.remeasurement:
                    infeasible = record.status is TrialStatus.INFEASIBLE
                    self._memory.add_trial(_copy(trial, self.distributions, infeasible=infeasible))
                continue
            self._in_memory[trial.number] = len(self._memory.get_trials(deepcopy=False))
            self._memory.add_trial(_copy(trial, self.distributions))
            if record:  # killed between the record and the state
                self._finish(record)
            else:
                self.unfinished.append(Trial(trial.number, dict(trial.params)))
        self._want_cancelled_again()

    def _want_first(self, points: Sequence[Parameters]) -> None:
        """Points to begin with, unless they were tried; what a point does not name is left to the sampler."""
        tried = [trial.params for trial in self._disk.get_trials(deepcopy=False)]
        for point in points:
            as_stored = {name: self._as_stored(name, value) for name, value in point.items()}
            if not any(as_stored.items() <= params.items() for params in [*tried, *self._wanted]):
                self._wanted.append(as_stored)

    def _as_stored(self, name: str, value: Value) -> Value:
        """The value as Optuna gives it back: 3 on an interval is 3.0."""
        kind = self.distributions[name]
        return self._exact({name: kind.to_external_repr(kind.to_internal_repr(value))})[name]

    def _exact(self, params: Mapping[str, Any]) -> Parameters:
        """With the points of ranges as the space has them, not as sums of steps round them."""
        exact = dict(params)
        for name, dimension in self._space.dimensions.items():
            if isinstance(dimension, Range) and name in exact:
                exact[name] = dimension.nearest(exact[name])
        return exact

    def _want_cancelled_again(self) -> None:
        """What was cancelled is tried again, as a new trial, unless it was since."""
        cancelled = {
            point_key(r.params): dict(r.params) for r in self.records.values() if r.status is TrialStatus.CANCELLED
        }
        others = {point_key(r.params) for r in self.records.values() if r.status is not TrialStatus.CANCELLED}
        others |= {point_key(trial.params) for trial in self.unfinished}
        for key in cancelled.keys() - others:
            self._seen.discard(key)
        self._wanted = [point for key, point in cancelled.items() if key not in others]


def _copy(trial: FrozenTrial, distributions: dict[str, BaseDistribution], *, infeasible: bool = False) -> FrozenTrial:
    return create_trial(
        state=trial.state,
        params=trial.params,
        distributions=distributions,
        value=trial.value,
        intermediate_values={int(step): value for step, value in trial.user_attrs.get("steps", {}).items()},
        system_attrs=dict([INFEASIBLE]) if infeasible else {},
    )


def distribution(dimension: Dimension) -> BaseDistribution:
    """Optuna's word for a dimension."""
    if isinstance(dimension, Choice):
        return CategoricalDistribution(list(dimension.values))
    if isinstance(dimension, Range):
        if isinstance(dimension.low, int) and isinstance(dimension.step, int):
            return IntDistribution(dimension.low, int(dimension.high), log=dimension.log, step=dimension.step)
        return FloatDistribution(dimension.low, dimension.high, step=dimension.step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    """median: a trial ends whose best step so far is worse than the median of the others' up to the same step."""
    if name == "median":
        return optuna.pruners.MedianPruner(n_min_trials=STARTUP_TRIALS, n_warmup_steps=STARTUP_STEPS)
    return optuna.pruners.NopPruner()


def make_sampler(name: str, seed: int, number: int) -> BaseSampler:
    """The sampler for trial `number`, with a seed of its own: a resumed sweep draws as one that never stopped.

    QMC keeps the seed, which shuffles its sequence, and takes its place in it from the study. CMA-ES keeps its
    covariance with the trials of one run: after a resume it begins anew.
    """
    own = (seed * 1_000_003 + number) % 2**32
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=own)
        case "gp":
            return optuna.samplers.GPSampler(seed=own)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=own, warn_independent_sampling=False)
        case "qmc":
            return optuna.samplers.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=own)  # also beneath grid, whose points are enqueued


# ── the file ──


class _OneWriter:
    """No lock: the sweep's own is held by the one driver that writes, and goes with it even when it is killed."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def open_journal(path: Path, direction: str) -> optuna.Study:
    """The study on disk, new or as it was left. Cuts off a last line that a kill or a full disk left half written."""
    if path.exists():
        _drop_torn_line(path)
    storage = JournalStorage(JournalFileBackend(str(path), lock_obj=_OneWriter()))
    if storage.get_all_studies():
        return optuna.load_study(study_name="sweep", storage=storage)
    return optuna.create_study(study_name="sweep", storage=storage, direction=direction)


def _drop_torn_line(path: Path) -> None:
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        back = size
        while back > 0:
            start = max(0, back - 65536)
            file.seek(start)
            newline = file.read(back - start).rfind(b"\n")
            if newline >= 0:
                back = start + newline + 1
                break
            back = start
        if back < size:
            file.truncate(back)


def _check_identity(study: optuna.Study, identity: dict[str, Any]) -> str:
    """The study's own id, after making sure that it is about what is now said. Raises UserInputError if not."""
    attrs = study.user_attrs
    if "id" not in attrs:
        study.set_user_attr("identity", identity)
        study.set_user_attr("id", uuid.uuid4().hex)
        return str(study.user_attrs["id"])
    stored = attrs["identity"]
    if stored != identity:
        raise UserInputError(
            f"this sweep was made with other words; {'; '.join(_differences(stored, identity))}. Use another name="
        )
    return str(attrs["id"])


def _differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    words = []
    for key in {**then, **now}:
        old, new = then.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            words += [f"{key}.{word}" for word in _differences(old, new)]
        elif old != new:
            words.append(f"{key} was {old}, now {new}")
    return words
