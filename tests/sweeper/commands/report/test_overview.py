"""The report's first paragraph, its failures, and its words on a CPU."""

import math

import pandas as pd

from sweeper.commands.report import overview, report_tables
from sweeper.commands.report.platform_panels import build_panels
from sweeper.metrics.criteria import Objective
from sweeper.results.mlflow_results import Stored
from sweeper.results.ranking import find_best_results
from tests.support.factories import complete_trials


def build_stored(trials: pd.DataFrame, winner: str = "") -> Stored:
    """Return a store of one sweep with these trials."""
    start, study = pd.Timestamp(0, tz="UTC"), {"tag.sweeper.study": "s"}
    numbers = [str(n) for n in range(len(trials))]
    rows = trials.assign(**study, **{"tag.sweep": "s", "start": start, "end": pd.NaT, "tag.sweeper.trial": numbers})
    sweep = {"run": "s", "start": start, "tag.workload": "parallel", "tag.device": "H200", "tag.winner": winner}
    return Stored(pd.DataFrame([sweep | study]), rows.assign(run=[f"{n:04d}" for n in range(len(trials))]))


def test_the_report_opens_with_what_was_measured_what_won_and_what_it_means() -> None:
    trials = complete_trials({"H200": [1000.0, 2000.0, 1900.0]}, tp=[1, 2, 4])
    assert overview.describe(build_stored(trials)) == (
        "1 sweep of parallel on H200 tried 3 trials (3 complete). On H200 the fastest is tp=2 with 2,000 tokens/s "
        "(95% 1,800 to 2,200, a single trial), 5.3% ahead of tp=4, but their intervals overlap. Run so, it takes "
        "500 ms a step, reaches 10.0% of the dense peak (MFU) and trains 10^9 tokens in 138.9 hours on H200."
    )
    apart = overview.describe(build_stored(trials.head(2)))
    assert "100.0% ahead of tp=1, with disjoint intervals." in apart
    alone = overview.describe(build_stored(trials.head(1)))
    assert "the fastest is the only configuration with 1,000" in alone and "ahead" not in alone


def test_each_workload_has_a_sentence_of_its_own_and_none_is_the_fastest_of_all() -> None:
    parts = [build_stored(complete_trials({"H200": [speed]}, tp=[1])) for speed in (1000.0, 2000.0)]
    sweeps, trials = (
        pd.concat([table.assign(**{"tag.sweeper.study": n}) for n, table in enumerate(tables)], ignore_index=True)
        for tables in ([part.sweeps for part in parts], [part.trials for part in parts])
    )
    sweeps["tag.workload"], trials["tag.work"] = ["parallel", "matmul"], ['{"workload": "a"}', '{"workload": "b"}']
    first, *sentences = overview.describe(Stored(sweeps, trials)).splitlines()
    assert first == "2 sweeps of parallel and matmul on H200 tried 2 trials (2 complete)."
    assert [sentence.partition(", ")[0].partition(" (")[0] for sentence in sentences] == [
        "parallel: On H200 the fastest is the only configuration with 1,000 tokens/s",
        "matmul: On H200 the fastest is the only configuration with 2,000 tokens/s",
    ]


def test_the_fastest_of_several_data_types_is_that_of_the_latest_sweep() -> None:
    stored = build_stored(complete_trials({"H200": [2000.0, 1000.0]}, dtype=["bf16", "fp32"]))
    stored.trials["tag.work"] = [f'{{"workload": "parallel", "type": "{dtype}"}}' for dtype in ("bf16", "fp32")]
    assert " On H200 the fastest is dtype=bf16 with 2,000 tokens/s" in overview.describe(stored)
    later = stored.sweeps.assign(**{"tag.sweeper.study": "t", "start": pd.Timestamp(1, unit="s", tz="UTC")})
    trials = stored.trials.assign(**{"tag.sweeper.study": ["s", "t"]})
    both = Stored(pd.concat([stored.sweeps, later], ignore_index=True), trials)
    both.trials["tag.sweep"] = ["first", "later"]
    latest = " In the sweep later, on H200 the fastest is the only configuration with 1,000"
    assert latest in overview.describe(both)


def test_the_lead_of_a_winner_of_the_finals_is_that_of_the_finals() -> None:
    finals = {"final.metric": "tokens_per_s", "final.trial": "0", "final.value": 990.0, "final.rounds": 5.0}
    trials = complete_trials({"H200": [1000.0, 1100.0, 900.0]}, tp=[1, 2, 4])
    trials["metric.final_tokens_per_s"] = [990.0, 900.0, math.nan]
    trials = trials.assign(**finals, **{"final.low": 980.0, "final.high": 1000.0})
    text = overview.describe(build_stored(trials))
    assert "tp=1 with 990 tokens/s (95% 980 to 1,000, mean of 5 rounds of the finals), 10.0% ahead of tp=2" in text
    assert "; the finals confirm it." in text
    tie = overview.describe(build_stored(trials, "a tie of trials 0, 1: 10 TFLOP/s"))
    assert "; the finals call it a tie." in tie


def test_the_best_loss_is_called_the_best_and_its_lead_is_no_percentage() -> None:
    trials = complete_trials({"H200": [1000.0, 1100.0]}, lr=[1, 2])
    text = overview.describe(
        build_stored(trials.assign(objective=Objective("loss", "minimize"), **{"metric.loss": [-0.5, 0.25]}))
    )
    assert "On H200 the best loss is lr=1 with -0.5 loss (a single trial), ahead of lr=2 with 0.25, of unknown" in text


def test_failures_are_listed_by_their_reasons() -> None:
    trials = complete_trials({"H200": [1000.0] * 5}, tp=range(5))
    trials["tag.outcome"] = ["complete", "failed", "failed", "infeasible", "lost"]
    trials["tag.reason"] = [None, "exit code 3 after 2 s", "exit code 3 after 7 s", "8 GiB too little", "node n1 lost"]
    table = report_tables.build_failures_table(build_stored(trials).trials)
    assert table.rows == [
        ["s", "failed", "2", "0002", "exit code 3 after 7 s"],
        ["s", "lost", "1", "0004", "node n1 lost"],
        ["s", "infeasible", "1", "0003", "8 GiB too little"],
    ]
    assert not report_tables.build_failures_table(build_stored(trials.head(1)).trials).rows


def test_a_cpu_has_processes_and_no_gpus() -> None:
    trials = complete_trials({"AMD EPYC": [1000.0]}, devices=2).assign(**{"tag.hardware": "cpu"})
    (result,) = find_best_results(trials)
    assert result.platform == "AMD EPYC, 2 processes"
    assert not any("GPU" in panel.title + panel.unit for panel in build_panels([result]))
    (result,) = find_best_results(trials.assign(**{"tag.hardware": "h200"}))
    assert result.platform == "2 x AMD EPYC" and any("GPU" in panel.unit for panel in build_panels([result]))


def test_imported_results_are_counted_apart() -> None:
    stored = Stored(pd.DataFrame(), pd.DataFrame(), pd.DataFrame([{"run": "r", "tag.outcome": "complete"}] * 5))
    assert overview.describe(stored) == "5 results of other tools were imported, which are not ranked."
