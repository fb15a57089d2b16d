"""Simulate how often a comparison of several runs errs, and how many runs it takes.

    python -m benchmarks.track [--simulations 2000] [--seed 0]

Prints the tables of benchmarks/results/track.md. Each cell covers `--simulations` comparisons of a history with new
runs that are equally fast or 3% slower. A comparison begins with one new run and ends with a verdict. Until then, it
makes as many more runs as it requests, or checks again after every single run.
"""

import argparse
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sweeper.results.runs import Gate, Run, Verdict, compare_runs

LOSS = 0.03
ERROR = 0.0045  # standard deviation of the error within a run: 5 rounds of 1%
HISTORIES = (1, 5, 10, 20)
SPREADS = (0.005, 0.01, 0.02)
MOST_LOOKS = 500

Deviation = Callable[[np.random.Generator], float]  # of one run from the mean level, with a standard deviation of 1


def normal(random: np.random.Generator) -> float:
    return random.standard_normal()


def heavy_tailed(random: np.random.Generator) -> float:
    """Return a draw from Student's t-distribution with 3 degrees of freedom, scaled to a standard deviation of 1."""
    return random.standard_t(3) / math.sqrt(3)


def with_slow_runs(random: np.random.Generator) -> float:
    """Return normal noise in which one run in ten is slower by three standard deviations."""
    share, shift = 0.1, 3.0
    drawn = random.standard_normal() - shift * (random.random() < share) + shift * share
    return drawn / math.sqrt(1 + share * (1 - share) * shift**2)


@dataclass(frozen=True)
class Case:
    """The history and noise of simulated runs."""

    history: int  # the number of earlier runs at first
    between_runs: float  # the standard deviation between runs
    # whether a verdict is taken after every run instead of after the requested number of runs
    looks_at_each: bool = False
    assumed: float = 0.02  # the standard deviation that is assumed for a short history
    deviation: Deviation = normal


@dataclass(frozen=True)
class Outcome:
    """The outcome of many comparisons of a case."""

    slower: int  # how many comparisons found the new runs slower
    new_runs: np.ndarray  # for each comparison
    earlier_runs: np.ndarray  # added to the history, for each comparison

    def describe_slower(self) -> str:
        """Return the percentage of `slower` verdicts, with its binomial interval."""
        low, high = binomial_interval(self.slower, len(self.new_runs))
        return f"{100 * self.slower / len(self.new_runs):.1f} ({100 * low:.1f} to {100 * high:.1f})"

    def describe_runs(self) -> str:
        """Return the median and 90th percentile of the new runs, and the mean of the added earlier runs."""
        low, high = np.percentile(self.new_runs, [50, 90])
        earlier = self.earlier_runs.mean()
        return f"{low:.0f}, {high:.0f}" + (f" + {earlier:.0f}" if earlier >= 0.5 else "")


def simulate(case: Case, loss: float, simulations: int, seed: int) -> Outcome:
    """Return the verdicts on new runs that are slower by `loss`."""
    identity = [case.history, round(1e4 * case.between_runs), round(1e4 * loss), case.looks_at_each]
    random = np.random.default_rng([seed, *identity])
    compared = [compare_once(case, loss, random) for _ in range(simulations)]
    slower = sum(verdict is Verdict.SLOWER for verdict, _, _ in compared)
    return Outcome(slower, np.array([new for _, new, _ in compared]), np.array([added for *_, added in compared]))


def compare_once(case: Case, loss: float, random: np.random.Generator) -> tuple[Verdict, int, int]:
    """Compare until there is a verdict. Return the verdict and the numbers of new runs and of added earlier runs."""

    def measure(level: float, count: int) -> list[Run]:
        errors = ERROR * random.standard_normal(count)
        return [Run(level + case.between_runs * case.deviation(random) + error, ERROR**2) for error in errors]

    level, gate = math.log1p(-loss), Gate(between_runs=case.assumed)
    earlier, new = measure(0.0, case.history), measure(level, 1)
    for _ in range(MOST_LOOKS):
        compared = compare_runs(earlier, new, gate)
        if compared.verdict is not Verdict.INCONCLUSIVE:
            break
        most = 1 if case.looks_at_each else MOST_LOOKS
        new += measure(level, min(compared.more_new, most))
        earlier += measure(0.0, min(compared.more_earlier, most))
    return compared.verdict, len(new), len(earlier) - case.history


def binomial_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95% interval of a share (Clopper and Pearson 1934)."""
    from scipy.stats import beta

    low = beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    return float(low), float(high)


def print_table(cases: dict[str, Case], simulations: int, seed: int) -> None:
    """Print a row per case: equal runs found slower, slower runs found slower, and the number of runs needed."""
    print("| history, spread between runs | equal: slower | runs | 3% loss: slower | runs |\n|---|---:|---:|---:|---:|")
    for name, case in cases.items():
        equal, lossy = (simulate(case, loss, simulations, seed) for loss in (0.0, LOSS))
        cells = [equal.describe_slower(), equal.describe_runs(), lossy.describe_slower(), lossy.describe_runs()]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def build_cases(*, looks_at_each: bool) -> dict[str, Case]:
    """Return a case for each length of history and each spread."""
    pairs = [(history, spread) for history in HISTORIES for spread in SPREADS]
    return {f"{history}, {spread:.1%}": Case(history, spread, looks_at_each) for history, spread in pairs}


def build_violations() -> dict[str, Case]:
    """Return cases that violate the model's assumptions."""
    return {
        "5, 2%; 0.5% assumed": Case(5, 0.02, assumed=0.005),
        "5, 2%; 1% assumed": Case(5, 0.02, assumed=0.01),
        "20, 1%, Student's with 3 degrees of freedom": Case(20, 0.01, deviation=heavy_tailed),
        "20, 1%, one run in ten slower by three standard deviations": Case(20, 0.01, deviation=with_slow_runs),
    }


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{args.simulations} comparisons a cell, seed {args.seed}; Python {platform.python_version()}, ", end="")
    print(f"NumPy {np.__version__}. 2% are assumed between runs while fewer than 12 runs measure it.")
    sections = {
        "As many runs as are requested": build_cases(looks_at_each=False),
        "A look after every run": build_cases(looks_at_each=True),
        "Where the assumptions do not hold": build_violations(),
    }
    for title, cases in sections.items():
        print(f"\n## {title}\n")
        print_table(cases, args.simulations, args.seed)


if __name__ == "__main__":
    main()
