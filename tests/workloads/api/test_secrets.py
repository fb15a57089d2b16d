"""Secrets are masked and refused; `test_failed_trials.py` shows that a sweep stores none."""

from collections.abc import Callable

import pytest

from tests.conftest import CommandResult
from workloads.api.secrets import is_secret, mask, masked, masked_arguments, secret_values

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
        f"--api-key={SECRET}",
        f"--hf-token {SECRET} --x 1",
        f"PGPASSWORD={SECRET} psql",
        f"passphrase: {SECRET}",
    ],
)
def test_a_secret_is_masked(text: str) -> None:
    assert SECRET not in mask(text) and "***" in mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens_per_s: 11360",
        "flops_per_token=48e9",
        "tokenizer=llama",
        "--max-tokens=5",
        "key: m",
        "monkey=3",
        "the token expired",
        "--token --x",
    ],
)
def test_other_text_is_not_masked(text: str) -> None:
    assert mask(text) == text


@pytest.mark.timeout(20)
@pytest.mark.parametrize("word", ["a", "a-", "x_", "a:/", "http://"])
def test_masking_long_lines_is_fast(word: str) -> None:
    assert len(mask(2**19 * word)) > 0


def test_values_of_secret_names_are_masked() -> None:
    assert is_secret("command.environment.HF_TOKEN") and not is_secret("tokens")
    arguments = ["x", "--token", SECRET, f"--api-key={SECRET}"]
    plain = {"environment": {"MY_TOKEN": f"a, {SECRET}\n]{SECRET}"}, "run": arguments}
    assert SECRET not in str(masked(plain)) and masked({"x": [1, None, True]}) == {"x": [1, None, True]}
    arguments = ["a=1", f"++command.environment.HF_TOKEN={SECRET} {SECRET}", f"x.password=[{SECRET},{SECRET}]"]
    assert masked_arguments(arguments) == ["a=1", "++command.environment.HF_TOKEN=***", "x.password=***"]


def test_a_parameter_that_looks_like_a_secret_is_refused(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=command", "command.run=[x,'{hf_token}']", f"space.hf_token=choice({SECRET},b)")
    assert result.code == 2 and "looks like a secret" in result.err and SECRET not in result.err


def test_values_of_variables_that_are_keys_are_secret_and_short_ones_are_not() -> None:
    variables = {"SIGNING_KEY": SECRET, "HF_TOKEN": f"{SECRET}2", "MONKEY": "banana-boat", "MY_KEY": "x"}
    assert secret_values([], variables) == {SECRET, f"{SECRET}2"}
