"""Tests of the trials that the benchmark of other tools runs, and of its figures."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import table
from benchmarks.peers.figures import Trial, count_lines, count_loss, describe, idle_parts, idle_share, read_trials
from benchmarks.peers.schedules import batch_length_s, queue_length_s
from benchmarks.peers.table import LONGEST_S, SHORTEST_S, STEPS, make_table, run_trial
from benchmarks.peers.tools import KILLED, WHOLE
from tests.conftest import examples


def test_the_table_has_60_points_that_depend_on_the_seed_alone() -> None:
    first, other = make_table(0), make_table(1)
    make_table.cache_clear()
    assert make_table(0) == first != other
    assert len(first) == 60
    assert all(len(point.scores) == STEPS and 100 <= point.scores[-1] <= 1000 for point in first.values())


def test_durations_are_uneven_and_within_their_limits() -> None:
    durations_s = [point.duration_s for seed in range(20) for point in make_table(seed).values()]
    assert min(durations_s) >= SHORTEST_S and max(durations_s) <= LONGEST_S
    assert statistics.median(durations_s) == pytest.approx(0.8, rel=0.1)
    assert max(durations_s) > 3 and sum(duration_s > 2 for duration_s in durations_s) > 0.1 * len(durations_s)


def test_a_trial_records_its_start_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records, scores, slept_s = tmp_path / "records", list[float](), list[float]()
    monkeypatch.setenv(table.SEED, "0")
    monkeypatch.setenv(table.RECORDS, str(records))
    monkeypatch.setattr(table.time, "sleep", slept_s.append)
    point = make_table(0)[3, 2]
    assert run_trial(3, 2, scores.append) == point.scores[-1]
    assert tuple(scores) == point.scores
    assert sum(slept_s) == pytest.approx(point.duration_s)
    (trial,) = read_trials(records)
    assert trial.point == (3, 2) and trial.finished and trial.start_s <= trial.last_s


def test_a_trial_that_was_stopped_ends_with_its_last_step(tmp_path: Path) -> None:
    events = [("start", 10.0), ("step", 10.5), ("step", 11.0)]
    lines = [json.dumps({"trial": "1", "a": 0, "b": 5, "event": event, "at_s": at_s}) for event, at_s in events]
    (tmp_path / "records").write_text("\n".join(lines) + '\n{"trial": "2", "a"')
    assert read_trials(tmp_path / "records") == [Trial((0, 5), 10.0, 11.0, finished=False)]


def test_the_idle_share_is_the_time_without_a_trial() -> None:
    # Two workers over 4 s: one is busy throughout, the other for 1 s.
    trials = [Trial((0, 0), 0.0, 4.0, True), Trial((0, 1), 1.0, 2.0, True)]
    assert idle_share(trials, workers=2) == pytest.approx(3 / 8)
    assert idle_share(trials[:1], workers=1) == 0


def test_the_parts_of_the_idle_share_are_its_sum() -> None:
    # Two workers over 6 s: the second starts 1 s late, waits 0.5 s between trials, and ends 1 s before the first.
    trials = [
        Trial((0, 0), 0, 4, True),
        Trial((0, 1), 1, 3, True),
        Trial((0, 3), 3.5, 5, True),
        Trial((0, 2), 4, 6, True),
    ]
    assert idle_parts(trials, workers=2) == pytest.approx((1 / 12, 0.5 / 12, 1 / 12))
    assert sum(idle_parts(trials, workers=2)) == pytest.approx(idle_share(trials, workers=2))


def test_lost_are_finished_trials_that_run_again_or_have_no_result() -> None:
    space = [(0, place) for place in range(5)]
    before = [Trial((0, 0), 0, 1, True), Trial((0, 1), 0, 2, True), Trial((0, 2), 0, 3, True)]
    running = Trial((0, 3), 2, 5, False)  # interrupted by the kill at 4: no loss if it runs again
    ended_later = Trial((0, 4), 3, 4.5, True)  # its worker outlived the driver for a moment
    after = [Trial((0, 1), 6, 7, True), Trial((0, 3), 6, 8, True)]
    loss = count_loss([*before, running, ended_later, *after], 4, [(0, 0), (0, 1), (0, 3)], space)
    assert (loss.finished, loss.repeated, loss.missing) == (3, 1, 1)
    assert (loss.absent, loss.started_again) == (2, 2)


def test_lines_are_counted_without_comments_and_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# @package _global_\n\n# a comment\nspace: {}  # read\n")
    (tmp_path / "b.py").write_text("import os\n\n    # indented\n")
    assert count_lines([tmp_path / "a.yaml", tmp_path / "b.py"]) == 3  # Hydra reads the first line


def test_figures_are_medians_with_their_range() -> None:
    assert describe([3.0, 1.0, 2.0]) == "2.0 (1.0 to 3.0)"
    assert describe([2.01, 2.0]) == "2.0"


@pytest.mark.parametrize("tool", {tool.name: tool for tool in (*WHOLE, *KILLED)}.values(), ids=lambda tool: tool.name)
def test_the_files_of_a_tool_have_the_whole_space(tool: object) -> None:
    assert isinstance(tool, type(WHOLE[0]))
    text = "".join(path.read_text() for path in tool.paths)
    assert ("range(10)" in text and "range(6)" in text) or "0,1,2,3,4,5,6,7,8,9" in text


def test_batches_wait_for_their_longest_trial_and_a_queue_does_not() -> None:
    assert batch_length_s([1, 4, 2, 2, 3], workers=2) == 4 + 2 + 3
    assert queue_length_s([1, 4, 2, 2, 3], workers=2) == 7  # one worker: 1, 2, 2; the other: 4, 3
    assert queue_length_s([2.0] * 8, workers=4) == batch_length_s([2.0] * 8, workers=4) == 4


@examples(50)
@given(st.lists(st.floats(0.2, 4), min_size=1, max_size=60), st.integers(1, 8))
def test_a_queue_is_never_slower_than_batches(durations_s: list[float], workers: int) -> None:
    shortest_s = max(sum(durations_s) / workers, max(durations_s))
    queue_s = queue_length_s(durations_s, workers)
    assert shortest_s <= queue_s * (1 + 1e-9) and queue_s <= batch_length_s(durations_s, workers) * (1 + 1e-9)
