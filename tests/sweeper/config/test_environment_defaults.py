"""Environment variables that a device's YAML sets by default, and what comes before them."""

from dataclasses import replace

import pytest

from sweeper.config.catalogue import catalogue
from sweeper.config.device_values import apply_defaults, default_names, read_defaults
from sweeper.config.hardware import Node, Target
from sweeper.config.schema import Hardware
from sweeper.config.space import Choice, Space
from sweeper.preflight.devices import planned_target
from workloads.api.errors import UserInputError

MI300X = catalogue()["mi300x"]


def make_target(*environments: dict[str, str]) -> Target:
    nodes = [
        Node(f"10.0.0.{number}", cpus=8, cpu_name="EPYC", gpus=8, environment=tuple(environment.items()))
        for number, environment in enumerate(environments)
    ]
    return Target(MI300X, "MI300X", tuple(nodes))


@pytest.mark.parametrize("hardware", catalogue().values(), ids=lambda hardware: hardware.name)
def test_each_default_of_the_catalogue_has_a_reason_and_a_source(hardware: Hardware) -> None:
    defaults = read_defaults(hardware)
    assert bool(defaults) == (hardware.architecture or "").startswith("gfx")  # nothing is set on NVIDIA's GPUs
    for default in defaults.values():
        assert default.value and default.reason and default.source and "\n" not in default.reason


def test_the_space_comes_before_the_nodes_and_the_nodes_before_the_device() -> None:
    space = Space({"env.RCCL_MSCCL_ENABLE": Choice((0, 1))}, {"env.NCCL_ALGO": "Ring", "x": 1})
    nodes = {"TORCH_NCCL_HIGH_PRIORITY": "0", "RCCL_MSCCL_ENABLE": "1", "NCCL_ALGO": "Tree"}
    applied, sources = apply_defaults(space, make_target(nodes, nodes))
    assert applied.dimensions == space.dimensions
    assert applied.constants == {
        "env.NCCL_ALGO": "Ring",
        "env.TORCH_NCCL_HIGH_PRIORITY": "0",
        "env.HIP_FORCE_DEV_KERNARG": "1",
        "x": 1,
    }
    assert sources == {
        "env.NCCL_ALGO": "space.env",
        "env.TORCH_NCCL_HIGH_PRIORITY": "the nodes' environment",
        "env.HIP_FORCE_DEV_KERNARG": "default of mi300x",
    }


def test_a_default_is_left_out_with_null_in_the_space() -> None:
    applied, _ = apply_defaults(Space({}, {"env.RCCL_MSCCL_ENABLE": None}), planned_target(MI300X, 8))
    assert applied.constants["env.RCCL_MSCCL_ENABLE"] is None


def test_nodes_that_differ_in_a_variable_are_refused_until_the_space_sets_it() -> None:
    target = make_target({"RCCL_MSCCL_ENABLE": "1"}, {})
    with pytest.raises(UserInputError) as caught:
        apply_defaults(Space(), target)
    reason = "the nodes differ (1 on 10.0.0.0, 0 on 10.0.0.1); set space.env.RCCL_MSCCL_ENABLE=0"
    assert str(caught.value) == f"space.env.RCCL_MSCCL_ENABLE: {reason}"
    assert apply_defaults(Space({}, {"env.RCCL_MSCCL_ENABLE": 1}), target)[0].constants["env.RCCL_MSCCL_ENABLE"] == 1
    same = make_target({"RCCL_MSCCL_ENABLE": "0"}, {})  # one has what the others get
    assert apply_defaults(Space(), same)[0].constants["env.RCCL_MSCCL_ENABLE"] == "0"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (1, "needs value, reason and source; for a value alone: space.env.NCCL_ALGO="),
        ({"value": "Ring", "reason": "faster"}, "hardware.environment.NCCL_ALGO.source: required"),
        ({"value": "$ALGO", "reason": "faster", "source": "a paper"}, "values are taken literally"),
    ],
)
def test_a_default_without_a_source_is_refused(entry: object, reason: str) -> None:
    with pytest.raises(UserInputError, match=r"NCCL_ALGO") as caught:
        read_defaults(replace(MI300X, environment={"NCCL_ALGO": entry}))
    assert reason in str(caught.value)


def test_the_variables_to_read_of_the_nodes_are_those_with_a_default() -> None:
    own = Hardware(name="own", environment={"NCCL_ALGO": {"value": "Ring", "reason": "r", "source": "s"}})
    assert default_names(own) == {"NCCL_ALGO", *MI300X.environment}
