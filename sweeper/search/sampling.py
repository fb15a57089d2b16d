"""Create samplers and pruners, and the in-memory copy of the study from which they learn.

Because the sampler works on a copy, a proposal that was already tried can be dropped without a trace. The copy holds
only part of a large sweep. A sampler examines every trial for each proposal, so the cost would grow with the sweep.
"""

import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from sweeper.config.schema import Search
from sweeper.config.space import Choice, Dimension, Parameters, Range
from sweeper.metrics.criteria import Criteria, find_layers
from sweeper.search.journal import StoredTrial

warnings.filterwarnings("ignore", category=ExperimentalWarning)  # Optuna has called QMC experimental since 2022

SAMPLER_STATE = "sampler"  # the attribute of a trial in the journal that stores the generation for NSGA-II
GENERATION = ":generation"  # the suffix of the attribute in which Optuna's genetic algorithms store the generation
FEASIBLE = "feasible"  # a constraint; to Optuna, a trial is feasible if all constraints are zero or less
LEARNED_STATES = (TrialState.COMPLETE, TrialState.PRUNED)
# The number of finished trials that a sampler sees. Other samplers see all: CMA-ES and QMC continue a sequence.
MAX_FINISHED = {"tpe": 1000, "gp": 1000, "random": 0, "grid": 0}
MAX_JUDGED = 1000  # the number of finished trials with which a pruner compares a trial
MAX_RUNNING = 500  # the number of running trials that a sampler sees and can avoid
SPARE = 1500  # the number of extra trials after which the copy is reduced
STARTUP_TRIALS = 5  # the number of trials that must report a step before any trial is judged at that step
POPULATION = 20  # for NSGA-II: five generations in 100 trials, instead of two with Optuna's default of 50
MANY_RUNNING = 64  # if more trials are running, proposals avoid the running trials

AnyTrial: TypeAlias = FrozenTrial | StoredTrial
T = TypeVar("T", FrozenTrial, StoredTrial)


@dataclass(frozen=True)
class Ending:
    """How a trial ended, from the sampler's point of view."""

    state: TrialState
    values: tuple[float, ...] | None = None  # the objectives of a complete trial
    infeasible: bool = False  # whether to teach the sampler that the trial cannot work
    # The fraction by which a complete trial exceeds each limit, by metric (zero or less if it keeps the limit).
    excess: Mapping[str, float] = field(default_factory=dict)


class SamplingStudy:
    """The running trials, by number in the journal, and the finished trials from which samplers and pruners learn."""

    def __init__(self, search: Search, criteria: Criteria, distributions: Mapping[str, BaseDistribution]) -> None:
        self._search, self._sampler = search, search.sampler
        self._criteria = criteria
        self._distributions = dict(distributions)
        self._max_finished = MAX_FINISHED.get(search.sampler)
        if self._max_finished is not None and search.pruner != "none":
            self._max_finished = max(self._max_finished, MAX_JUDGED)
        self._running: dict[int, Trial] = {}
        self._unseen: dict[int, Parameters] = {}  # running trials that the sampler does not see
        self._steps: dict[int, dict[int, float]] = {}  # running trials' objective at each step
        self._generations: dict[int, Mapping[str, Any]] = {}  # for trials that an earlier run started
        self._worst: tuple[float, ...] | None = None
        self._create_study()
        self._size = 0

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials that the sampler sees, and dropped proposals. Callers must not change them."""
        return self._study.get_trials(deepcopy=False)

    def load(self, finished: Sequence[tuple[int, AnyTrial, Ending]], running: Mapping[int, StoredTrial]) -> None:
        """Add trials from earlier runs, ordered by number, with steps from the attribute `steps`."""
        kept = {number: (trial, ending) for number, trial, ending in self._select(finished)}
        for number in sorted({*kept, *running}):
            if number in running:
                self._steps[number] = _steps_of(running[number])
                self._restart(number, dict(running[number].params))
                if generation := running[number].user_attrs.get(SAMPLER_STATE):
                    self._generations[number] = generation
            else:
                trial, ending = kept[number]
                self._learn(dict(trial.params), ending, _steps_of(trial), trial.user_attrs.get(SAMPLER_STATE))

    def make_sampler(self, seed: int, number: int) -> BaseSampler:
        """Return the sampler for trial `number`. Proposals depend only on the running and finished trials."""
        are_many = len(self._running) + len(self._unseen) > MANY_RUNNING
        return make_sampler(self._sampler, seed, number, avoids_running=are_many and not self._criteria.has_front)

    def ask(self, sampler: BaseSampler, point: Parameters | None = None) -> Trial:
        """Return a proposal from the sampler, or a proposal for `point` with missing values chosen by the sampler."""
        self._study.sampler = sampler
        if point is not None:
            self._study.enqueue_trial(point)
        self._size += 1
        return self._study.ask(self._distributions)

    def drop(self, proposal: Trial) -> None:
        self._study.tell(proposal, state=TrialState.FAIL)

    def accept(self, number: int, proposal: Trial) -> dict[str, Any]:
        """Accept a proposal as a trial of the journal that is now running. Returns the state to store in the journal
        for a later run's sampler. Only NSGA-II has state: the generation."""
        attrs = self.trials[proposal.number].system_attrs if self._sampler == "nsga2" else {}
        self._running[number] = proposal
        self._limit()
        return {name: value for name, value in attrs.items() if name.endswith(GENERATION)}

    def should_prune(self, number: int, step: int, value: float) -> bool:
        """Report a trial's step, and return whether the pruner ends the trial. Trials that have ended are ignored."""
        if self._criteria.has_front or (number not in self._running and number not in self._unseen):
            return False
        self._steps.setdefault(number, {})[step] = value
        if number in self._unseen:
            return False
        self._running[number].report(value, step)
        return self._running[number].should_prune()

    def steps(self, number: int) -> dict[int, float]:
        return dict(self._steps.get(number, {}))

    def finish(self, number: int, ending: Ending) -> None:
        steps, generation = self._steps.pop(number, {}), self._generations.pop(number, None)
        if number in self._unseen:
            self._learn(self._unseen.pop(number), ending, steps)
            self._limit()
            return
        trial = self._running.pop(number)
        if generation:  # Optuna accepts a generation only for an added trial
            self.drop(trial)
            self._learn(dict(trial.params), ending, steps, generation)
            return
        ending = self._for_sampler(ending)
        for name, value in self._constraints(ending).items():
            trial.set_constraint(name, value)
        self._study.tell(trial, ending.values, state=ending.state)

    def _for_sampler(self, ending: Ending) -> Ending:
        """Convert the ending to the form that the sampler needs. The Gaussian process reads only complete trials, so an
        infeasible trial is passed to it as a complete trial with the worst values."""
        if ending.state is TrialState.COMPLETE and ending.values is not None:
            worst = zip(self._criteria.objectives, self._worst or ending.values, ending.values, strict=True)
            self._worst = tuple(max(values, key=objective.loss) for objective, *values in worst)
        if self._sampler == "gp" and ending.infeasible and self._worst is not None:
            return Ending(TrialState.COMPLETE, self._worst, infeasible=True)
        return ending

    def _constraints(self, ending: Ending) -> dict[str, float]:
        constraints = {FEASIBLE: 1.0} if ending.infeasible else dict(ending.excess)
        if self._sampler == "gp" and ending.state is TrialState.COMPLETE:
            # The Gaussian process requires all trials to have the same constraints in the same order.
            limits = [limit.metric for limit in self._criteria.limits]
            return {name: constraints.get(name, 0.0) for name in (FEASIBLE, *limits)}
        return constraints

    def _learn(
        self,
        params: Parameters,
        ending: Ending,
        steps: Mapping[int, float],
        sampler_state: Mapping[str, Any] | None = None,
    ) -> None:
        if ending.state not in LEARNED_STATES:
            return
        ending = self._for_sampler(ending)
        trial = create_trial(
            state=ending.state,
            params=params,
            distributions=self._distributions,
            values=ending.values,
            intermediate_values=dict(steps),
            constraints=self._constraints(ending) or None,
            system_attrs={**(sampler_state or {}), **_rungs_of(steps, self._search)},
        )
        self._study.add_trial(trial)
        self._size += 1

    def _restart(self, number: int, params: Parameters) -> None:
        self._study.enqueue_trial(params)
        trial = self._running[number] = self._study.ask(self._distributions)
        for step, value in self._steps.get(number, {}).items():
            trial.report(value, step)
            trial.should_prune()  # stores the value if the trial has reached a rung
        self._size += 1

    def _limit(self) -> None:
        if self._max_finished is None or self._size < self._max_finished + MAX_RUNNING + SPARE:
            return
        finished = []
        for trial in self.trials:
            if trial.state in LEARNED_STATES:
                values = tuple(trial.values) if trial.state is TrialState.COMPLETE else None
                finished.append((trial.number, trial, Ending(trial.state, values, excess=trial.constraints)))
        kept = [trial for _, trial, _ in self._select(finished)]
        running = {number: dict(trial.params) for number, trial in self._running.items()}
        unseen = [] if self._search.pruner != "none" else list(running)[:-MAX_RUNNING]  # a pruner judges every trial
        self._unseen |= {number: running.pop(number) for number in unseen}
        self._create_study()
        self._running = {}
        self._study.add_trials(kept)
        self._size = len(kept)
        for number, params in running.items():
            self._restart(number, params)

    def _select(self, finished: Sequence[tuple[int, T, Ending]]) -> Sequence[tuple[int, T, Ending]]:
        limit = self._max_finished
        if limit is None or len(finished) <= limit:
            return finished
        losses = {
            number: self._criteria.losses(ending.values)
            for number, _, ending in finished
            if ending.values is not None and all(value <= 0 for value in ending.excess.values())
        }
        layers = find_layers(list(losses.values())) if self._criteria.has_front else [0] * len(losses)
        layer_of = dict(zip(losses, layers, strict=True))
        best = set(sorted(losses, key=lambda number: (layer_of[number], losses[number]))[: limit // 2])
        others = [entry[0] for entry in finished if entry[0] not in best]
        kept = best.union(random.Random(len(finished)).sample(others, min(len(others), limit - len(best))))
        return [entry for entry in finished if entry[0] in kept]

    def _create_study(self) -> None:
        self._study = optuna.create_study(directions=self._criteria.directions, pruner=make_pruner(self._search))


def _steps_of(trial: AnyTrial) -> dict[int, float]:
    steps: Mapping[str, Any] = trial.user_attrs.get("steps", {})
    return {int(step): float(value) for step, value in steps.items()}


def _rungs_of(steps: Mapping[int, float], search: Search) -> dict[str, float]:
    """Return the values of a trial at each rung, as Optuna's `SuccessiveHalvingPruner` stores them in the trial.

    Rungs are at `min_steps` times the powers of `reduction_factor`. Optuna does not store the values of trials that are
    added to a study (optuna/pruners/_successive_halving.py, 5.0).
    """
    rungs: dict[str, float] = {}
    rung = search.min_steps
    while reached := [step for step, value in steps.items() if step >= rung and not math.isnan(value)]:
        rungs[f"completed_rung_{len(rungs)}"] = steps[min(reached)]
        rung *= search.reduction_factor
    return rungs


def to_distribution(dimension: Dimension) -> BaseDistribution:
    if isinstance(dimension, Choice):
        return CategoricalDistribution(list(dimension.values))
    if isinstance(dimension, Range):
        if isinstance(dimension.low, int) and isinstance(dimension.step, int):
            return IntDistribution(dimension.low, int(dimension.high), log=dimension.log, step=dimension.step)
        return FloatDistribution(dimension.low, dimension.high, step=dimension.step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def make_pruner(search: Search) -> optuna.pruners.BasePruner:
    """Return the pruner. `median` ends a trial if its best value is worse than the other trials' median at a step."""
    if search.pruner == "median":
        return optuna.pruners.MedianPruner(n_min_trials=STARTUP_TRIALS, n_warmup_steps=search.min_steps)
    if search.pruner == "asha":
        return optuna.pruners.SuccessiveHalvingPruner(search.min_steps, search.reduction_factor)
    return optuna.pruners.NopPruner()


def make_sampler(name: str, seed: int, number: int, *, avoids_running: bool = False) -> BaseSampler:
    """Return the sampler for trial `number`. Each number has its own seed, so a resume does not change the samples.

    With `avoids_running`, TPE treats running trials as bad ones in order to stay away from them. QMC scrambles its
    sequence with the sweep's seed and takes its position in the sequence from the study. CMA-ES keeps its covariance
    only within a run and starts over after a resume.
    """
    own_seed = (seed * 1_000_003 + number) % 2**32
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=own_seed, constant_liar=avoids_running)
        case "gp":
            return optuna.samplers.GPSampler(seed=own_seed)
        case "nsga2":
            return optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=own_seed)
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=own_seed, warn_independent_sampling=False)
        case "qmc":
            return optuna.samplers.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=own_seed)  # also used for grid, which enqueues every point
