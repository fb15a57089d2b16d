"""The trials that the sampler and the pruner see: an Optuna study in memory.

Because the sampler works on a copy, a proposal that was tried before can be dropped without a trace. Of a large sweep
the copy holds a part: a sampler examines every trial for each proposal, so its cost would grow with the sweep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from sweeper.config.space import Parameters
from sweeper.search.folding import StoredTrial
from sweeper.search.parzen import ObservedTrials, ParzenSampler
from sweeper.search.samplers import make_pruner, make_sampler, trial_seed

FEASIBLE = "feasible"  # a constraint; a trial is feasible to Optuna when all of its constraints are zero or less
LEARNED_STATES = (TrialState.COMPLETE, TrialState.PRUNED)
# The finished trials that a sampler is given; others get all of them. CMA-ES and QMC continue a sequence.
MAX_FINISHED = {"tpe": 1000, "gp": 1000, "random": 0, "grid": 0}
MAX_JUDGED = 1000  # finished trials that a pruner compares with
MAX_RUNNING = 500  # running trials that a sampler is given: it keeps away from them
SPARE = 1500  # so many trials more than that make the copy too large
MANY_RUNNING = 64  # with more trials running, Optuna's TPE may take longer to propose trials than they take to end


AnyTrial: TypeAlias = FrozenTrial | StoredTrial
T = TypeVar("T", FrozenTrial, StoredTrial)


@dataclass(frozen=True)
class Ending:
    """How a trial ended, for the sampler.

    Attributes:
        value: the objective of a complete trial.
        infeasible: it cannot work, which the sampler learns.
    """

    state: TrialState
    value: float | None = None
    infeasible: bool = False


class SamplingStudy:
    """Running trials, by their numbers in the journal, and finished ones that the sampler and the pruner learn from."""

    def __init__(
        self, sampler: str, pruner: str, direction: str, distributions: Mapping[str, BaseDistribution]
    ) -> None:
        self._sampler = sampler
        self._pruner = pruner
        self._direction = direction
        self._distributions = dict(distributions)
        self._max_finished = MAX_FINISHED.get(sampler)
        if self._max_finished is not None and pruner != "none":
            self._max_finished = max(self._max_finished, MAX_JUDGED)
        self._running: dict[int, Trial] = {}
        self._unseen: dict[int, Parameters] = {}  # running trials that the sampler is not given
        self._steps: dict[int, dict[int, float]] = {}  # the objective at each step of a running trial
        self._worst: float | None = None
        self._study, self._observed = self._create_study()
        self._size = 0

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials that the sampler is given, and the proposals that were dropped. They must not be changed."""
        return self._study.get_trials(deepcopy=False)

    def load(self, finished: Sequence[tuple[int, AnyTrial, Ending]], running: Mapping[int, StoredTrial]) -> None:
        """Add the trials of earlier runs, in the order of their numbers, with the steps in their attribute `steps`."""
        kept = {number: (trial, ending) for number, trial, ending in self._select(finished)}
        for number in sorted({*kept, *running}):
            if number in running:
                self._steps[number] = _steps_of(running[number])
                self._restart(number, dict(running[number].params))
            else:
                trial, ending = kept[number]
                self._learn(dict(trial.params), ending, _steps_of(trial))

    # ── proposals ──

    def make_sampler(self, seed: int, number: int) -> BaseSampler:
        """Return the sampler for trial `number`, which depends on what runs and what has ended, and on nothing else."""
        if self._sampler == "tpe" and len(self._running) + len(self._unseen) > MANY_RUNNING:
            return ParzenSampler(self._observed, trial_seed(seed, number))
        return make_sampler(self._sampler, seed, number)

    def ask(self, sampler: BaseSampler, point: Parameters | None = None) -> Trial:
        """Return a proposal of the sampler, or one of this point with the sampler's values for what it lacks."""
        self._study.sampler = sampler
        if point is not None:
            self._study.enqueue_trial(point)
        self._size += 1
        return self._study.ask(self._distributions)

    def drop(self, proposal: Trial) -> None:
        """Forget a proposal that is not tried."""
        self._study.tell(proposal, state=TrialState.FAIL)

    def accept(self, number: int, proposal: Trial) -> None:
        """Take a proposal for a trial of the journal that runs now."""
        self._running[number] = proposal
        self._limit()

    # ── running trials ──

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Report a step of a trial, and return whether the pruner ends it. A trial that has ended stays as it is."""
        if number not in self._running and number not in self._unseen:
            return False
        self._steps.setdefault(number, {})[step] = value
        if number in self._unseen:
            return False
        self._running[number].report(value, step)
        return self._running[number].should_prune()

    def steps(self, number: int) -> dict[int, float]:
        """Return the objective at each step that a running trial has reported."""
        return dict(self._steps.get(number, {}))

    def finish(self, number: int, ending: Ending) -> None:
        """End a trial."""
        steps = self._steps.pop(number, {})
        if number in self._unseen:
            params = self._unseen.pop(number)
            if ending.state in LEARNED_STATES:
                self._learn(params, ending, steps)
            self._limit()
            return
        trial = self._running.pop(number)
        ending = self._for_sampler(ending)
        for name, value in self._constraints(ending).items():
            trial.set_constraint(name, value)
        self._study.tell(trial, ending.value, state=ending.state)

    # ── what the sampler is given ──

    def _for_sampler(self, ending: Ending) -> Ending:
        """Return the ending as the sampler understands it.

        The Gaussian process reads complete trials only, so an infeasible one is complete there, with the worst value.
        """
        if ending.state is TrialState.COMPLETE and ending.value is not None:
            pick = min if self._direction == "maximize" else max
            self._worst = ending.value if self._worst is None else pick(self._worst, ending.value)
        if self._sampler == "gp" and ending.infeasible and self._worst is not None:
            return Ending(TrialState.COMPLETE, self._worst, infeasible=True)
        return ending

    def _constraints(self, ending: Ending) -> dict[str, float]:
        if ending.infeasible:
            return {FEASIBLE: 1.0}
        # The Gaussian process requires the same constraints of all trials.
        return {FEASIBLE: 0.0} if self._sampler == "gp" and ending.state is TrialState.COMPLETE else {}

    def _learn(self, params: Parameters, ending: Ending, steps: Mapping[int, float]) -> None:
        """Add a finished trial."""
        ending = self._for_sampler(ending)
        self._study.add_trial(
            create_trial(
                state=ending.state,
                params=params,
                distributions=self._distributions,
                value=ending.value,
                intermediate_values=dict(steps),
                constraints=self._constraints(ending) or None,
            )
        )
        self._size += 1

    def _restart(self, number: int, params: Parameters) -> None:
        """Add a running trial."""
        self._study.enqueue_trial(params)
        trial = self._running[number] = self._study.ask(self._distributions)
        for step, value in self._steps.get(number, {}).items():
            trial.report(value, step)
        self._size += 1

    def _limit(self) -> None:
        """Build the copy again with fewer trials, when it has become too large."""
        if self._max_finished is None or self._size < self._max_finished + MAX_RUNNING + SPARE:
            return
        finished = [
            (trial.number, trial, Ending(trial.state)) for trial in self.trials if trial.state in LEARNED_STATES
        ]
        kept = [trial for _, trial, _ in self._select(finished)]
        running = {number: dict(trial.params) for number, trial in self._running.items()}
        unseen = [] if self._pruner != "none" else list(running)[:-MAX_RUNNING]  # the pruner judges every trial
        self._unseen |= {number: running.pop(number) for number in unseen}
        (self._study, self._observed), self._running = self._create_study(), {}
        self._study.add_trials(kept)
        self._size = len(kept)
        for number, params in running.items():
            self._restart(number, params)

    def _select(self, finished: Sequence[tuple[int, T, Ending]]) -> Sequence[tuple[int, T, Ending]]:
        """Return the finished trials that are kept: the best half and a random sample of the others, in their order."""
        limit = self._max_finished
        if limit is None or len(finished) <= limit:
            return finished
        sign = -1 if self._direction == "maximize" else 1
        with_value = [entry for entry in finished if entry[1].value is not None]
        best = {entry[0] for entry in sorted(with_value, key=lambda entry: sign * _value_of(entry[1]))[: limit // 2]}
        others = [entry[0] for entry in finished if entry[0] not in best]
        kept = best.union(random.Random(len(finished)).sample(others, min(len(others), limit - len(best))))
        return [entry for entry in finished if entry[0] in kept]

    def _create_study(self) -> tuple[optuna.Study, ObservedTrials]:
        study = optuna.create_study(direction=self._direction, pruner=make_pruner(self._pruner))
        return study, ObservedTrials(self._distributions, self._direction)


def _value_of(trial: AnyTrial) -> float:
    return trial.value if trial.value is not None else 0.0


def _steps_of(trial: AnyTrial) -> dict[int, float]:
    """Return the steps that a trial of the journal has reported."""
    steps: Mapping[str, Any] = trial.user_attrs.get("steps", {})
    return {int(step): float(value) for step, value in steps.items()}
