"""Flags and overrides as the command line gives them."""

import pytest
from hydra._internal.utils import get_args_parser

from sweeper.cli.arguments import FLAGS, parse_arguments
from sweeper.cli.composition import compose_sweeps, quote_spaces
from sweeper.commands.report.main import COMMAND as REPORT
from workloads.api.errors import UserInputError


def test_flags_and_overrides_may_stand_in_any_order() -> None:
    arguments = parse_arguments(["seed=1", "-m", "budget.trials=2", "--config-dir", "mine", "~budget.time_s"])
    assert arguments.overrides == ("seed=1", "budget.trials=2", "~budget.time_s")
    assert arguments.format_flags() == ["--multirun", "--config-dir=mine"]


def test_the_flags_are_hydras() -> None:
    """A newer Hydra may have others: each is taken over, or left out for a reason."""
    hydras = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for names, _, _ in FLAGS for name in names}
    left_out = {"--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun"}
    assert ours == hydras - left_out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--hel", ["--hel: unknown flag", "Did you mean --help?"]),
        ("--budget.trials=5", ["--budget.trials=5", "no dashes: budget.trials=5"]),
        ("--dir x", ["--dir: unknown flag", "no dashes: dir=x"]),
        ("--store sqlite:///x.db", ["no dashes: tracking.uri=sqlite:///x.db"]),
        ("--insecure", ["no dashes: cluster.insecure=true"]),
        ("--plan", ["no dashes: plan=true"]),
        ("--compare a b", ["Did you mean sweeper report compare a b?"]),
        ("plna model=x", ["plna: unknown subcommand", "Available: plan, report", "Did you mean sweeper plan?"]),
        ("track", ["Did you mean sweeper history?"]),
        ("seed=1 report", ["report: a subcommand is the first word: sweeper report"]),
        ("--experimental-rerun x", ["unknown flag", "--config-dir"]),
        ("-m --cfg job seed=1,2", ["--cfg", "one configuration", "leave -m out"]),
        ("-m --info", ["--info", "leave -m out"]),
        ("--info --cfg job", ["--cfg and --info", "cannot be combined"]),
        ("--resolve", ["--resolve", "--cfg"]),
        ("-p search", ["--package", "--cfg"]),
    ],
)
def test_a_wrong_flag_is_refused_with_the_reason(words: str, parts: list[str]) -> None:
    with pytest.raises(UserInputError) as caught:
        parse_arguments(words.split())
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(("verb", "successor"), [("baseline", "report compare"), ("leaderboard", "report")])
def test_a_removed_verb_names_its_successor(verb: str, successor: str) -> None:
    with pytest.raises(UserInputError, match=rf"{verb}: unknown word. Did you mean sweeper {successor}\?$"):
        REPORT.run([verb, "a"])


@pytest.mark.parametrize("words", ["-p plan=true", "--config-dir workload=matmul", "-cd +space.x=1", "--cfg plan=true"])
def test_a_flag_takes_no_override_for_its_value(words: str) -> None:
    with pytest.raises(UserInputError, match="the flag has no value"):
        parse_arguments(words.split())


def test_a_value_with_an_equals_sign_is_taken_after_one_and_as_a_path() -> None:
    assert parse_arguments(["--config-dir=lr=3"]).config_dir == "lr=3"
    assert parse_arguments(["--config-dir", "./lr=3"]).config_dir == "./lr=3"


@pytest.mark.parametrize("word", ["--cfg", "--cfg nonsense", "--info nonsense"])
def test_a_flag_with_a_wrong_value_is_one_line(word: str) -> None:
    with pytest.raises(UserInputError) as caught:
        parse_arguments(word.split())
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "sent"),
    [
        ("~budget.time_s", "++budget.time_s=null"),  # Hydra takes a key that is null for a missing one
        ("~cluster.drain_below", "~cluster.drain_below"),
        ("~space.seed", "~space.seed"),
        ("hardware.memory_gib=80", "++hardware.memory_gib=80"),
        ("seed=1", "seed=1"),
    ],
)
def test_deletions_and_additions_are_sent_as_hydra_takes_them(override: str, sent: str) -> None:
    assert quote_spaces([override]) == [sent]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("budget", "neither key=value"),
        ("=5", "must be group=choice"),
        ("budget.trials: 5", "must be key=value"),
        ("budget .trials=5", "must be key=value"),
        ("budget.trials='5", "a quote ' is not closed"),
        ("space.m=[1,2", "a bracket [] is not closed"),
        ("space.m=choice(1,2", "a bracket () is not closed"),
        ("space.m=1)", "a bracket () is not opened"),
        ("space.m=choice()", "Allowed: range(first, end, step)"),
        ("space.m=range(a,b)", "Allowed: range(first, end, step)"),
        ("seed=5=6", "needs quotes: 'seed=\"5=6\"'"),
    ],
)
def test_an_override_that_cannot_be_parsed_is_refused_with_the_reason(override: str, reason: str) -> None:
    with pytest.raises(UserInputError) as caught:
        compose_sweeps(parse_arguments([override]))
    assert str(caught.value).startswith(f"{override}: ") and reason in str(caught.value)
