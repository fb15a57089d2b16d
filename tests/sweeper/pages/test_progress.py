"""What the live view shows, and how lines of results are broken where the terminal is narrow."""

import json
import shlex
from dataclasses import replace

import pytest

from sweeper.common.trials import Remeasurement, TrialStatus
from sweeper.notebook.display import EventDisplay
from sweeper.pages import terminal
from sweeper.pages.progress import Json, Lines, ProgressState, describe_step, draw_block
from tests.support.factories import trial_record

BEST = trial_record(0, {"lr": 0.1, "tp": 1}, metrics={"tokens_per_s": 1234.0})


def make_state(**fields: object) -> ProgressState:
    """Return the state of a sweep of 24 trials of which four have ended."""
    counts = {TrialStatus.COMPLETE: 4}
    return ProgressState(counts, 24, 1, 0, 71.0, 9.0, BEST, ["tokens_per_s"], **fields)  # type: ignore[arg-type]


def draw(width: int, **fields: object) -> list[str]:
    return [str(line) for line in draw_block(make_state(**fields), width, 25)]


def test_the_bar_follows_the_limit_that_binds_and_the_finals() -> None:
    bar, times, best, *_ = draw(80, limit=(0.75, "time_s 45 of 60"), varying={"lr"})
    assert bar == f"{'█' * 18}{'░' * 6} 4/24 trials: 4 complete; time_s 45 of 60"
    assert times == "1:11 elapsed, about 0:09 left; 1 running, 0 next"
    assert best == "best 1,234 tokens/s at lr=0.1"  # tp does not vary
    assert draw(80, limit=(1.0, ""), finals=(3, 12))[0] == f"{'█' * 6}{'░' * 18} finals: 3/12"


def test_a_resumed_sweep_with_a_smaller_budget_counts_what_it_has() -> None:
    above = replace(make_state(), trials=3, limit=(4 / 3, ""))
    assert above.describe_counts() == "4 trials, above the budget of 3: 4 complete"
    assert str(draw_block(above, 80, 25)[0]).startswith(f"{'█' * 24} 4 trials, above")
    assert replace(above, trials=4).describe_counts() == "4/4 trials: 4 complete"


def test_another_process_shows_the_lines_and_the_block_of_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Json() as display:
        display.update(make_state(), BEST, is_best=True)
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["trial", "progress"]
    assert events[1]["block"] == draw(100)
    for event in events:
        EventDisplay().event(event)
        EventDisplay(has_progress=False).event(event)
    shown = capfd.readouterr().err
    Lines().update(make_state(), BEST, is_best=True)
    assert capfd.readouterr().err == shown and "new best 1,234 tokens/s" in shown


def test_a_step_shows_the_rate_and_its_shares_before_what_the_trainer_prints_itself() -> None:
    step = {"loss": 2.31, "peak_device_gib": 10.2, "mfu": 0.451, "tokens_per_s": 1234.0, "own": 3.0}
    assert describe_step(8, step) == "step 8, 1,234 tokens/s, MFU 45.1 %, 10.2 GiB, loss 2.31, own 3"


def test_a_failed_round_of_the_finals_names_the_trial_of_the_search() -> None:
    failed = replace(BEST, number=28, reason="boom", status=TrialStatus.FAILED, remeasurement=Remeasurement(6, 2, (6,)))
    assert make_state().describe_failure(failed).startswith("trial 28 (round 2 of trial 6) failed: boom (")


def test_workers_that_do_not_fit_are_counted() -> None:
    workers = [f"worker {n} on vm: trial {n}\n  step 8, 1,234 tokens/s" for n in range(16)]
    lines = draw(80, describe_workers=lambda limit: workers[:limit], gangs=16)
    shown = [line for line in lines if line.startswith("worker")]
    assert 0 < len(shown) < 16 and lines[-1] == f"… and {16 - len(shown)} more workers" and len(lines) <= 25


@pytest.mark.parametrize("width", [60, 80])
def test_lines_are_broken_between_words_and_commands_as_a_shell_takes_them(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["python", "-m", "sweeper", "command.run=python train.py --lr={lr}", *(f"space.m{n}=1,2" for n in range(9))]
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    command = terminal.wrap_line(f"extend   {shlex.join(words)}", width)
    assert len(command.splitlines()) > 2 and max(map(len, command.splitlines())) <= width
    assert shlex.split(command.replace("\\\n", "")) == ["extend", *words]
    text = terminal.wrap_line(f"fixed    {' '.join(f'name{n}=value' for n in range(20))}", width)
    assert max(map(len, text.splitlines())) <= width and text.split() == [
        "fixed",
        *(f"name{n}=value" for n in range(20)),
    ]
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: False, raising=False)
    assert terminal.wrap_line(f"extend   {shlex.join(words)}", width) == f"extend   {shlex.join(words)}"
