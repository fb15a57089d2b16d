"""torchtitan's configuration: its flavors, pipelines, checkpointing, logs and preset."""

from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.support.formats import LLAMA, LOGS, example
from tests.support.planner_estimates import cluster
from workloads.api.contract import Machine, Rank
from workloads.api.errors import UserInputError
from workloads.api.registry import load
from workloads.command.invocation import build_invocation
from workloads.command.layouts import read_job
from workloads.formats import torchtitan
from workloads.formats.files import canonical, read_layout, render


def test_a_model_without_a_flavor_names_the_nearest_one() -> None:
    with pytest.raises(UserInputError, match=r"Nearest: llama3 8B, which differs in layers \(32, not 31\)"):
        render(example("torchtitan", replace(LLAMA, layers=31)), 8)


def test_a_pipeline_of_torchtitan_is_filled_by_one_local_batch() -> None:
    job = example("torchtitan", pp=2, dp_shard=2, micro_batch=2, global_batch=32)
    text = render(job, 8).text
    assert "local_batch_size = 16" in text
    assert "pipeline_parallel_microbatch_size = 2" in text


@pytest.mark.parametrize("pp", [1, 2])
def test_the_preset_of_torchtitan_writes_the_layout_that_is_estimated(pp: int) -> None:
    preset = yaml.safe_load((REPOSITORY / "conf/workload/torchtitan.yaml").read_text())
    command: Any = load("command")
    given_settings = command.Settings(**preset["command"])
    values = preset["space"] | {"tp": 2, "pp": pp, "micro_batch": 2, "global_batch": 32, "checkpointing": "full"}
    text = build_invocation(given_settings, values, Rank(world_size=8, ranks_per_node=8), "o").files["config.toml"]
    estimated = read_job(given_settings, values, Machine("gpu", "sm90", 8, 8, 80.0, cluster=cluster(8)))
    assert f"local_batch_size = {2 if pp == 1 else 16}" in text
    assert read_layout(text, gpus=8).layout == canonical(estimated, "torchtitan").layout


@pytest.mark.parametrize("log", ["titan.log", "titan_rank_prefix.log", "titan_srun_prefix.log", "titan_fp8.log"])
def test_torchtitan_s_log_has_its_layout(log: str) -> None:
    reading = read_layout((LOGS / log).read_text())
    layout = reading.layout
    assert (layout.dp_shard, layout.tp, layout.micro_batch, layout.sharding) == (4, 2, 1, "fsdp2")
    assert (layout.checkpointing, reading.sequence_length, reading.model) == ("full", 4096, LLAMA)
    assert layout.global_batch in (4, 8)
    assert reading.precision == ("fp8_tensorwise" if log == "titan_fp8.log" else "bf16")


def test_gemms_that_per_op_checkpointing_recomputes_are_refused() -> None:
    text = render(example("torchtitan", checkpointing="per_op"), 8).text
    forced = text.replace("[activation_checkpoint]", f"[activation_checkpoint]\n{torchtitan.FORCED} = NAMES")
    assert read_layout(forced.replace("NAMES", '["moe.router.gate"]')).layout.checkpointing == "per_op"
    with pytest.raises(UserInputError, match=r"=attention.wq: no layout has these. Known: moe.router.gate"):
        read_layout(forced.replace("NAMES", '["attention.wq", "moe.router.gate"]'))


def test_what_a_job_has_no_field_for_is_noted() -> None:
    text = render(example("torchtitan"), 8).text.replace("steps = 20", "steps = 20\nenable_cpu_offload = true")
    assert [note.split(":")[0] for note in read_layout(text).notes] == ["training.enable_cpu_offload"]


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ('mode = "none"', 'mode = "memory_budget"', "activation_checkpoint.mode=memory_budget: no layout has it"),
        ('rotate_method = "allgather"', 'rotate_method = "round"', "context_parallel_rotate_method=round: not known"),
    ],
)
def test_an_unknown_value_of_torchtitan_is_refused(line: str, changed: str, message: str) -> None:
    text = render(example("torchtitan"), 8).text
    assert line in text
    with pytest.raises(UserInputError, match=message):
        read_layout(text.replace(line, changed))
