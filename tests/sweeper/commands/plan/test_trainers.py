"""Plans as the trainers run them, and their files."""

from pathlib import Path

import pytest

from sweeper.commands.plan.answer import answer, search
from sweeper.commands.plan.main import COMMAND
from sweeper.commands.plan.request import build_problem, read_request
from tests.support.planner import SMALL
from workloads.api.errors import UserInputError
from workloads.parallel import ParallelParameters


def test_a_file_of_another_trainer_gives_neither_its_exchange_nor_its_state(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    options = "--num-experts 128 --moe-router-topk 8 --expert-model-parallel-size 8 --bf16 --moe-enable-deepep"
    path.write_text(f"python pretrain_gpt.py {options} --micro-batch-size 1 --global-batch-size 64")
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=8", f"layout={path}"]
    assert build_problem(read_request(words)).job.dispatcher == "deepep"
    assert build_problem(read_request([*words, "trainer=own", "sharding=fsdp2"])).job.dispatcher == "allgather"


@pytest.mark.parametrize("text", ["space.tp=null", "space.micro_batch=", "space.tp=-2", "space.tp=1,2"])
def test_a_command_whose_layout_has_no_single_value_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"python -m sweeper workload=parallel gpus=8 {text}\n")
    with pytest.raises(UserInputError, match=f"{text}: a layout needs one value"):
        build_problem(read_request([*SMALL[:3], f"layout={path}"]))


def test_a_layout_is_planned_as_the_trainer_of_its_file_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    settings = ["[model]", 'name = "llama3"', 'flavor = "8B"', "[training]", "local_batch_size = 1"]
    settings += ["[activation_checkpoint]", 'mode = "selective"', 'selective_ac_option = "op"']
    path.write_text("\n".join(settings))
    assert build_problem(read_request([*SMALL[:3], f"layout={path}"])).job.trainer == "torchtitan"
    with pytest.raises(UserInputError, match="checkpointing=per_op: own does not run it"):
        build_problem(read_request([*SMALL[:3], f"layout={path}", "trainer=own"]))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserInputError, match=r"titan\.toml: not a text file"):
        build_problem(read_request([*SMALL[:3], f"layout={path}"]))


@pytest.mark.parametrize("words", [["dp_replicate=8", "dp_shard=1"], ["dp_shard=8"], ["tp=8"], ["tp=8", "state=bf16"]])
def test_this_project_s_trainer_is_estimated_as_its_sweeps_are(words: list[str]) -> None:
    given = ["model=llama3_1b", *SMALL[1:], "pp=1", "checkpointing=none", "reshard_after_forward=true", *words]
    planned = search(build_problem(read_request(given)), keep=1).best[0]
    names = ("dp_replicate", "dp_shard", "tp", "global_batch")
    values = {name: getattr(planned.layout, name) for name in names}
    job = ParallelParameters("llama3_1b", state="bf16" if "state=bf16" in words else "fp32", **values).job
    assert (planned.layout.sharding == "none") == (words == ["tp=8", "state=bf16"])
    assert job.layout == planned.layout


def test_the_fastest_layout_as_a_file_is_read_back_as_the_given_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL[:3], "trainer=torchtitan", "tp=2", "pp=1", "cp=1", "checkpointing=full"]
    assert COMMAND.run([*words, "file=torchtitan"]) == 0
    assert "--job.config_file=sweeps/torchtitan.toml" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["sweeps"]
    written = answer(read_request(words)).best.layout
    read = build_problem(read_request([*SMALL[:3], "trainer=torchtitan", "layout=sweeps/torchtitan.toml"]))
    assert search(read).best[0].layout == written


def test_a_file_for_a_trainer_is_planned_as_that_trainer_runs_it() -> None:
    assert build_problem(read_request([*SMALL, "file=megatron"])).job.trainer == "megatron"
    assert build_problem(read_request([*SMALL, "file=megatron", "trainer=nemo"])).job.trainer == "nemo"
