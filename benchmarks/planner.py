"""Score the planner's estimates against published training runs.

    python benchmarks/planner.py [--rows FILE.csv] [--json] [--calibrate]

Each row of the file is a run with its whole configuration (`planner_rows.csv` has the columns). A row that cannot be
expressed as a job is listed with the reason and not scored. `--calibrate` fits an efficiency per trainer and device to
the rows, and writes the efficiencies and the bands around estimates into the planner's tables. With a source left out,
efficiencies are fitted to the rows of all other sources, and a pair without rows uses the nearest pair's efficiency.
Neutral constants replace the constants that were chosen after seeing rows (`planner_calibration.NEUTRAL`). The 95%
interval of a mean error resamples whole sources, since errors within a source are correlated.
"""

import argparse
import csv
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner_bands import Residual, residuals, write_bands
from benchmarks.planner_calibration import Pair, calibrate, efficiencies_without, efficiency_of, neutral_constants
from benchmarks.planner_rows import PublishedRun, UnsupportedRow, read_rows, read_run
from workloads.estimator.estimate import JobEstimate
from workloads.estimator.step import estimate_job
from workloads.layouts.trainers import EFFICIENCIES, Trainer, efficiencies, find_efficiency

ROWS = Path(__file__).parent / "planner_rows.csv"
RECENT_ROWS = ROWS.with_name("planner_rows_2026.csv")
H100_ROWS = ROWS.with_name("planner_rows_h100.csv")
LATER_ROWS = ROWS.with_name("planner_rows_h200_fp32.csv")  # of this project, measured after the step model was made
SCORED = (ROWS, RECENT_ROWS, LATER_ROWS, H100_ROWS)  # the basis of the bands and the scoreboard
FAMILIES = ("dense", "moe", "memory")
DRAWS = 2000
FEW_SOURCES = 5  # resampling fewer sources gives too few combinations
DIFFERENT = 0.10  # layouts with a smaller difference in rate are not ordered
LARGE_PERCENT = 25  # beyond this error a row is listed with its cause


@dataclass(frozen=True)
class Score:
    """A measured and a predicted value of a run: step time in seconds or memory in GiB."""

    run: PublishedRun
    family: str
    measured: float
    predicted: float
    reason: str

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.rows.is_file():
        parser.error(f"--rows: no file {options.rows}")
    runs, unsupported = read_runs(options.rows)
    if options.calibrate:
        write_efficiencies(runs)
    own_runs = runs if options.rows == ROWS else read_runs(ROWS)[0]
    scores = score_all(runs, efficiencies())
    left_out = score_left_out(runs, own_runs)
    if options.calibrate:
        write_bands(left_out_of_all(own_runs), FAMILIES)
    with neutral_constants():
        neutral = score_left_out(runs, own_runs)
    tables = {
        "with sources left out, neutral": neutral,
        "with sources left out": left_out,
        "with each pair's efficiency": scores,
    }
    if options.json:
        print(json.dumps(as_json(tables, scores, unsupported), indent=1))
    else:
        print("\n".join(describe(tables, scores, unsupported)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=Path, default=ROWS, help="a CSV file with the columns of planner_rows.csv")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--calibrate", action="store_true", help="fit the efficiencies to the rows and write them")
    return parser


def read_runs(path: Path) -> tuple[list[PublishedRun], list[dict[str, str]]]:
    """Return the runs of a file, and the unsupported rows with their reasons."""
    runs, unsupported = [], []
    for number, row in enumerate(read_rows(path), 1):
        try:
            runs.append(read_run(row))
        except UnsupportedRow as error:
            name = f"{row.get('framework', '')} {row.get('model', '')} {row.get('gpus', '')}".strip()
            unsupported.append({"row": str(number), "name": name, "reason": str(error)})
    return runs, unsupported


def write_efficiencies(runs: Sequence[PublishedRun]) -> None:
    with EFFICIENCIES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["trainer", "device", "efficiency", "rows"])
        for pair, value in calibrate(runs).items():
            writer.writerow([*pair, value, sum(run.pair == pair and run.step_s is not None for run in runs)])
    efficiencies.cache_clear()
    find_efficiency.cache_clear()


def left_out_of_all(own_runs: Sequence[PublishedRun]) -> list[Residual]:
    """Return the residuals of the runs of all files except the files that constants were fitted to."""
    runs = [run for path in SCORED for run in read_runs(path)[0]]
    scores = score_left_out(runs, own_runs)
    return residuals([(score.run, score.family, score.error_percent) for score in scores])


def score_all(runs: Iterable[PublishedRun], table: dict[Pair, float]) -> list[Score]:
    return [score for run in runs for score in score_run(run, efficiency_of(run, table))]


def score_left_out(runs: Sequence[PublishedRun], own_runs: Sequence[PublishedRun]) -> list[Score]:
    """Return the scores of each run, using efficiencies fitted without the run's source."""
    fitted = calibrate(own_runs)
    tables = {source: efficiencies_without(source, own_runs, fitted) for source in {run.source for run in runs}}
    share = Trainer.reserved_share  # a reserved share that only one source shows is unknown without that source
    return [score for run in runs for score in score_run(run, efficiency_of(run, tables[run.source]), share)]


def score_run(run: PublishedRun, efficiency: float, reserved_share: float | None = None) -> list[Score]:
    """Return the scores of a run's step time and memory, where measured."""
    estimate = estimate_job(run.job, run.cluster, efficiency)
    scores = []
    if run.step_s is not None:
        reason = explain_step(estimate, run.step_s)
        scores.append(Score(run, run.family, run.step_s, estimate.step.total_s, reason))
    if run.memory_gib is not None:
        memory = estimate.memory
        if reserved_share is not None:
            memory = replace(memory, reserved=reserved_share * memory.allocated_gib)
        predicted = getattr(memory, f"{run.memory_kind}_gib")
        scores.append(Score(run, "memory", run.memory_gib, predicted, explain_memory(estimate, run)))
    return scores


def explain_step(estimate: JobEstimate, measured_s: float) -> str:
    """Return a breakdown of the predicted time, and the factor by which all but GEMM time would have to differ."""
    step = estimate.step
    parts = sorted(vars(step).items(), key=lambda part: -part[1])[:4]
    shares = ", ".join(f"{name} {100 * value / step.total_s:.0f}%" for name, value in parts if value > 0)
    rest = step.total_s - step.products
    factor = (measured_s - step.products) / rest if rest else 1.0
    return f"{shares}; exact if all but products took {factor:.2f} times as long"


def explain_memory(estimate: JobEstimate, run: PublishedRun) -> str:
    parts = sorted(vars(estimate.memory).items(), key=lambda part: -part[1])[:4]
    return f"{run.memory_kind}: " + ", ".join(f"{name} {value:.1f} GiB" for name, value in parts)


def summarize(scores: Iterable[Score]) -> dict[str, dict[str, Any]]:
    """Return the rows, MAPE with interval, median error and worst error of each family, in percent."""
    families: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in FAMILIES}
    for score in scores:
        families[score.family][score.run.source].append(score.error_percent)
    return {
        name: _statistics(list(chain(*sources.values()))) | {"mape_95": _interval(list(sources.values()))}
        for name, sources in families.items()
    }


def _interval(sources: Sequence[Sequence[float]]) -> list[float] | None:
    """Return the 95% interval of the mean absolute error, resampling sources; None for few sources."""
    if len(sources) < FEW_SOURCES:
        return None
    draw = random.Random(0)
    means = sorted(
        statistics.fmean(abs(error) for source in draw.choices(sources, k=len(sources)) for error in source)
        for _ in range(DRAWS)
    )
    return [round(means[round(share * (DRAWS - 1))], 1) for share in (0.025, 0.975)]


def memory_kinds(scores: Iterable[Score]) -> dict[str, dict[str, Any]]:
    """Return the same summary for memory, by kind of memory."""
    kinds: dict[str, list[float]] = {"allocated": [], "reserved": [], "total": []}
    for score in scores:
        if score.family == "memory":
            kinds[score.run.memory_kind].append(score.error_percent)
    return {kind: _statistics(errors) for kind, errors in kinds.items()}


def _statistics(errors: Sequence[float]) -> dict[str, Any]:
    sizes = [abs(error) for error in errors]
    return {
        "rows": len(errors),
        "mape": round(statistics.fmean(sizes), 2) if sizes else None,
        "median": round(statistics.median(sizes), 2) if sizes else None,
        "worst": round(max(errors, key=abs), 2) if errors else None,
    }


def pairs_in_order(scores: Iterable[Score]) -> dict[str, dict[str, Any]]:
    """Return, for each family, how many layout pairs of one model on one cluster are in the right order."""
    families = {}
    for family in FAMILIES:
        ordered = [pair for pair in combinations((s for s in scores if s.family == family), 2) if _is_compared(*pair)]
        right = sum((_rate(a)[0] > _rate(b)[0]) == (_rate(a)[1] > _rate(b)[1]) for a, b in ordered)
        share = round(100 * right / len(ordered), 1) if ordered else None
        families[family] = {"pairs": len(ordered), "right": right, "percent": share}
    return families


def _rate(score: Score) -> tuple[float, float]:
    """Return the measured and predicted value that orders layouts: tokens/s per GPU, or GiB."""
    if score.family == "memory":
        return score.measured, score.predicted
    work = score.run.tokens / score.run.cluster.gpus
    return work / score.measured, work / score.predicted


def _is_compared(first: Score, second: Score) -> bool:
    keys = ("model_key", "cluster_key", "hardware_key", "seq_len")
    if any(first.run.row[key] != second.run.row[key] for key in keys):
        return False
    low, high = sorted((_rate(first)[0], _rate(second)[0]))
    return high / low - 1 >= DIFFERENT


def as_json(
    tables: Mapping[str, Sequence[Score]], scores: Sequence[Score], unsupported: list[dict[str, str]]
) -> dict[str, Any]:
    neutral, left_out, _ = tables.values()
    return {
        "neutral": {"families": summarize(neutral), "pairs_in_order": pairs_in_order(neutral)},
        "leave_one_source_out": {"families": summarize(left_out), "pairs_in_order": pairs_in_order(left_out)},
        "families": summarize(scores),
        "memory_kinds": memory_kinds(scores),
        "pairs_in_order": pairs_in_order(scores),
        "rows": [_as_row(score) for score in scores],
        "unsupported": unsupported,
    }


def _as_row(score: Score) -> dict[str, Any]:
    return {
        "name": score.run.name,
        "family": score.family,
        "source": score.run.source,
        "measured": round(score.measured, 4),
        "predicted": round(score.predicted, 4),
        "error_percent": round(score.error_percent, 2),
        "reason": score.reason,
    }


def describe(
    tables: Mapping[str, Sequence[Score]], scores: Sequence[Score], unsupported: Sequence[Mapping[str, str]]
) -> list[str]:
    """Return the scoreboard as lines."""
    lines = []
    for family in FAMILIES:
        unit = "GiB" if family == "memory" else "s"
        lines += [f"{family}: measured and predicted {unit}, error, why", ""]
        for score in scores:
            if score.family == family:
                lines += [
                    f"{score.run.name:68s} {score.measured:9.3f} {score.predicted:9.3f} {score.error_percent:+7.1f}%",
                    f"    {score.reason}",
                ]
        lines.append("")
    lines += [line for title, table in tables.items() for line in _table(title, table)]
    large = [score for score in scores if abs(score.error_percent) > LARGE_PERCENT]
    lines += [f"beyond {LARGE_PERCENT}%: {score.run.name} {score.error_percent:+.1f}%" for score in large]
    lines += [f"unsupported: row {row['row']} {row['name']}: {row['reason']}" for row in unsupported]
    return lines


def _table(title: str, scores: Sequence[Score]) -> list[str]:
    summary, order = summarize(scores), pairs_in_order(scores)
    lines = [f"{title:34s} {'rows':>5} {'MAPE':>8} {'median':>8} {'worst':>8}  pairs in order  MAPE's 95%"]
    for family in FAMILIES:
        values, pairs = summary[family], order[family]
        errors = [values[key] for key in ("mape", "median", "worst")]
        interval = "-" if values["mape_95"] is None else "{} to {}".format(*values["mape_95"])
        figures = ["       -" if error is None else f"{error:7.1f}%" for error in errors]
        lines.append(
            f"  {family:32s} {values['rows']:5} {' '.join(figures)}  {pairs['right']} of {pairs['pairs']}"
            + " " * 9
            + interval
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
