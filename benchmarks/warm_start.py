"""Measure how many trials a warm start from another sweep's best points saves, on recorded sweeps.

    python -m benchmarks.warm_start [--seeds 50]

Prints the table of benchmarks/results/warm_start.md. Each search is the project's own, with TPE; a trial returns the
metric that was recorded for its point, and only the points of the recorded sweep are allowed. The benchmark counts the
trials until one is within 2% of the best. Only the warm start gives initial points; there is no cost model.
"""

import argparse
import csv
import random
import re
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sweeper.common.trials import TrialRecord, TrialStatus
from sweeper.config.schema import Search
from sweeper.config.space import Choice, Parameters, Space
from sweeper.config.space_checks import POINTS, WarmStart
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.intervals import student_interval
from sweeper.search.study import Study

ROOT = Path(__file__).parent.parent
LAYOUTS = ROOT / "tests/samples/h200_layouts.csv"
PRODUCTS = ROOT / "benchmarks/results/precision_h200.md"
LAYOUT_PARAMETERS = ("dp_replicate", "dp_shard", "tp", "pp", "micro_batch", "checkpointing", "reshard_after_forward")
LAYOUT_PARAMETERS += ("dtype", "block")
WITHIN = 0.02


@dataclass(frozen=True)
class RecordedSweep:
    """The recorded points of a sweep and the rate of each point."""

    name: str
    points: tuple[Parameters, ...]
    rates: tuple[float, ...]

    @property
    def space(self) -> Space:
        names = self.points[0]
        values = {name: tuple(dict.fromkeys(point[name] for point in self.points)) for name in names}
        return Space({name: Choice(choices) for name, choices in values.items()}, only=self.points)

    @property
    def good_enough(self) -> float:
        return (1 - WITHIN) * max(self.rates)

    def better_half(self) -> WarmStart:
        ranked = sorted(zip(self.rates, range(len(self.points)), strict=True), reverse=True)
        better = ranked[: max(POINTS, len(ranked) // 2)]
        return WarmStart(self.name, self.name, tuple(self.points[place] for _, place in better))


def read_layouts(global_batch: int, name: str) -> RecordedSweep:
    """Return the recorded layouts of Llama 3 8B with a rate; the two batch sizes are for two and for four GPUs."""
    lines = [line for line in LAYOUTS.read_text().splitlines() if not line.startswith("#")]
    rows = [row for row in csv.DictReader(lines) if row["tokens_per_s"] and int(row["global_batch"]) == global_batch]
    points = tuple({parameter: row[parameter] for parameter in LAYOUT_PARAMETERS} for row in rows)
    return RecordedSweep(name, points, tuple(float(row["tokens_per_s"]) for row in rows))


def read_products(wanted: str, name: str) -> RecordedSweep:
    """Return the recorded TFLOP/s of one pass of the linear layers of Llama 3 8B, by layer and recipe."""
    table = PRODUCTS.read_text().split("\ntflops ")[1].split("\n\n")[0].splitlines()
    points, rates, layer = [], [], ""
    for line in table[2:]:
        words = line.split()
        if words[0] not in ("forward", "input_gradient", "weight_gradient"):
            layer = words.pop(0)
        for recipe, rate in zip(table[0].split(), words[1:], strict=True):
            if words[0] == wanted and re.fullmatch(r"[\d.]+", rate):
                points.append({"layer": layer, "recipe": recipe})
                rates.append(float(rate))
    return RecordedSweep(name, tuple(points), tuple(rates))


def shuffle(sweep: RecordedSweep, seed: int) -> RecordedSweep:
    """Return the sweep with its points shuffled: if TPE proposes no allowed point, the next point in order is used."""
    order = random.Random(seed).sample(range(len(sweep.points)), len(sweep.points))
    points, rates = ([values[place] for place in order] for values in (sweep.points, sweep.rates))
    return RecordedSweep(sweep.name, tuple(points), tuple(rates))  # type: ignore[arg-type]


def count_trials(target: RecordedSweep, seed: int, source: RecordedSweep | None) -> int:
    """Return the number of trials until one is within 2% of the best, with a warm start from `source` if given."""
    initial_points = source.better_half().legal_points(target.space) if source else []
    search = Search("tpe"), seed, Criteria.of({"rate": "maximize"})
    with tempfile.TemporaryDirectory() as folder:
        study = Study(Path(folder) / "study.journal", {"seed": seed}, target.space, *search, initial_points)
        for count in range(1, len(target.points) + 1):
            trial = study.ask()
            assert trial is not None
            rate = target.rates[target.points.index(dict(trial.params))]
            if rate >= target.good_enough:
                return count
            study.tell(_record(trial.number, trial.params, rate))
    raise AssertionError("every point was tried")


def _record(number: int, params: Mapping[str, object], rate: float) -> TrialRecord:
    fields = {"reason": "", "detail": "", "measurements": [], "where": {}}
    times = {"started_at_s": 0.0, "ended_at_s": 1.0, "elapsed_s": 1.0}
    return TrialRecord(number, params, TrialStatus.COMPLETE, metrics={"rate": rate}, **fields, **times)  # type: ignore[arg-type]


def describe(counts: Sequence[int]) -> str:
    interval = student_interval(np.array(counts, dtype=float))
    return f"{interval.value:.1f} ({interval.low:.1f} to {interval.high:.1f}), at most {max(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    seeds = range(parser.parse_args().seeds)
    two, four = read_layouts(8, "layouts on 2 GPUs"), read_layouts(32, "layouts on 4 GPUs")
    forward, backward = read_products("forward", "forward products"), read_products("input_gradient", "input gradients")
    print("| start from | search | points | within 2% | trials without | trials with | saved |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for source, target in ((two, four), (four, two), (forward, backward), (backward, forward)):
        counts = [[count_trials(shuffle(target, seed), seed, start) for seed in seeds] for start in (None, source)]
        saved = statistics.mean(counts[0]) - statistics.mean(counts[1])
        good = sum(rate >= target.good_enough for rate in target.rates)
        row = [source.name, target.name, len(target.points), good, *map(describe, counts), f"{saved:+.1f}"]
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
