"""Optuna's distributions, samplers and pruners for a space and its settings."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler

from sweeper.config.space import Choice, Dimension, Range
from sweeper.search.halving import SuccessiveHalving

warnings.filterwarnings("ignore", category=ExperimentalWarning)  # QMC has been experimental since 2022

STARTUP_TRIALS = 5  # so many trials have to report a step before any is judged by it
POPULATION = 20  # of NSGA-II: five generations in a sweep of 100 trials; Optuna's default of 50 has two


def to_distribution(dimension: Dimension) -> BaseDistribution:
    """Return Optuna's distribution for a dimension of the space."""
    if isinstance(dimension, Choice):
        return CategoricalDistribution(list(dimension.values))
    if isinstance(dimension, Range):
        if isinstance(dimension.low, int) and isinstance(dimension.step, int):
            return IntDistribution(dimension.low, int(dimension.high), log=dimension.log, step=dimension.step)
        return FloatDistribution(dimension.low, dimension.high, step=dimension.step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log)


@dataclass(frozen=True)
class PrunerSettings:
    """A pruner by its name, with the first step at which it ends trials and, of asha, the reduction factor."""

    name: str = "none"
    min_steps: int = 5
    reduction_factor: int = 4


NO_PRUNER = PrunerSettings()


def make_pruner(settings: PrunerSettings) -> optuna.pruners.BasePruner:
    """Return the pruner.

    median ends a trial whose best value so far is worse than the median of the other trials' up to the same step; asha
    one that is not among the best at a rung.
    """
    if settings.name == "median":
        return optuna.pruners.MedianPruner(n_min_trials=STARTUP_TRIALS, n_warmup_steps=settings.min_steps)
    if settings.name == "asha":
        return SuccessiveHalving(settings.min_steps, settings.reduction_factor)
    return optuna.pruners.NopPruner()


def make_sampler(name: str, seed: int, number: int) -> BaseSampler:
    """Return the sampler for trial `number`, with its own seed: a resumed sweep samples like an uninterrupted one.

    QMC keeps the sweep's seed, which scrambles its sequence, and takes its position in it from the study. CMA-ES keeps
    its covariance only with the trials of one run, and starts again after a resume.
    """
    match name:
        case "tpe":
            return optuna.samplers.TPESampler(seed=trial_seed(seed, number))
        case "gp":
            return optuna.samplers.GPSampler(seed=trial_seed(seed, number))
        case "nsga2":
            return optuna.samplers.NSGAIISampler(population_size=POPULATION, seed=trial_seed(seed, number))
        case "cmaes":
            return optuna.samplers.CmaEsSampler(seed=trial_seed(seed, number), warn_independent_sampling=False)
        case "qmc":
            return optuna.samplers.QMCSampler(scramble=True, seed=seed, warn_independent_sampling=False)
    return optuna.samplers.RandomSampler(seed=trial_seed(seed, number))  # also for grid, whose points are enqueued


def trial_seed(seed: int, number: int) -> int:
    """Return the seed of trial `number` of a sweep."""
    return (seed * 1_000_003 + number) % 2**32
