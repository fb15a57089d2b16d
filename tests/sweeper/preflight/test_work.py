"""The identity of work: which results may be ranked together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sweeper.config.space import parse
from sweeper.preflight.work import WorkIdentifier
from workloads.api import registry
from workloads.api.contract import Measurement, Workload
from workloads.command import Command, CommandSettings

MATMUL = {"m": "range(128, 513, 64)", "n": 256, "k": 256, "dtype": "fp32"}


def identify(workload: Workload, space: Mapping[str, Any], **point: Any) -> dict[str, str]:
    return WorkIdentifier(workload, parse(space, "cpu")).identify(point)


def command(**settings: Any) -> Workload:
    return Command().with_settings(CommandSettings(**{"run": ["train", "--tp={tp}"], **settings}))


@pytest.mark.parametrize("name", [name for name in registry.names() if name != "command"])
def test_a_workload_declares_its_own_parameters_as_work_or_as_ways(name: str) -> None:
    workload = registry.load(name)
    parameters = set(workload.Parameters.__dataclass_fields__)
    assert set(workload.work) <= parameters and set(workload.ways) <= parameters
    assert not set(workload.work) & set(workload.ways)


def test_a_parameter_that_a_version_adds_leaves_earlier_results_comparable() -> None:
    offload, space = registry.load("offload"), {"device_gib": 24.0, "host_gib": 70.0}
    usual = identify(offload, space)
    assert not {"rounding", "imbalance", "optimizer_states"} & set(usual)
    assert identify(offload, {**space, "rounding": "stochastic"}) == {**usual, "rounding": "stochastic"}


def test_environment_variables_are_recorded_and_are_not_part_of_the_work() -> None:
    matmul = registry.load("matmul")
    space = {**MATMUL, "env": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "choice(1, 2)"}}
    identifier = WorkIdentifier(matmul, parse(space, "cpu"))
    point = {"m": 128, "env.OMP_NUM_THREADS": 2}
    assert identifier.identify(point) == identify(matmul, MATMUL, m=128)
    fixed = identifier.fixed_parameters(point)
    assert fixed["env.NCCL_DEBUG"] == "WARN" and "env.OMP_NUM_THREADS" not in fixed


def test_files_with_different_content_at_one_path_are_different_work(tmp_path: Path) -> None:
    file, works = tmp_path / "text.txt", []
    for text in ("one", "another", "one"):
        file.write_text(text)
        works.append(identify(registry.load("parallel"), {"data": str(file)})["data"])
    assert works[0] == works[2] == f"{file} sha256:7692c3ad3540" != works[1]


def test_a_constant_belongs_to_the_work_and_a_searched_shape_does_not() -> None:
    matmul = registry.load("matmul")
    first, other = (identify(matmul, MATMUL, m=m) for m in (128, 512))
    assert first == other and first["m"] == "searched" and first["n"] == "256"
    assert identify(matmul, {**MATMUL, "k": 512}, m=128) != first
    assert identify(matmul, {**MATMUL, "m": 128}) != first


def test_data_types_and_recipes_differ_within_one_search() -> None:
    space = {**MATMUL, "m": 128, "dtype": "choice(fp8_tensorwise, fp8_rowwise, fp8_blockwise)"}
    works = [identify(registry.load("matmul"), space, dtype=name) for name in ("fp8_tensorwise", "fp8_rowwise")]
    assert works[0] != works[1]
    precision = registry.load("precision_linear")
    recipes = [identify(precision, {"recipe": "choice(bf16, fp8_rowwise)"}, recipe=r) for r in ("bf16", "fp8_rowwise")]
    assert recipes[0] != recipes[1]


@pytest.mark.parametrize("way", [{"repeats": 9}, {"backend": "triton"}, {"layout": "nn"}, {"seed": 1}])
def test_ways_of_the_same_work_are_comparable_fixed_or_searched(way: dict[str, Any]) -> None:
    matmul = registry.load("matmul")
    assert identify(matmul, {**MATMUL, **way}, m=128) == identify(matmul, MATMUL, m=128)


def test_layouts_of_one_batch_are_the_same_work_and_other_batches_are_not() -> None:
    parallel = registry.load("parallel")
    space = {"model": "llama3_8b", "global_batch": 8, "tp": "choice(1, 2)"}
    assert identify(parallel, space, tp=1) == identify(parallel, space, tp=2)
    assert identify(parallel, {**space, "global_batch": 16}, tp=1) != identify(parallel, space, tp=1)


@pytest.mark.parametrize(("name", "values"), [("state", ("fp32", "bf16")), ("block", ("pytorch", "manual"))])
def test_layouts_of_two_states_or_two_blocks_are_not_ranked_together(name: str, values: tuple[str, ...]) -> None:
    parallel, space = registry.load("parallel"), {"model": "llama3_8b", name: f"choice({', '.join(values)})"}
    first, second = (identify(parallel, space, **{name: value}) for value in values)
    assert first != second


def test_the_benchmark_version_is_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = registry.load("matmul")
    before = identify(matmul, MATMUL, m=128)
    monkeypatch.setattr(type(matmul), "benchmark_version", "burst/99")
    assert identify(matmul, MATMUL, m=128) != before


def test_commands_are_compared_by_the_model_that_they_train() -> None:
    training = {"model": "llama3_8b", "global_batch": "64", "sequence_length": "{length}", "dtype": "bf16"}
    space = {"tp": "choice(1, 2)", "length": 8192}
    base = identify(command(**training), space, tp=1)
    assert base == identify(command(**training), space, tp=2)
    assert base == identify(command(**training, run=["other_trainer", "--tp={tp}"]), space, tp=1)
    assert base != identify(command(**{**training, "model": "llama3_1b"}), space, tp=1)
    assert base != identify(command(**{**training, "global_batch": "32"}), space, tp=1)
    assert base != identify(command(**training), {**space, "length": 4096}, tp=1)
    assert base["sequence_length"] == "8192"


def test_a_command_without_a_model_is_compared_by_its_text() -> None:
    space = {"tp": "choice(1, 2)"}
    base = identify(command(), space, tp=1)
    assert base == identify(command(), space, tp=2)
    assert base != identify(command(run=["train", "--big", "--tp={tp}"]), space, tp=1)


def test_the_fixed_parameters_include_defaults_and_settings_without_secrets() -> None:
    fixed = WorkIdentifier(registry.load("matmul"), parse(MATMUL, "cpu")).fixed_parameters({"m": 128})
    assert fixed["n"] == 256 and fixed["statistic"] == "median_cold" and "m" not in fixed and "model" not in fixed
    secret = command(run=["train", "--token", "abc", "--tp={tp}"])
    text = str(WorkIdentifier(secret, parse({"tp": "choice(1, 2)"}, "cpu")).fixed_parameters({"tp": 1})["command"])
    assert "train" in text and "abc" not in text


def test_a_measurement_adds_its_type_and_its_statistic() -> None:
    identifier = WorkIdentifier(registry.load("parallel"), parse({"tp": "choice(1, 2)"}, "cpu"))
    measurement = Measurement({}, (1.0,), statistic="mean", matrix_dtype="fp8")
    identity = identifier.identify({"tp": 1}, [measurement])
    assert identity["type"] == "fp8" and identity["statistic"] == "mean"


def test_long_values_are_shortened_and_stay_different() -> None:
    works = [identify(command(run=["train", "x" * 3000 + end, "{tp}"]), {"tp": 1}) for end in ("a", "b")]
    assert works[0] != works[1] and max(map(len, works[0].values())) <= 200
