"""Environment variables as parameters: their names, their values, and how they are written."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from sweeper.cli.composition import quote_spaces
from sweeper.config import environment
from sweeper.config.resolution import CONF, ResolvedConfig, resolve
from sweeper.config.space import Choice, Range, Space, parse
from sweeper.config.space_checks import read_initial_points, read_space
from workloads.api.errors import UserInputError

NAMES = st.from_regex(r"[A-Z][A-Z0-9_]{3,20}", fullmatch=True).filter(lambda name: not is_refused(name))
TEXTS = st.text("abcXYZ019:=_.,;-+ /()[]", min_size=1, max_size=20).map(str.strip).filter(bool)


def is_refused(name: str) -> bool:
    try:
        environment.check_name(name)
    except UserInputError:
        return True
    return False


def composed(*arguments: str) -> ResolvedConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("config", overrides=["workload=probe", *quote_spaces(list(arguments))]))


def read(*arguments: str) -> Space:
    return read_space(composed(*arguments), "cpu", None)[0]


@given(NAMES, st.lists(TEXTS, min_size=2, max_size=4, unique=True))
def test_quoted_texts_reach_the_process_as_they_are_written(name: str, texts: list[str]) -> None:
    choice = ",".join(f"'{text}'" for text in texts)
    space = parse({"env": {name: f"choice({choice})"}}, "cpu")
    dimension = space.dimensions[f"env.{name}"]
    assert isinstance(dimension, Choice)
    values = [environment.process_values({f"env.{name}": value}) for value in dimension.values]
    assert values == [{name: text} for text in texts]


@given(st.dictionaries(NAMES, st.one_of(st.integers(), st.none(), TEXTS), min_size=1), st.integers(1, 9))
def test_variables_are_told_from_the_workloads_parameters(variables: dict[str, Any], x: int) -> None:
    flat = environment.flatten({"x": x, "env": variables})
    assert environment.without_variables(flat) == {"x": x}
    assert environment.only_variables(flat) == {f"env.{name}": value for name, value in variables.items()}
    assert environment.flatten(flat) == flat
    expected = {name: None if value is None else str(value) for name, value in variables.items()}
    assert environment.process_values(flat) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("space.env.GPU_MAX_HW_QUEUES=choice(2,4,8)", Choice((2, 4, 8))),
        ("space.env.GPU_MAX_HW_QUEUES=2,4", Choice((2, 4))),
        ("space.env.NCCL_MIN_NCHANNELS=[null,8,16]", Choice((None, 8, 16))),
        ("space.env.NCCL_MIN_NCHANNELS=range(8,33,8)", Range(8, 32, 8)),
        ("space.env.NCCL_ALGO={cpu: 'choice(Ring,Tree)', gpu: Ring}", Choice(("Ring", "Tree"))),
        ("space.env={NCCL_ALGO: 'choice(Ring,Tree)'}", Choice(("Ring", "Tree"))),
        ("space.env.PYTORCH_ALLOC_CONF=choice('a:1,b:2',a:1)", Choice(("a:1,b:2", "a:1"))),
        ("space.env.PYTORCH_ALLOC_CONF='a:1,b:2'", "a:1,b:2"),
        ("space.env.PYTORCH_ALLOC_CONF=expandable_segments:True", "expandable_segments:True"),
        ("space.env.NCCL_DEBUG=WARN", "WARN"),
        ("space.env.HSA_XNACK='true'", "true"),
        ("space.env.HSA_XNACK=null", None),
    ],
)
def test_a_variable_has_each_form_of_a_parameter(override: str, expected: object) -> None:
    space = read(override)
    name = "env." + override.removeprefix("space.env").lstrip(".={").partition("=")[0].partition(":")[0]
    assert {**space.constants, **space.dimensions}[name] == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("space.env.lower-case!=1", "capital letters, digits and _, and no digit first. Did you mean LOWER_CASE?"),
        ("space.env.omp_num_threads=1", "Did you mean OMP_NUM_THREADS?"),
        ("space.env.WANDB_API_KEY=1", "looks like a secret"),
        ("space.env.CUDA_VISIBLE_DEVICES=0", "which GPUs a worker sees"),
        ("space.env.ROCR_VISIBLE_DEVICES=0", "which GPUs a worker sees"),
        ("space.env.RAY_memory=0", "capital letters"),
        ("space.env.RAY_TMPDIR=0", "configures Ray"),
        ("space.env.LD_PRELOAD=libtcmalloc.so", "how programs and libraries are loaded"),
        ("space.env.PYTHONPATH=here", "how programs and libraries are loaded"),
        ("space.env.MASTER_PORT=1", "set for each rank"),
        ("space.env.NCCL_DEBUG=$DEBUG", "$ and control characters are not allowed"),
        ("space.env.NCCL_NET=http://me:secret@host", "a value looks like a secret"),
        ("space.env.HSA_XNACK=true", "put true or false in quotes"),
    ],
)
def test_a_variable_that_cannot_be_a_parameter_is_refused_in_a_line(override: str, reason: str) -> None:
    with pytest.raises(UserInputError) as caught:
        read(override)
    message = str(caught.value)
    assert reason in message and message.startswith("space.env.") and "\n" not in message


def test_a_value_with_a_secret_is_not_repeated_in_the_message() -> None:
    with pytest.raises(UserInputError) as caught:
        read("space.env.NCCL_NET=http://me:hunter22@host")
    assert "hunter22" not in str(caught.value)


def test_a_variable_that_the_command_sets_too_is_refused() -> None:
    arguments = ["workload=command", "command.run=[echo]", "command.environment.NCCL_ALGO=Ring"]
    with pytest.raises(UserInputError, match=r"command\.environment\.NCCL_ALGO sets it too"):
        read(*arguments, "space.env.NCCL_ALGO=Tree")


def test_a_grid_changes_the_environment_last() -> None:
    points = list(read("space.x=1,2", "space.y=0", "space.env.NCCL_ALGO=Ring,Tree").points())
    assert [point["env.NCCL_ALGO"] for point in points] == ["Ring", "Ring", "Tree", "Tree"]


def test_an_initial_point_may_have_variables() -> None:
    config = composed("space.env.A=1,2", "space.y=0", "search.initial_points=[{x: 1.5, env: {A: 2}}, {env.A: 1}]")
    space = read_space(config, "cpu", None)[0]
    assert read_initial_points(config, space, "cpu", strict=True) == [{"x": 1.5, "env.A": 2}, {"env.A": 1}]
