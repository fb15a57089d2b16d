"""Write the planner's scoreboard: its error on each source of published runs, with that source left out.

    python benchmarks/planner_scoreboard.py [--check]

Each row in the files `planner_rows*.csv` is a run. `--check` compares the page with the text that would be written.
"""

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner import FAMILIES, ROWS, SCORED, left_out_of_all, read_runs, score_all
from benchmarks.planner_bands import DISTANCES, Residual, coverage, half_widths
from benchmarks.planner_rows import PublishedRun
from workloads.estimator.memory import peak_memory
from workloads.estimator.search import bound_gib
from workloads.layouts.trainers import efficiencies

PAGE = Path(__file__).parents[1] / "docs/reference/planner-scoreboard.md"
INTRODUCTION = """# The planner's scoreboard

Made by `python benchmarks/planner_scoreboard.py` from all rows with a source; a test compares this page with what the
command writes. Add a row with one line in `benchmarks/planner_rows_2026.csv` (the columns are those of its first line).
Errors are those of a step's time, or of GiB, with efficiencies of which the row's source knows nothing: a positive
error is a step that is planned too long. "Covered" is the share of the source's rows within a 90% band that rests on
all other sources.

"Seen" says what knows the rows: **fitted** (efficiencies of trainers are fitted to rows of this file, this source's
left out here), or **in sight** (effects, shares and settings were chosen while its errors were known). No row was held
back: what a new source shows is the only forecast. The nearest to one are twelve layouts on two H100s whose estimates
were written down before they ran: 0.3 to 28% too fast, 7.1% at the mean (`parallel_h100.md` of the results).

Rows of Megatron-Bridge with experts have the dispatcher, the overlap and the CUDA graph of the recipe behind them
(`benchmarks/planner_recipes.csv`, read in its repository at each release). Before that their releases were guessed, and
mixtures of experts had an error of 20.4%. Two rows that their source calls a regression are not scored: with them the
mean would be 12.6%. Nor is GLM-5.2, whose attention selects tokens: with it the mean would be 12.5%.

The runs of BigScience had CUDA_LAUNCH_BLOCKING=1, so each block also takes the time of its launches: the 8 ms that come
from blocks of experts elsewhere. Ten other configurations on the same page, which are not rows, are within 7.1%.
"""
OTHERS = """## Other planners

Calculon (caa4b11) on the twelve rows that it can express, GPT models on A100s, by `benchmarks/planner_calculon.py` with
a clone of its repository. It is given the rows' networks; its model has no output layer.

| source | rows | MAPE, source left out | Calculon's MAPE |
|---|---:|---:|---:|
| Korthikanti et al. 2022, which Calculon was made with | 4 | 4.1% | 3.2% |
| vTrain | 4 | 3.0% | 8.1% |
| BigScience 176B, nodes with a slow network | 4 | 3.9% | 6.7% |

Figures of others on other rows, as they publish them: Calculon 3.7% on 8 that it was made with, and 15.3% on 109 of
vTrain's; vTrain 8.4% on one node and 14.7% on several; AMD's projection "within 10%" on four. The code of vTrain and
SimuMax was not run on these rows.
"""


def page() -> str:
    files = {path: read_runs(path) for path in SCORED}
    found = left_out_of_all(files[ROWS][0])
    fitted = {run.source for run in files[ROWS][0]}
    lines = [INTRODUCTION, *_summary(found), "", *_bands(found), "", *_sources(found, fitted), OTHERS]
    lines[-1:-1] = _memory_rows([run for runs, _ in files.values() for run in runs])
    lines += ["## Rows that cannot be expressed", ""]
    total = sum(len(runs) + len(unsupported) for runs, unsupported in files.values())
    unsupported = [row for _, rows in files.values() for row in rows]
    assumed = sum(bool(run.assumed) for runs, _ in files.values() for run in runs)
    lines.append(f"{len(unsupported)} of {total}; of {assumed} others the recomputation is assumed: no source says it.")
    lines += ["", *(f"- {row['name']}: {row['reason'].split('. Available')[0]}" for row in unsupported)]
    return "\n".join(lines) + "\n"


def _summary(found: Sequence[Residual]) -> Iterator[str]:
    yield "| | rows | sources | MAPE | mean over sources | median | covered by a 90% band | its 95% | half the band |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for family in FAMILIES:
        some = [each for each in found if each.family == family]
        sources = Counter(each.run.source for each in some)
        sizes = [abs(each.error_percent) for each in some]
        by_source = [_mean(_sizes(some, source)) for source in sources]
        covered = coverage(some)
        low, high = covered.interval
        yield (
            f"| {family} | {len(some)} | {len(sources)} | {_mean(sizes):.1f}% | {_mean(by_source):.1f}% "
            f"| {statistics.median(sizes):.1f}% | {covered.share:.0%} | {low:.0%} to {high:.0%} "
            f"| {covered.median_width:.0f}% |"
        )


def _bands(found: Sequence[Residual]) -> Iterator[str]:
    yield "Half the band that plans print, by how much of a plan no row has: the device, the trainer, the two together,"
    yield "as many GPUs, as long sequences. Of memory it is how far above the estimate it reaches."
    yield ""
    yield "| | nothing | one thing | two or more |"
    yield "|---|" + "---:|" * DISTANCES
    for family in FAMILIES:
        widths = half_widths(each for each in found if each.family == family)
        yield f"| {family} | " + " | ".join(f"{math.ceil(width)}%" for width in widths) + " |"


def _sources(found: Sequence[Residual], fitted: set[str]) -> Iterator[str]:
    for family in FAMILIES:
        some = [each for each in found if each.family == family]
        shares = coverage(some).by_source
        yield f"## {family.capitalize() if family != 'moe' else 'Mixtures of experts'}"
        yield ""
        yield "| source | rows | devices | seen | mean error | MAPE | worst | covered |"
        yield "|---|---:|---|---|---:|---:|---:|---:|"
        for source in sorted({each.run.source for each in some}):
            errors = [each.error_percent for each in some if each.run.source == source]
            devices = " ".join(sorted({each.run.cluster.device.name for each in some if each.run.source == source}))
            seen = "fitted" if source in fitted else "in sight"
            yield (
                f"| {source} | {len(errors)} | {devices} | {seen} | {_mean(errors):+.1f}% "
                f"| {_mean(_sizes(some, source)):.1f}% | {max(errors, key=abs):+.1f}% | {shares[source]:.0%} |"
            )
        yield ""


def _memory_rows(runs: Sequence[PublishedRun]) -> Iterator[str]:
    scores = [each for each in score_all(runs, efficiencies()) if each.family == "memory"]
    large = [r for r in runs if bound_gib(peak_memory(r.job, r.cluster), r.job, r.cluster) > r.cluster.usable_gib]
    trainers = ", ".join(f"{count} of {name}" for name, count in Counter(run.pair[0] for run in large).most_common())
    median = statistics.median(each.error_percent for each in scores)
    yield f"""Plans print a bound, with settings that know the rows: what is allocated in none of them exceeds it, and
the median slack is {median:.1f}%. A bound errs to the other side: that of {len(large)} of all {len(runs)} runs, which
trained, exceeds what is usable ({trainers}; many of llmq offload, which it does not know).
"""
    yield "| row | GiB | measured | bound | slack |"
    yield "|---|---|---:|---:|---:|"
    for each in scores:
        slack = f"{each.error_percent:+.1f}%"
        yield f"| {each.run.name} | {each.run.memory_kind} | {each.measured:.1f} | {each.predicted:.1f} | {slack} |"
    yield ""


def _sizes(some: Sequence[Residual], source: str) -> list[float]:
    return [abs(each.error_percent) for each in some if each.run.source == source]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    text = page()
    if not parser.parse_args().check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        raise SystemExit(f"{PAGE} is not what this command writes: run it without --check")


if __name__ == "__main__":
    main()
