"""What looks like a secret is kept nowhere."""

from __future__ import annotations

import pytest

from sweeper.provenance import mask, mask_value
from tests.conftest import Place

SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "text",
    [
        f"http://me:{SECRET}@host/x",
        f"command.environment.WANDB_API_KEY={SECRET}",
        f"  HF_TOKEN: {SECRET}",
        f'{{"password": "{SECRET}", "x": 1}}',
        f"--db-password={SECRET} --x 1",
        f"aws_secret_access_key = '{SECRET}'",
    ],
)
def test_a_secret_is_masked(text: str) -> None:
    assert SECRET not in mask(text) and "***" in mask(text)


@pytest.mark.parametrize("text", ["tokens_per_s: 11360", "tokenizer=llama", "--max-tokens=5", "key: m", "monkey=3"])
def test_what_is_none_stays(text: str) -> None:
    assert mask(text) == text


def test_a_value_is_masked_by_its_name() -> None:
    assert mask_value("api_key", "x") == "***" and mask_value("tokens", 3) == 3


def test_neither_the_books_nor_the_terminal_hold_a_secret_that_a_command_was_given(place: Place) -> None:
    script = f"print('token={SECRET}'); raise SystemExit(1)"
    words = ["workload=command", f"command.run=['{{python}}', -c, \"{script}\"]", "budget.trials=1"]
    done = place.run(*words, f"command.environment.SOME_TOKEN={SECRET}")
    assert done.code == 1 and SECRET not in done.out + done.err, done.out + done.err
    for path in place.path.rglob("*"):
        if path.is_file() and "sweeps" not in path.parts[len(place.path.parts) :]:
            assert SECRET.encode() not in path.read_bytes(), path
    assert {oct(path.stat().st_mode)[-3:] for path in place.sweeps} == {"700"}
