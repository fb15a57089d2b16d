"""Write the planner's scoreboard: its error on each source of published runs, with that source left out.

    python benchmarks/planner_scoreboard.py [--check]

Each row in the files `planner_rows*.csv` is a run. `--check` compares the page with the text that would be written.
"""

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.planner import (
    FAMILIES,
    RECENT_ROWS,
    ROWS,
    SCORED,
    left_out_of_all,
    pairs_in_order,
    read_runs,
    score_all,
    score_left_out,
)
from benchmarks.planner_bands import DISTANCES, Residual, band_ends, coverage, trainer_factors
from benchmarks.planner_calibration import NEUTRAL, calibrate, neutral_constants
from benchmarks.planner_rows import PublishedRun
from sweeper.preflight.calibration import calibrate_device, read_calibration
from workloads.estimator.memory import peak_memory
from workloads.estimator.search import bound_gib
from workloads.layouts.trainers import efficiencies

CALIBRATION = Path(__file__).with_name("results") / "calibration_h200.yaml"
PAGE = Path(__file__).parents[1] / "docs/reference/planner-scoreboard.md"
INTRODUCTION = """# The planner's scoreboard

`python benchmarks/planner_scoreboard.py` writes this page from all rows with a source, and a test compares the page
with the command's output. To add a row, add a line to `benchmarks/planner_rows_2026.csv`; its first line names the
columns. Errors are those of step times, or of GiB of memory. Efficiencies are fitted without the row's source. A
positive error means that the estimate is too high. "Covered" is the share of the source's rows within a 90% band that
is based on all other sources.

"Seen" shows how a source influenced the planner. **Fitted**: efficiencies of trainers are fitted to rows of this file,
on this page without this source's rows. **In sight**: effects, shares and settings were chosen while the source's
errors were known. No row was held back, so only a new source tests a forecast. Twelve layouts on two H100s come
closest: their estimates were written down before they ran, and were 0.3 to 28% too fast, 7.1% on average
(`parallel_h100.md` of the results).

Rows of Megatron-Bridge with experts use the dispatcher, the overlap, the CUDA graph, the kernels of attention, of
experts and of the output layer, and the division of layers of their recipes (`benchmarks/planner_recipes.csv`, read in
its repository at each release); rows of the DGX Cloud recipes use those of NeMo's scripts. When the releases were
guessed, the error for mixtures of experts was 20.4%. Two rows that their source calls a regression are not scored; with
them, the mean would be 12.5%. GLM-5.2 is not scored either, because its attention selects tokens; with it, the mean
would be 12.4%. DeepSeek-V4-Flash, whose attention selects compressed keys, is estimated 14.4 and 16.7% too fast. Its
estimates were computed once from the model's published files and its recipe, 20.1 and 22.5% too fast. Since then, its
recipe's fused experts and published times of hyper-connections' kernels are counted, with these errors known.

Eight rows of Megatron-Core state only TFLOP/s. Megatron counts half of the scores of attention, as its rows with
tokens/s and TFLOP/s show. Before this was corrected, all scores were assumed to count, and the measured times of these
rows were 13 to 82% too long. Pipelines of DeepSeek-V3 were estimated with an even division of layers, whose last stage
is slow. With the division of the recipes, the four without a graph are estimated 15 to 27% too fast. No measurement
explains this yet. Their experts exchange tokens over InfiniBand or by NCCL, as in most others with large errors.

Three rows of torchtitan on B200s are estimated 48 to 56% too fast. Their source limited the GPUs' power and does not
say to what, and estimates are at full power. Without these rows, the mean error of dense models would be 4.9%.

The rows of a script of PyTorch's FSDP on MI300Xs (October 2024) were added once their sequence length was found. They
are estimated 30.3% (bf16) and 43.8% (fp8) too fast, and nothing was changed afterwards. Most other rows are of later
software.

The runs of BigScience had CUDA_LAUNCH_BLOCKING=1, so each block also takes the time of its launches: the 7.1 ms that
are known from blocks of experts. With 8 ms, ten other configurations on the same page, which are not rows, were within
7.1%.
"""
TWO_GPUS = """## Two GPUs as the calibration of a cluster

The planner estimates the runs on 64 or more H100s. Efficiencies are fitted only to this project's {two} runs on two
H100s, and the network comes from the topology. "Neutral" also replaces the constants that were chosen after seeing
published runs. "Calibrated" takes the rates of GEMMs, grouped GEMMs, attention and launches that `sweeper calibrate`
measured on two H200s (benchmarks/results/calibration_h200.yaml), which have the chip and the power cap of an H100; no
such file is recorded for two H100s. The other columns take the planner's tables.

| | rows | MAPE | median | within 6% | neutral MAPE | calibrated MAPE |
|---|---:|---:|---:|---:|---:|---:|
"""
LIMITS = """
The goal of 6% is missed for both families. The rows with an error of the step time above 12%:

{largest}

Other rows of the dense ones' trainers and devices have small errors, so an efficiency does not explain them. The two
rows of NeMo (Cisco's) have steps of less than a second. For mixtures of experts, pipelines and experts that exchange
tokens between nodes are estimated too fast, and the layout without a pipeline too slow, with a large part of its
estimate in data-parallel communication. Two GPUs show neither. No source publishes the parts of a step, so the part at
fault is not measured.
"""
AIMS = """## Aims

Sources are left out as above. The published rows are those of `planner_rows.csv` and `planner_rows_2026.csv`, without
this project's own runs. Aims that are missed are in bold.

| | aim | dense | experts |
|---|---|---:|---:|
"""
ABLATION = """
A constant that was chosen with rows in sight stays only if it improves two sources that were left out. The table has
the number of sources whose mean error grows (improved by the constant) or shrinks (harmed) by more than {points} points
if the constant is neutral. A source counts once for each family.

| constant | improved | harmed | dense MAPE if neutral | experts |
|---|---:|---:|---:|---:|
"""
EXCEPTIONS = """
`HOST_GB_S` is an exception: one source has the optimizer's step on the host. The neutral value is the data sheets'
600 GB/s. A measurement that is not a row speaks for a lower value: with FSDP2's `CPUOffloadPolicy`, whose fused AdamW
runs on 16 cores, a step of Llama 3 8B on an H200 takes 3.3 s longer than one with the update on the GPU
(`benchmarks/offload.md`), and the update reads and writes 128 GB. `EAGER_FACTOR` harms more sources than it improves,
but by less: separate kernels move more bytes than fused ones, and without the factor the mean error is larger. Both
sources that `STALL_S_PER_GIB` improves are this project's own runs.

"""
POINTS = 0.05
OTHERS = """## Other planners

Calculon (caa4b11) and SimuMax (4dcaae5) ran on the twelve rows that both can express, GPT models on A100s
(`benchmarks/planner_calculon.py` and `planner_simumax.py`, each with a clone of the planner's repository). Both get the
networks of the rows. Calculon's model has no output layer. SimuMax publishes rates of the A100 over PCIe and of the
B200; it ran with the former, the latter's efficiencies of NVLink, and its default factor for stragglers, which is 1.085
on rows of vTrain and BigScience. Without this factor, it is within 5% on vTrain's rows and 13 to 35% too slow on
BigScience's. The adapters have no setting for the blocking launches of BigScience's runs.

| source | rows | MAPE, source left out | Calculon's MAPE | SimuMax's MAPE |
|---|---:|---:|---:|---:|
| Korthikanti et al. 2022, used to develop Calculon | 4 | 4.1% | 3.2% | 3.1% |
| vTrain | 4 | 3.0% | 8.1% | 11.9% |
| BigScience 176B, nodes with a slow network | 4 | 5.2% | 6.7% | 31.7% |

vTrain (f8dda84) cannot run without a GPU. It needs traces of a model's kernels; its repository contains only traces of
all-reduces, and its profiler needs CUDA. The repository has no predictions for its four rows either.

Published errors of other planners on other rows: Calculon 3.7% on 8 rows that were used to develop it, and 15.3% on 109
of vTrain's; vTrain 8.4% on one node and 14.7% on several; SimuMax up to 13.5% on its own B200 runs; AMD's projection
"within 10%" on four.
"""


def page() -> str:
    files = {path: read_runs(path) for path in SCORED}
    found = left_out_of_all(files[ROWS][0])
    fitted = {run.source for run in files[ROWS][0]}
    aims = AIMS + "\n".join([*_aims(files, found), ""]) + ABLATION.format(points=POINTS)
    aims += "\n".join([*_ablation(files[ROWS][0], found), ""]) + EXCEPTIONS
    lines = [INTRODUCTION, *_summary(found), "", *_bands(found), "", *_sources(found, fitted), aims + OTHERS]
    every = [run for runs, _ in files.values() for run in runs]
    lines[-1:-1] = [*_memory_rows(every), _two_gpus(every)]
    lines += ["## Rows that cannot be expressed", ""]
    total = sum(len(runs) + len(unsupported) for runs, unsupported in files.values())
    unsupported = [row for _, rows in files.values() for row in rows]
    assumed = sum(bool(run.assumed) for runs, _ in files.values() for run in runs)
    lines.append(
        f"{len(unsupported)} of {total}; for {assumed} others, no source states the recomputation, so it is assumed."
    )
    lines += ["", *(f"- {row['name']}: {row['reason'].split('. Available')[0]}" for row in unsupported)]
    return "\n".join(lines) + "\n"


def _summary(found: Sequence[Residual]) -> Iterator[str]:
    yield "| | rows | sources | MAPE | mean over sources | median | covered by a 90% band | its 95% | median band |"
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
            f"| {_show_ends(family, covered.median_ends)} |"
        )


def _bands(found: Sequence[Residual]) -> Iterator[str]:
    yield "Plans print a band of rates. The table has its ends, by the number of things in a plan that no row has:"
    yield "the device, the trainer, the two together, as many GPUs, as long sequences. Rates are more often and"
    yield "farther below their estimates than above, so each side has a factor: the geometric mean of 1 plus its"
    yield "errors in percent. For memory, plans use the upper end, and only the trainer's own rows count as rows with"
    yield "as many GPUs. Bands of rates are multiplied by the trainer's factor: its sources' mean error, relative to"
    yield "that of all and shrunk toward it as if one more source had shown it. A factor below 1 applies only if"
    yield "nothing is missing. For coverage and for the conformal score of a run, factors leave out the run's source."
    yield ""
    yield "| | nothing | one thing | two or more | factors |"
    yield "|---|" + "---:|" * DISTANCES + "---|"
    for family in FAMILIES:
        theirs = [each for each in found if each.family == family]
        widths = " | ".join(_show_ends(family, ends) for ends in band_ends(theirs))
        factors = ", ".join(f"{name} {factor:.2f}" for name, factor in trainer_factors(theirs).items())
        yield f"| {family} | {widths} | {factors} |"


def _show_ends(family: str, ends: tuple[float, float]) -> str:
    below, above = map(math.ceil, ends)
    return f"+{above}%" if family == "memory" else f"-{below}% to +{above}%"


def _aims(files: Mapping[Path, tuple[list[PublishedRun], Any]], found: Sequence[Residual]) -> Iterator[str]:
    runs = [run for path in (ROWS, RECENT_ROWS) for run in files[path][0]]
    total = len(runs) + sum(len(files[path][1]) for path in (ROWS, RECENT_ROWS))
    order, by_family = pairs_in_order(score_left_out(runs, files[ROWS][0])), _by_family(found)
    published = _by_family([each for each in found if each.run in runs])
    with neutral_constants():
        neutral = _by_family(left_out_of_all(files[ROWS][0]))
    errors, pairs, widths, neutral_errors = [], [], [], []
    for family, most in (("dense", 6), ("moe", 12)):
        error, share, counts = _mean_size(published[family]), order[family]["percent"], order[family]
        errors.append(_mark(f"{error:.2f}% of {len(published[family])}", error <= most))
        pairs.append(_mark(f"{counts['right']} of {counts['pairs']} ({share:.1f}%)", share >= 97))
        width = sum(coverage(by_family[family]).median_ends) / 2
        twice = 2 * statistics.median(abs(each.error_percent) for each in by_family[family])
        widths.append(_mark(f"{width:.0f}%; {twice:.1f}%", width <= twice))
        neutral_errors.append(f"{_mean_size(neutral[family]):.1f}%")
    expressed = _mark(f"{len(runs)} of {total} ({len(runs) / total:.0%})", len(runs) >= 0.9 * total)
    yield f"| mean error on published rows | 6%, 12% | {' | '.join(errors)} |"
    yield f"| pairs of published rows in order that differ by 10% | 97% | {' | '.join(pairs)} |"
    yield f"| half the median band; twice the median error | at most equal | {' | '.join(widths)} |"
    yield f"| published rows that can be expressed | 90% | {expressed} | the same |"
    yield f"| mean error on all rows, constants of the table below neutral | | {' | '.join(neutral_errors)} |"


def _mark(text: str, is_met: bool) -> str:
    return text if is_met else f"**{text}**"


def _ablation(own_runs: Sequence[PublishedRun], found: Sequence[Residual]) -> Iterator[str]:
    before = _by_source(found)
    for _, name, _ in NEUTRAL:
        with neutral_constants(name):
            neutral = left_out_of_all(own_runs)
        changes = [size - before[source] for source, size in _by_source(neutral).items()]
        counts = sum(change > POINTS for change in changes), sum(change < -POINTS for change in changes)
        sizes = [f"{_mean_size(_by_family(neutral)[family]):.1f}%" for family in ("dense", "moe")]
        yield f"| `{name}` | {counts[0]} | {counts[1]} | {' | '.join(sizes)} |"


def _by_family(some: Sequence[Residual]) -> dict[str, list[Residual]]:
    return {family: [each for each in some if each.family == family] for family in FAMILIES}


def _by_source(some: Sequence[Residual]) -> dict[tuple[str, str], float]:
    """Return the mean size of the errors of step times by family and source."""
    sizes: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in some:
        if each.family != "memory":
            sizes[each.family, each.run.source].append(abs(each.error_percent))
    return {source: _mean(values) for source, values in sizes.items()}


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
    yield f"""Plans print an upper bound of memory, with settings chosen with the rows in sight. No row allocates more,
and the median slack is {median:.1f}%. A bound can be too high: {len(large)} of all {len(runs)} runs trained, although
their bound exceeds the usable memory ({trainers}; many runs of llmq offload, which the bound ignores).
"""
    yield "| row | GiB | measured | bound | slack |"
    yield "|---|---|---:|---:|---:|"
    for each in scores:
        slack = f"{each.error_percent:+.1f}%"
        yield f"| {each.run.name} | {each.run.memory_kind} | {each.measured:.1f} | {each.predicted:.1f} | {slack} |"
    yield ""


def _two_gpus(runs: Sequence[PublishedRun]) -> str:
    """Return the section on clusters of H100s, with efficiencies fitted to two of them."""
    timed = [run for run in runs if run.cluster.device.name.startswith("h100") and run.step_s is not None]
    two, clusters = ([r for r in timed if r.cluster.gpus == 2], [r for r in timed if r.cluster.gpus >= 64])
    scores = score_all(clusters, calibrate(two))
    with neutral_constants():
        neutral = score_all(clusters, calibrate(two))
    calibrated = score_all(map(_as_calibrated, clusters), calibrate(map(_as_calibrated, two)))
    lines = []
    for family in ("dense", "moe"):
        sizes, *others = (
            [abs(s.error_percent) for s in some if s.family == family] for some in (scores, neutral, calibrated)
        )
        within = sum(size <= 6 for size in sizes)
        means = " | ".join(f"{_mean(other):.1f}%" for other in others)
        errors = f"{_mean(sizes):.1f}% | {statistics.median(sizes):.1f}% | {within} | {means}"
        lines.append(f"| {family} | {len(sizes)} | {errors} |\n")
    largest = [
        f"- {s.run.name}: {s.error_percent:+.0f}%" for s in scores if s.family != "memory" and abs(s.error_percent) > 12
    ]
    return TWO_GPUS.format(two=len(two)) + "".join(lines) + LIMITS.format(largest="\n".join(largest))


def _as_calibrated(run: PublishedRun) -> PublishedRun:
    """Return the run with an H100's rates replaced by those measured on H200s, except those that depend on memory."""
    device = run.cluster.device
    if device.name != "h100":
        return run
    measured = calibrate_device(device, replace(read_calibration(CALIBRATION), copy_gb_s=None, update_gb_s=None))
    return replace(run, cluster=replace(run.cluster, device=measured))


def _sizes(some: Sequence[Residual], source: str) -> list[float]:
    return [abs(each.error_percent) for each in some if each.run.source == source]


def _mean_size(some: Sequence[Residual]) -> float:
    return _mean([abs(each.error_percent) for each in some])


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    checks, text = parser.parse_args().check, page()
    if not checks:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        raise SystemExit(f"{PAGE} is not what this command writes: run it without --check")


if __name__ == "__main__":
    main()
