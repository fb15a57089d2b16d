"""Optuna's distributions, samplers and pruners for a space and its settings."""

from __future__ import annotations

import warnings

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler

from sweeper.config.space import Choice, Dimension, Range

warnings.filterwarnings("ignore", category=ExperimentalWarning)  # QMC has been experimental since 2022

STARTUP_TRIALS = 5  # so many trials have to report a step before any is judged by it
STARTUP_STEPS = 5  # no trial is pruned up to this step
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


def make_pruner(name: str) -> optuna.pruners.BasePruner:
    """Return the pruner of this name.

    median ends a trial whose best value so far is worse than the median of the other trials' up to the same step.
    """
    if name == "median":
        return optuna.pruners.MedianPruner(n_min_trials=STARTUP_TRIALS, n_warmup_steps=STARTUP_STEPS)
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
