"""The file of reference figures: what is written is read, and what is broken is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sweeper.commands.history import reference_file
from tests.support.histories import IDENTITY, build_history, recorded_run, run_track
from workloads.api.errors import UserInputError

VALUES = [659.0, 661.5, 658.25]


@pytest.fixture
def content(tmp_path: Path) -> dict:
    reference_file.write(tmp_path / "performance.json", build_history(VALUES))
    return dict(json.loads((tmp_path / "performance.json").read_text()))


def test_a_history_is_read_as_it_was_written(tmp_path: Path, content: dict) -> None:
    path = tmp_path / "performance.json"
    assert reference_file.read(path) == build_history(VALUES)
    assert content["schema"] == 1 and content["series"][0]["runs"][0]["versions"]["torch"] == "2.11.0"
    assert len(path.read_text()) < 450 * len(VALUES) + 400 and [entry.name for entry in tmp_path.iterdir()] == [
        path.name
    ]
    without_interval = reference_file.History().append(
        IDENTITY, reference_file.RecordedRun("a", "2026-01-01T00:00:00Z", 1.0)
    )
    reference_file.write(path, without_interval)
    assert reference_file.read(path) == without_interval and "low" not in path.read_text()


def test_a_level_begins_at_the_last_run_that_starts_one() -> None:
    runs = [recorded_run(0, 1.0), replace(recorded_run(1, 2.0), starts_level=True), recorded_run(2, 2.0)]
    assert reference_file.Series(IDENTITY, tuple(runs)).level == tuple(runs[1:])
    assert reference_file.Series(IDENTITY, tuple(runs[:1])).level == tuple(runs[:1])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", 2, "schema 2: this version of sweeper reads 1"),
        ("schema", None, 'not a history: it must have "schema"'),
        ("series", {}, 'not a history: it must have "schema" and a list of "series"'),
        ("series", [[]], 'series 1: must be an object with a list of "runs"'),
    ],
)
def test_another_schema_is_refused(content: dict, key: str, value: object, message: str, tmp_path: Path) -> None:
    check_refused(tmp_path, {**content, key: value}, message)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("value", "fast", "series 1, run 2: value=fast: must be a number"),
        ("value", 0, "series 1, run 2: value=0.0: must be at least"),
        ("valeu", 1.0, "Did you mean value?"),
        ("low", 700, "series 1, run 2: low=700: must not be above high="),
        ("date", "2026-13-45", "series 1, run 2: date=2026-13-45: must be a date such as 2026-01-31T12:00:00Z"),
        ("versions", [], "series 1, run 2: versions=[]: must be a mapping"),
    ],
)
def test_a_broken_run_is_named(content: dict, key: str, value: object, message: str, tmp_path: Path) -> None:
    content["series"][0]["runs"][1][key] = value
    check_refused(tmp_path, content, message)


def check_refused(folder: Path, content: dict, message: str) -> None:
    path = folder / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(UserInputError) as raised:
        reference_file.read(path)
    text = str(raised.value)
    assert text.startswith(f"file={path}: ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("{", ["list"], "file=performance.json: not valid JSON: Expecting property name"),
        ("\x00\xff", ["list"], "not valid JSON"),
        (
            '{"schema": 1, "series": []}',
            ["plot"],
            "the history is empty: `python -m sweeper history append` adds a run",
        ),
        (None, ["compare"], "no such file. `python -m sweeper history append` creates it"),
        (None, ["list"], "no such file"),
        (None, ["plot", "out=a.pdf"], "out=a.pdf: must end in .html"),
        (None, ["list", "night-1"], "night-1: one word too many. Usage: sweeper history list"),
        (None, ["append", "junit=a.xml"], "does not take it; `sweeper history [compare] [SWEEP…]` does"),
        (None, ["threshold=2"], "threshold=2: must be above 0 and below 1"),
        (None, ["threshold=two"], "threshold=two: must be a number"),
    ],
)
def test_an_invalid_command_is_refused_in_one_line(
    tmp_path: Path, text: str | None, arguments: list[str], message: str
) -> None:
    if text is not None:
        (tmp_path / "performance.json").write_text(text)
    done = run_track(tmp_path, *arguments)
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1 and not done.out
