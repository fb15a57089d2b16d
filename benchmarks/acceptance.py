"""Simulate how often `sweeper accept` fails a healthy cluster, and which losses it finds.

    python -m benchmarks.acceptance [--runs 2000]

Rates are drawn with the spreads in `sweeper/commands/accept/spreads.csv`, as the product of a common value and values
per node, per GPU and per measurement. Writes benchmarks/results/acceptance.md.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np

from sweeper.commands.accept import experiments
from sweeper.commands.accept.experiments import EQUAL_CLOCK, Experiment, Reading, Scope, read_experiments, spread_of
from sweeper.commands.accept.judge import Verdict, judge
from sweeper.commands.accept.measure import pair_rounds
from sweeper.metrics.outliers import Limit, Spread, allowed_loss, fleet_deviation, medians_of_others

PAGE = Path(__file__).parent / "results/acceptance.md"
SPREADS, RATES = Path(experiments.__file__).with_name("spreads.csv"), Path(__file__).with_name("acceptance_rates.csv")
PER_NODE = 8
CLUSTERS = 5
COUNTS = (8, 16, 64, 512, 4096)
HEAVY_TAIL = 6  # degrees of freedom of Student's distribution
SHOWN = (
    "bf16 products sustained",
    "bf16 products sustained, at equal clock",
    "memory copy",
    "copy to host",
    "pair all-reduce 1 GiB",
    "link all-reduce 1 GiB",
)
Fleet = tuple[np.ndarray, list[str]]  # logarithms of rates, and the node of each rate
Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(random: np.random.Generator, count: int) -> np.ndarray:
    return random.standard_normal(count)


def heavy(random: np.random.Generator, count: int) -> np.ndarray:
    return random.standard_t(HEAVY_TAIL, count) / np.sqrt(HEAVY_TAIL / (HEAVY_TAIL - 2))


@cache
def parts_of(scope: Scope, nodes: int) -> list[tuple[str, tuple[str, ...]]]:
    """Return the parts of a scope, each with the nodes that it includes."""
    names = [f"n{number}" for number in range(nodes)]
    if scope == "device":
        return [(f"{name} GPU {gpu}", (name,)) for name in names for gpu in range(PER_NODE)]
    if scope == "pair":
        return [(f"{name} GPU {gpu} + {gpu + 1}", (name,)) for name in names for gpu in range(0, PER_NODE, 2)]
    if scope == "node":
        return [(name, (name,)) for name in names]
    if scope == "link":
        pairs = [pair for pairs in pair_rounds(nodes) for pair in pairs]
        return [(f"{names[a]} + {names[b]}", (names[a], names[b])) for a, b in pairs]
    return [("the whole", tuple(names))] if nodes > 1 else []


def tests_of(experiment: Experiment) -> list[str]:
    """Return the tests of an experiment, including tests derived from the results of others."""
    products = [test for test in experiment.tests if test.endswith("products sustained")]
    return [*experiment.tests, *(f"{test}{EQUAL_CLOCK}" for test in products)]


def draw_readings(random: np.random.Generator, nodes: int) -> Iterator[Reading]:
    """Yield the readings of a healthy cluster, with rates around 1."""
    for experiment in read_experiments("gpu", "quick"):
        parts = parts_of(experiment.scope, nodes)
        for test in tests_of(experiment) if parts else ():
            logs, _ = draw_logs(random, experiment, test, nodes, normal)
            for (part, names), log in zip(parts, logs, strict=True):
                yield Reading(test, experiment.scope, part, names, "", float(np.exp(log)))


def draw_logs(random: np.random.Generator, experiment: Experiment, test: str, nodes: int, draw: Draw) -> Fleet:
    """Return the logarithms of a healthy cluster's rates, and the node of each rate (the first node of a pair)."""
    parts, spread = parts_of(experiment.scope, nodes), spread_of("gpu", test)
    of_node = spread.node * random.standard_normal(nodes)
    number = {f"n{n}": n for n in range(nodes)}
    members = np.array([[number[name] for name in names] for _, names in parts])
    own = spread.device * draw(random, len(parts)) + spread.run * random.standard_normal(len(parts))
    return own + of_node[members].mean(axis=1), ["/".join(names) for _, names in parts]


def count_false_alarms(nodes: int, runs: int, draw: Draw) -> int:
    """Return the number of healthy clusters with a failing part."""
    random, failed = np.random.default_rng(nodes), 0
    tests = [
        (e, test) for e in read_experiments("gpu", "quick") for test in tests_of(e) if len(parts_of(e.scope, nodes)) > 1
    ]
    counts = [len(parts_of(e.scope, nodes)) + nodes * (e.scope == "device" and nodes > 1) for e, _ in tests]
    for _ in range(runs):
        alarms = False
        for experiment, test in tests:
            logs, of_nodes = draw_logs(random, experiment, test, nodes, draw)
            alarms |= has_slow(logs, of_nodes, spread_of("gpu", test), sum(counts))
            if experiment.scope == "device" and nodes > 1:
                medians = np.median(logs.reshape(nodes, PER_NODE), axis=1)
                spread = spread_of("gpu", test).of_median(PER_NODE)
                alarms |= has_slow(medians, [f"n{n}" for n in range(nodes)], spread, sum(counts))
        failed += alarms
    return failed


def has_slow(logs: np.ndarray, nodes: list[str], spread: Spread, comparisons: int) -> bool:
    loss = allowed_loss(fleet_deviation(logs, nodes, spread), spread.worth, comparisons)
    return bool((logs < medians_of_others(logs) - loss).any())


def limits_of(nodes: int, kept: bool, seed: int = 0) -> dict[str, Limit]:
    """Return the limit of each test's last part: among the parts, or against the part's own baseline if `kept`."""
    readings = list(draw_readings(np.random.default_rng(seed), nodes))
    baseline = {(reading.test, reading.part): reading.value for reading in readings} if kept else {}
    limits = (judgement.limit for judgement in judge(readings, "gpu", {}, baseline))
    named = zip(readings, limits, strict=False)
    return {r.test: limit for r, limit in named if limit and (limit.basis == "the baseline") == kept}


def share_found(nodes: int, test: str, runs: int, loss: float | None = None) -> float:
    """Return how often a part that loses a share of its rate is found; by default, the loss that its limit states.

    The verdicts come from the command's own code.
    """
    found = 0
    for seed in range(runs):
        stated = limits_of(nodes, False, seed)[test].found_loss
        readings = list(draw_readings(np.random.default_rng(seed + runs), nodes))
        sick = max(number for number, reading in enumerate(readings) if reading.test == test)
        readings[sick] = replace(readings[sick], value=readings[sick].value * (1 - (stated if loss is None else loss)))
        found += judge(readings, "gpu", {}, {})[sick].verdict is Verdict.FAIL
    return found / runs


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def seen_spread(tests: str) -> tuple[int, int, float, float]:
    """Return the numbers of hosts and of healthy GPUs that ran the tests of a row of spreads.csv, and the standard
    deviations of the logarithms of their rates: between GPUs of a host, and between all GPUs of a model."""
    names = [row["tests"] for row in read_csv(SPREADS) if row["kind"] == "gpu"]
    rows = [row for row in read_csv(RATES) if next(name for name in names if name in row["test"]) == tests]
    logs = defaultdict[tuple[str, str], dict[str, list[float]]](lambda: defaultdict(list))
    for row in rows:
        logs[row["model"], row["test"]][row["host"]].append(np.log(float(row["rate"])))
    own = [np.var(of_host, ddof=1) for hosts in logs.values() for of_host in hosts.values() if len(of_host) > 1]
    means = [[np.mean(of_host) for of_host in hosts.values()] for hosts in logs.values()]
    variance = float(np.mean(own or 0.0))
    between = sum(np.var(of_model) * len(of_model) for of_model in means) / max(1, sum(map(len, means)) - len(means))
    gpus = {(row["host"], gpu) for row in rows for gpu in (row["gpu"] or "01")}  # a node's tests use both GPUs
    return len({row["host"] for row in rows}), len(gpus), variance**0.5, float(between + variance / 2) ** 0.5


def upper_bound(events: int, runs: int) -> float:
    """Return the upper end of the 95% interval of a share (Wilson 1927)."""
    share, z = events / runs, 1.96
    center, half = share + z * z / (2 * runs), z * np.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs))
    return float((center + half) / (1 + z * z / runs))


def build_page(runs: int) -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# How often a healthy cluster fails, and which losses are found\n"
    yield f"`python -m benchmarks.acceptance --runs {runs}` simulates nodes of {PER_NODE} GPUs and all tests of"
    yield "`profile=quick`, compared with the other parts, with the spreads of `spreads.csv`. Heavy tail: GPUs"
    yield f"differ by Student's distribution with {HEAVY_TAIL} degrees of freedom and the same deviation, which the"
    yield "limits do not assume.\n"
    yield "| GPUs | healthy clusters | failed | 95% at most | heavy tail: failed |\n|---|---|---|---|---|"
    for gpus in COUNTS:
        failed, tails = (count_false_alarms(gpus // PER_NODE, runs, draw) for draw in (normal, heavy))
        yield f"| {gpus:,} | {runs:,} | {failed / runs:.2%} | {upper_bound(failed, runs):.2%} | {tails / runs:.1%} |"
    for title, kept in (("compared with the other parts", False), ("compared with the part's own baseline", True)):
        yield f"\nThe smallest loss of a part that is found in 99% of cases, {title}; median of {CLUSTERS} clusters:\n"
        yield f"| GPUs | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}"
        for gpus in COUNTS:
            limits = [limits_of(gpus // PER_NODE, kept, seed) for seed in range(CLUSTERS)]
            losses = [[of[test].found_loss for of in limits if test in of] for test in SHOWN]
            yield f"| {gpus:,} | {' | '.join(f'{median(own):.1%}' if own else '—' for own in losses)} |"
    checked = max(100, runs // 5)
    yield f"\nIn {checked} simulations, losses as large as `found_loss` of another cluster of 64 GPUs were found in"
    yield f"{', '.join(f'{share_found(8, test, checked):.1%} ({test})' for test in SHOWN)}."
    yield f"A link at half its rate was found in {share_found(8, SHOWN[-1], checked, 0.5):.0%}."
    from benchmarks import acceptance_time  # which imports this module

    yield "\n## Time\n"
    yield "`profile=quick` on simulated nodes of 8 GPUs (`python -m benchmarks.acceptance_time`). The start of workers"
    yield "(14 s in each phase) and the tests take as long as in one run on two H200s, each a Ray node of its own."
    yield "Collectives of many nodes and the work of Ray's head take longer; by how much is not known.\n"
    yield from acceptance_time.tabulate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    page = "\n".join(build_page(parser.parse_args().runs)) + "\n"
    PAGE.write_text(page)
    print(page)
