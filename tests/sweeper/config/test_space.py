"""The space's grammar, and the laws of its dimensions."""

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st

from sweeper.cli.composition import quote_spaces
from sweeper.config.resolution import CONF, ResolvedConfig, resolve
from sweeper.config.space import Choice, Interval, Range, Space, parse, parse_entry
from sweeper.config.space_checks import read_space
from workloads.api.errors import UserInputError


@given(st.integers(-1000, 1000), st.integers(1, 500), st.integers(1, 70))
def test_a_range_has_the_values_of_pythons_range(first: int, length: int, step: int) -> None:
    end = first + length
    read = parse_entry("x", f"range({first}, {end}, {step})")
    expected = list(range(first, end, step))
    if len(expected) == 1:
        assert read == first
    else:
        assert isinstance(read, Range)
        assert list(read.points()) == expected
        assert len(read) == len(expected)
        assert all((value in read) == (value in expected) for value in range(first - step, end + step))


@given(st.integers(-1000, 1000), st.integers(2, 500), st.integers(1, 70))
def test_a_range_reads_back_as_it_is_written(low: int, count: int, step: int) -> None:
    dimension = Range(low, low + (count - 1) * step, step)
    assert parse_entry("x", str(dimension)) == dimension


@given(st.lists(st.sampled_from(["bf16", "fp16", 1, 2, 4.5, True]), min_size=2, max_size=5, unique_by=str))
def test_a_choice_reads_back_as_it_is_written(values: list[object]) -> None:
    written = Choice(tuple(values))  # type: ignore[arg-type]
    assert str(parse_entry("x", str(written))) == str(written)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1))
def test_the_size_of_a_space_is_the_number_of_its_points(sizes: dict[str, int]) -> None:
    space = parse({name: f"range(0, {size})" for name, size in sizes.items()}, "cpu")
    points = [tuple(sorted(point.items())) for point in space.points()]
    assert len(points) == len(set(points)) == space.size
    assert all(dict(point) in space for point in points)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("choice(bf16,fp16)", Choice(("bf16", "fp16"))),
        ("bf16,fp16", Choice(("bf16", "fp16"))),
        (["bf16", "fp16"], Choice(("bf16", "fp16"))),
        ("[64, 128]", Choice((64, 128))),
        ("interval(0.5, 2)", Interval(0.5, 2.0)),
        ("tag(log, interval(0.001, 1))", Interval(0.001, 1.0, log=True)),
        ("tag(log, range(1, 1025))", Range(1, 1024, 1, log=True)),
        ("range(0, 1, 0.25)", Range(0, 0.75, 0.25)),
        ("fp32", "fp32"),
        (4096, 4096),
        ([7], 7),
    ],
)
def test_each_form_of_a_dimension_is_parsed(entry: object, expected: object) -> None:
    assert parse_entry("x", entry) == expected


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("range(10, 5)", "empty"),
        ("range(1, 5, 0)", "step"),
        ("interval(2, 1)", "empty"),
        ("tag(log, interval(0, 1))", "above 0"),
        ("choice()", "cannot be parsed"),
        ([], "empty"),
        ("range(", "cannot be parsed"),
        ({"cpu": 1, "tpu": 2}, "cpu and gpu"),
        ({"gpu": 1}, "has no value for a cpu"),
    ],
)
def test_an_invalid_entry_is_refused_with_the_reason(entry: object, reason: str) -> None:
    with pytest.raises(UserInputError, match=r"space\.x") as caught:
        parse({"x": entry}, "cpu")
    assert reason in str(caught.value)


def test_a_grid_over_an_interval_is_refused() -> None:
    with pytest.raises(UserInputError, match="no grid"):
        next(Space({"x": Interval(0, 1)}).points())


def test_the_device_decides_between_cpu_and_gpu() -> None:
    entries = {"m": {"cpu": "range(1, 4)", "gpu": 8192}}
    assert parse(entries, "cpu").dimensions == {"m": Range(1, 3, 1)}
    assert parse(entries, "gpu").constants == {"m": 8192}


def composed(*arguments: str) -> ResolvedConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("config", overrides=quote_spaces(list(arguments))))


@pytest.mark.parametrize(
    ("architecture", "left"), [("cpu bf16", ("fp32", "bf16")), ("sm90", ("fp32", "bf16", "fp8_rowwise")), (None, None)]
)
def test_a_choice_excludes_values_that_a_device_does_not_support_and_gives_the_reason(
    architecture: str | None, left: tuple[str, ...] | None
) -> None:
    config = composed("space.dtype=fp32,bf16,fp8_rowwise,mxfp8")
    space, excluded = read_space(config, "cpu", architecture)
    choice = space.dimensions["dtype"]
    assert isinstance(choice, Choice)
    if left is None:  # nothing is known of the device: the worker will say
        assert len(choice.values) == 4 and excluded == []
    else:
        assert choice.values == left
        assert len(excluded) == 4 - len(left)
        assert any("space.dtype=mxfp8 is emulated on this device" in arguments for arguments in excluded)


@pytest.mark.parametrize(
    ("architecture", "backends", "reason"),
    [
        ("gfx942:sramecc+:xnack-", {"torch", "ck", "tunable"}, "space.accumulation=reduced is without effect on ROCm"),
        ("sm90", {"torch"}, "space.backend=tunable is for AMD GPUs only"),
    ],
)
def test_routes_of_one_vendor_are_left_out_on_the_others_gpus(
    architecture: str, backends: set[str], reason: str
) -> None:
    config = composed("space.backend=torch,ck,tunable", "space.accumulation=reduced,fp32", "space.dtype=bf16")
    space, excluded = read_space(config, "gpu", architecture)
    choice = space.dimensions.get("backend", Choice(("torch",)))
    assert isinstance(choice, Choice) and set(choice.values) == backends
    assert any(reason in line for line in excluded)


def test_a_choice_with_one_supported_value_is_not_searched() -> None:
    space, _ = read_space(composed("space.dtype=fp32,fp8_rowwise"), "cpu", "cpu")
    assert space.constants["dtype"] == "fp32" and "dtype" not in space.dimensions
