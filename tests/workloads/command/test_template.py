"""Values in a program's arguments and in its files."""

import json
import subprocess
import tomllib
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from workloads.command.template import fill, render

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=30)


@given(TEXTS)
def test_a_value_stays_one_argument_of_the_shell(value: str) -> None:
    line = fill("printf %s {x} {x}", {"x": value}, shell=True)
    printed = subprocess.run(["/bin/sh", "-c", line], capture_output=True).stdout
    assert printed == 2 * value.encode()


@given(
    st.dictionaries(st.text("abc_.", min_size=1, max_size=4), TEXTS | st.integers(-9, 9) | st.booleans(), min_size=1)
)
def test_a_rendered_file_has_exactly_the_values(contents: dict[str, Any]) -> None:
    template = {"outer": {name: f"{{x{n}}}" for n, name in enumerate(contents)}}
    values = {f"x{n}": value for n, value in enumerate(contents.values())}
    for name, parse in (("a.json", json.loads), ("a.toml", tomllib.loads), ("a.yaml", yaml.safe_load)):
        assert parse(render(name, template, values)) == {"outer": contents}


def test_a_large_whole_number_has_no_decimal_point_on_a_command_line() -> None:
    values = {"x": 1e5, "lr": 1e-4, "scale": 1.0, "large": 1e30, "none": None, "on": True}
    assert fill("{x} {lr} {scale} {large} {none}.{on}", values) == "100000 0.0001 1.0 1e+30 .true"
