"""Measure the coverage of the 95% intervals of step times, and how often finals and `report compare` err.

    python -m benchmarks.coverage [--simulations 1000] [--seed 0]

Prints the tables of benchmarks/results/coverage.md. Each cell covers `--simulations` series of step times with a known
median and mean. It gives the percentage of intervals that cover the known value and, in parentheses, the percentage of
series that are marked "correlated, too short" and have no interval.
"""

import argparse
import platform
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from benchmarks.noise import KINDS, Noise, autoregressive, lognormal, true_value
from sweeper.metrics.intervals import TOO_FEW, Interval, estimate_correlation, interval_of_steps
from sweeper.results.comparison import judge
from sweeper.results.runs import EXIT_CODES, Gate, Verdict
from sweeper.search.finals import compare_rounds

STEPS = (3, 5, 8, 10, 20, 50, 100, 200, 500)
FINALISTS = (2, 3, 5)
ROUNDS = 5
SPREAD_OF_ROUNDS = {"1% each": (1, 1, 1, 1, 1), "one of 3%, others of 1%": (3, 1, 1, 1, 1)}  # percent, by finalist


@dataclass(frozen=True)
class Coverage:
    """The coverage of intervals over many series, in percent."""

    covered: float  # intervals that cover the true value, among all intervals; NaN without any
    marked: float  # series without an interval, because they are correlated and too short

    def __str__(self) -> str:
        covered = "—" if np.isnan(self.covered) else f"{self.covered:.0f}"
        return f"{covered} ({self.marked:.0f})" if round(self.marked) else covered


def measure_coverage(kind: str, steps: int, statistic: str, simulations: int, seed: int) -> Coverage:
    """Return how often the interval of a series of this kind and length covers the true median or mean."""
    random = np.random.default_rng([seed, steps, list(KINDS).index(kind)])
    true, intervals, marked = true_value(kind, statistic), 0, 0
    covered = 0
    for times in KINDS[kind](simulations, steps, random):
        correlation = estimate_correlation(times, statistic)
        interval = interval_of_steps(times, statistic, correlation)
        marked += correlation.is_too_short
        if interval is not None:
            intervals += 1
            covered += interval.low <= true <= interval.high
    return Coverage(100 * covered / intervals if intervals else np.nan, 100 * marked / simulations)


def print_steps(statistic: str, simulations: int, seed: int) -> None:
    """Print the table of one statistic: a row for each kind of noise, a column for each number of steps."""
    print(f"\n## The {statistic} of n steps\n")
    print(f"| noise | {' | '.join(f'n = {steps}' if steps == STEPS[0] else str(steps) for steps in STEPS)} |")
    print(f"|---|{'---:|' * len(STEPS)}")
    for kind in KINDS:
        cells = [str(measure_coverage(kind, steps, statistic, simulations, seed)) for steps in STEPS]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


@dataclass(frozen=True)
class FinalsErrors:
    """The errors of many finals of equally fast finalists, in percent."""

    told_apart: float  # finals in which any finalist counts as slower than the first
    missed: float  # values whose 95% interval does not cover the true value


def measure_finals(finalists: int, spreads: tuple[int, ...], simulations: int, seed: int) -> FinalsErrors:
    """Return how often finals of equally fast finalists err when rounds share a drift of 2%."""
    random = np.random.default_rng([seed, finalists, *spreads])
    told_apart = missed = 0
    for _ in range(simulations):
        drift = 0.02 * random.standard_normal(ROUNDS)
        alone = {n: 0.01 * spreads[n] * random.standard_normal(ROUNDS) for n in range(finalists)}
        compared = compare_rounds({n: np.exp(drift + noise) for n, noise in alone.items()}, 1)
        told_apart += any(behind.low > 0 for _, behind in compared.values())
        missed += sum(not value.low <= 1 <= value.high for value, _ in compared.values())
    return FinalsErrors(100 * told_apart / simulations, 100 * missed / simulations / finalists)


def print_finals(simulations: int, seed: int) -> None:
    """Print how often finals report a difference between equally fast finalists."""
    print(f"\n## Finals of {ROUNDS} rounds\n")
    print("Equally fast finalists that are told apart, percent of finals; values outside of their interval, percent.\n")
    print("| noise of a round | finalists | told apart | values missed |\n|---|---:|---:|---:|")
    for noise, spreads in SPREAD_OF_ROUNDS.items():
        for finalists in FINALISTS:
            errors = measure_finals(finalists, spreads, simulations, seed)
            print(f"| {noise} | {finalists} | {errors.told_apart:.1f} | {errors.missed:.1f} |", flush=True)


@dataclass(frozen=True)
class BaselineCase:
    """The noise with which two sweeps are measured."""

    noise: Noise  # of the steps, or of the rounds of finals
    steps: int
    between_runs: float = 0.0  # the standard deviation between sweeps, shared by all steps and rounds of a sweep
    are_rounds: bool = False


BASELINE_CASES = {
    "10 steps of 1%": BaselineCase(lognormal, 10),
    "10 steps of 1%, 1% between runs": BaselineCase(lognormal, 10, 0.01),
    "10 steps of 1%, 2% between runs": BaselineCase(lognormal, 10, 0.02),
    "10 steps of AR(1) 0.9 at 3%": BaselineCase(autoregressive(0.9, 0.03), 10),
    "2 steps of 1%, 1% between runs": BaselineCase(lognormal, 2, 0.01),
    "finals of 5 rounds of 1%, 1% between runs": BaselineCase(lognormal, 5, 0.01, are_rounds=True),
    "finals of 5 rounds of 1%, 2% between runs": BaselineCase(lognormal, 5, 0.02, are_rounds=True),
}


def measure_verdicts(case: str, loss: float, simulations: int, seed: int) -> Counter[Verdict]:
    """Return how often the default gate gives each verdict on a sweep that is slower by `loss`, in percent."""
    random = np.random.default_rng([seed, list(BASELINE_CASES).index(case)])
    counts = Counter[Verdict]()
    for _ in range(simulations):
        before, after = (_measure_sweep(BASELINE_CASES[case], speed, random) for speed in (1.0, 1.0 - loss))
        counts[judge([before], [after], Gate()).verdict] += 1
    return Counter({verdict: 100 * count / simulations for verdict, count in counts.items()})


def _measure_sweep(case: BaselineCase, speed: float, random: np.random.Generator) -> Interval:
    run = np.exp(case.between_runs * random.standard_normal())
    times = case.noise(1, case.steps, random)[0] / (speed * run)
    if case.are_rounds:
        return compare_rounds({0: 1 / times}, 1)[0][0]
    interval = interval_of_steps(times, "median")
    if interval is None:
        return Interval(float(1 / np.median(times)))
    return Interval(1 / interval.value, 1 / interval.high, 1 / interval.low)


def print_baselines(simulations: int, seed: int) -> None:
    """Print the exit codes of `report compare` for equally fast and for slower sweeps."""
    losses = (0.0, 0.03, 0.05, 0.10)
    codes = {code: [verdict for verdict in EXIT_CODES if EXIT_CODES[verdict] == code] for code in EXIT_CODES.values()}
    legend = ", ".join(f"{code} {' or '.join(verdicts)}" for code, verdicts in codes.items())
    print(f"\n## `report compare`\n\nPercent of comparisons with exit codes 0 / 1 / 3 ({legend}), default threshold 2%")
    print("and 2% assumed between runs, by how much slower the second sweep really is.\n")
    print(f"| both sweeps | {' | '.join(f'{loss:.0%}' if loss else 'equal' for loss in losses)} |")
    print(f"|---|{'---:|' * len(losses)}")
    for case in BASELINE_CASES:
        by_loss = [measure_verdicts(case, loss, simulations, seed) for loss in losses]
        cells = [
            " / ".join(f"{sum(percent[verdict] for verdict in code):.1f}" for code in codes.values())
            for percent in by_loss
        ]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


def measure_cost() -> float:
    """Return the milliseconds to compute the interval of 10,000 correlated steps, the fastest of five runs."""
    times = KINDS["AR(1) 0.9"](1, 10_000, np.random.default_rng(0))[0]
    durations = []
    for _ in range(5):
        started = time.perf_counter()
        interval_of_steps(times, "median")
        durations.append(time.perf_counter() - started)
    return 1e3 * min(durations)


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{args.simulations} simulations a cell, seed {args.seed}; Python {platform.python_version()}, ", end="")
    print(f"NumPy {np.__version__}. {TOO_FEW.capitalize()} have no interval.")
    print(f"The interval of 10,000 steps takes {measure_cost():.1f} ms.")
    for statistic in ("median", "mean"):
        print_steps(statistic, args.simulations, args.seed)
    print_finals(4 * args.simulations, args.seed)
    print_baselines(args.simulations, args.seed)


if __name__ == "__main__":
    main()
