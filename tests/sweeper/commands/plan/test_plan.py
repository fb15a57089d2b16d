"""`python -m sweeper plan`: its words, its errors and what it answers."""

import json
import re
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sweeper.commands.plan.answer import answer, search, tokens_of_a_day
from sweeper.commands.plan.main import COMMAND, main
from sweeper.commands.plan.request import TOKENS_PER_STEP, build_problem, default_batch, read_request
from sweeper.commands.plan.side_by_side import compare_hardware
from sweeper.commands.plan.text import head_lines, layouts_table, parts_table, tail_lines
from sweeper.common.format import round_to_band
from sweeper.config.catalogue import catalogue
from sweeper.preflight.clusters import build_cluster, list_mismatches
from sweeper.preflight.corrections import Correction, Place, keep
from tests.conftest import run_in_process
from tests.support.planner import flatten
from workloads.api.errors import UserInputError
from workloads.api.registry import load
from workloads.estimator.pipeline import stage_layers
from workloads.estimator.questions import SECONDS_PER_DAY, Reliability, explain_slower
from workloads.estimator.search import bound_gib, find_layouts
from workloads.estimator.step import estimate_job
from workloads.hardware.precisions import PRECISIONS
from workloads.layouts.enumeration import list_families
from workloads.layouts.layout import Job, Layout
from workloads.layouts.trainers import TRAINERS
from workloads.models.hugging_face import load_model
from workloads.parallel import ParallelParameters

SMALL = ["model=llama3_8b", "hardware=h100", "gpus=8", "micro_batch=1", "cp=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=qwen3_30b"], "model=qwen3_30b: unknown model 'qwen3_30b'.* Did you mean qwen3_30b_a3b?"),
        (["hardware=h10"], "hardware=h10: must be one of .*h100"),
        (
            ["topology=dgxh100"],
            "unknown topology 'dgxh100': must be a name or a YAML file. Did you mean dgx_h100. Available: a100",
        ),
        (["trainer=torchtian"], "trainer=torchtian: .* Did you mean trainer=torchtitan?"),
        (["precision=fp8"], "precision=fp8: must be one of .*fp8_tensorwise"),
        (["checkpointing=ful"], "checkpointing=ful: .* Did you mean full?"),
        (["gpus=0"], "gpus=0: must be at least 1"),
        (["tp8"], "tp8: not of the form key=value"),
        (["llama3_8b"], "llama3_8b: not of the form key=value. Did you mean model=llama3_8b?"),
        (["tpp=8"], "tpp: unknown key. Did you mean tp. Available: "),
        (["gpus=1e9"], "gpus=1000000000: must be at most 1048576"),
        (["gpus=8", "tp=2", "tp=4"], "tp: given twice, as tp=2 and tp=4"),
        (["=8"], "=8: not of the form key=value"),
        (["gpus=16", "tp=16"], "tp 16 does not divide 8 key-value heads"),
        (["pp=5"], "pp=5 does not divide gpus=8. Divisors: 1, 2, 4, 8"),
        (["dp_shard=8", "dp_replicate=2"], "dp_replicate=2 x dp_shard=8 = 16 does not divide gpus=8"),
        (["sharding=zero1"], "sharding=zero1: own does not run it. Allowed with this trainer: none, fsdp2"),
        (["trainer=megatron", "checkpointing=selective"], "checkpointing=selective: megatron does not run it"),
        (["trainer=megatron", "pp=2", "sharding=fsdp2"], "pp=2: megatron does not run it with sharding=fsdp2"),
        (["gpus=8K"], "gpus=8K: must be an integer. Write 8e3 or 8192"),
        (["trainer=primus", "pp=2", "schedule=dualpipev"], "schedule=dualpipev: primus does not run it"),
        (["model=llama3_405b"], "gpus=8: no layout fits; the smallest needs up to [0-9]+ GiB of each GPU, [0-9]+ GiB"),
        (["model=llama3_8b", "hardware=rtx4090", "gpus=4"], "no layout fits; .*\\. It fits with state=bf16$"),
        (["model=llama3_70b", "gpus=4", "state=bf16"], "no layout fits; .*. It fits with gpus=8$"),
        (["trainer=deepspeed", "pp=2"], "pp=2: deepspeed is planned without it; it has to be 1"),
        (["hardware=a100", "precision=fp8_tensorwise"], "fp8_tensorwise: a100 has no fp8 units"),
        (["hardware=v100"], "precision=bf16: v100 has no bf16 units or .*\\. It has fp16, fp32$"),
        (["hardware=v100", "precision=fp16"], "Available: bf16, .* with trainer=own$"),
        (["trainer=torchtitan", "precision=fp16"], "precision=fp16: torchtitan does not run it. Allowed .*: bf16, "),
        (["hardware=v100", "trainer=megatron", "precision=fp16", "state=bf16"], "dtype fp16 multiplies fp16 ones"),
        (["layout=no.toml"], "layout=no.toml: No such file"),
        (
            ["model=mpt_7b", "trainer=own"],
            "trainer=own: 'mpt_7b' is not trained here. .* trainer=megatron can plan this model",
        ),
        (
            ["model=deepseek_v3", "file=megatron"],
            "file=megatron: the model's kv_rank=512 cannot be written. Supported: 0",
        ),
        (["trainer=nemo", "file=nemo", "tp_overlap=async"], "file=nemo .*: tp_overlap=async cannot be written"),
        (["trainer=megatron", "file=torchtitan"], "file=torchtitan: the layouts are those of trainer=megatron"),
        (["model=gpt3_175b", "trainer=nemo"], "sequence_length=8192 is above the model's 2048 learned positions"),
        (["trainer=torchtitan", "model=qwen3_8b", "pp=2"], "torchtitan 0.2.2 has no pipeline for models with norms"),
        (["trainer=torchtitan", "tp=8"], "tp and pp compute in fp32 where nothing is sharded"),
        (["file=deepspeed"], "file=deepspeed: must be one of own, torchtitan"),
        (["dispatcher=deepep", "model=qwen3_30b_a3b"], "dispatcher=deepep: own does not run it. .*: allgather"),
        (["expert_overlap=true", "model=qwen3_30b_a3b"], "expert_overlap=true: own does not run it. .*: false"),
        (["expert_imbalance=2"], "expert_imbalance=2.0: llama3_8b has no experts"),
        (["state=int8", "trainer=torchtitan"], "state=int8: torchtitan does not run it. Allowed .*: fp32, amp, bf16"),
        (["pp=2", "last_stage_less_layers=-40"], "leave a stage without layers: 32 layers in 2 stages"),
        (["pp=4", "first_stage_less_layers=-16", "last_stage_less_layers=-16"], "leave a stage without layers"),
        (["trainer=megatron", "pp=4", "first_stage_less_layers=1", "last_stage_less_layers=1"], "as megatron needs"),
        (["pp=1", "last_stage_less_layers=2"], "pp 1 is not a pipeline: .* last_stage_less_layers have to be 0"),
        (
            ["pp=2", "last_stage_less_layers=32"],
            "last_stage_less_layers 32 leave a stage without layers: 32 layers",
        ),
        (["trainer=megatron-lm", "last_stage_less_layers=2"], "last_stage_less_layers=2: megatron-lm does not run it"),
        (["model=kimi_linear_48b"], "kimi_linear_48b is not modelled: layers are linear attention"),
        (["model=no/config.json"], "model=no/config.json: .*cannot be read|No such file"),
    ],
)
def test_invalid_input_is_named_in_a_line(words: list[str], message: str) -> None:
    changed = [word.split("=")[0] for word in words]
    kept = [word for word in SMALL if word.split("=")[0] not in changed]
    with pytest.raises(UserInputError, match=message) as caught:
        answer(read_request([*kept, *words]))
    assert "\n" not in str(caught.value)


def test_each_device_is_planned_or_refused_in_each_precision() -> None:
    """GPUs of one architecture with peaks of the same data types are alike."""
    gpus = [gpu for gpu in catalogue().values() if gpu.bandwidth_tb_s]
    alike = {(gpu.architecture, *gpu.dense_peak_tflops): gpu.name for gpu in gpus}
    size = ["model=llama3_1b", "gpus=8", "dp_shard=8", "micro_batch=1", "sequence_length=1024", "global_batch=8"]
    planned = set()
    for name, precision, trainer in product(alike.values(), PRECISIONS, ("megatron", "megatron-lm", "own")):
        with suppress(UserInputError):
            words = [*size, f"hardware={name}", f"precision={precision}", f"trainer={trainer}"]
            search(build_problem(read_request(words)), keep=1)
            planned.add((name, precision, trainer))
    assert {one for name, one, trainer in planned if (name[:4], trainer) == ("v100", "megatron")} == {
        *("fp16", "fp16_amp", "fp32")
    }
    assert {name for name, precision, trainer in planned if precision == "fp32"} == {*alike.values()}


def test_experts_of_our_trainer_are_planned_with_its_own_exchange() -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=8"]
    jobs = [build_problem(read_request([*words, f"trainer={name}"])).job for name in ("own", "megatron")]
    assert [job.dispatcher for job in jobs] == ["allgather", "alltoall"]


def test_the_way_of_tokens_to_experts_and_their_imbalance_change_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=64", "trainer=megatron", "ep=16", "tp=1", "pp=1", "cp=1"]

    def step_s(*more: str) -> float:
        return search(build_problem(read_request([*words, *more])), keep=1).best[0].estimate.step.total_s

    usual, deepep, uneven = step_s(), step_s("dispatcher=deepep"), step_s("expert_imbalance=1.5")
    assert step_s("dispatcher=deepep", "expert_overlap=true") < deepep < usual < uneven
    assert COMMAND.run([*words, "expert_imbalance=1.5"]) == 0
    printed = capsys.readouterr().out
    assert "experts   dispatcher=alltoall expert_overlap=false expert_imbalance=1.5" in printed
    assert "forced balance is assumed" not in printed
    (share,) = re.findall(
        r"expert_imbalance=1.5 has (0\.\d\d) of the rate of forced balance", " ".join(printed.split())
    )
    assert float(share) < 0.95


def test_imbalance_is_limited_by_the_number_of_ranks_that_divide_experts() -> None:
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=64", "micro_batch=1", "checkpointing=full", "tp=1", "cp=1"]

    def step_s(*more: str) -> float:
        return search(build_problem(read_request([*words, *more])), keep=1).best[0].estimate.step.total_s

    assert step_s("ep=1", "expert_imbalance=4") == step_s("ep=1", "expert_imbalance=1.5") > step_s("ep=1")
    assert step_s("ep=2", "expert_imbalance=1e6") == step_s("ep=2", "expert_imbalance=2") > step_s("ep=2")


def test_a_file_of_another_trainer_gives_neither_its_exchange_nor_its_state(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    options = "--num-experts 128 --moe-router-topk 8 --expert-model-parallel-size 8 --bf16 --moe-enable-deepep"
    path.write_text(f"python pretrain_gpt.py {options} --micro-batch-size 1 --global-batch-size 64")
    words = ["model=qwen3_30b_a3b", "hardware=h100", "gpus=8", f"layout={path}"]
    assert build_problem(read_request(words)).job.dispatcher == "deepep"
    assert build_problem(read_request([*words, "trainer=own", "sharding=fsdp2"])).job.dispatcher == "allgather"


def test_a_plan_has_fewer_layers_beside_a_large_output_layer() -> None:
    words = ["model=deepseek_v3", "hardware=h800", "gpus=2048", "trainer=megatron", "dispatcher=deepep", "tp=1"]
    words += ["pp=16", "ep=64", "dp_shard=128", "cp=1", "sequence_length=4096", "checkpointing=full"]
    words += ["global_batch=15360"]  # DeepSeek-V3's
    problem = build_problem(read_request(words))
    best = search(problem).best[0]
    even = estimate_job(replace(problem.job, layout=replace(best.layout, last_stage_less_layers=0)), problem.cluster)
    sizes = [len(layers) for layers in stage_layers(61, 16, *best.layout.less_layers)]
    assert best.layout.last_stage_less_layers == 3 and sizes == [4] * 15 + [1]
    assert 1.25 < even.step.total_s / best.estimate.step.total_s < 1.3
    first, last = best.estimate.stages[0], best.estimate.stages[-1]
    assert first.activations > even.stages[0].activations and last.parameters < first.parameters
    with pytest.raises(UserInputError, match="61 layers do not divide into 16 stages"):
        search(build_problem(read_request([*words, "last_stage_less_layers=0"])))


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


def test_pages_and_files_that_cannot_be_written_are_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps" / "torchtitan.toml").mkdir(parents=True)
    with pytest.raises(UserInputError, match=r"out=plan.pdf: is an HTML page; give it a name that ends with .html"):
        COMMAND.run([*SMALL, "out=plan.pdf"])
    with pytest.raises(UserInputError, match="hardware=h100,h100: names a GPU twice"):
        COMMAND.run(["model=llama3_8b", "hardware=h100,h100", "gpus=8"])
    with pytest.raises(UserInputError, match=r"out=.*: is a directory"):
        COMMAND.run([*SMALL, f"out={tmp_path}"])
    with pytest.raises(UserInputError, match=r"file=torchtitan: Is a directory"):
        COMMAND.run([*SMALL, "trainer=torchtitan", "tp=1", "pp=1", "file=torchtitan"])


@pytest.mark.parametrize("words", [["dp_replicate=8", "dp_shard=1"], ["dp_shard=8"], ["tp=8"], ["tp=8", "state=bf16"]])
def test_this_project_s_trainer_is_estimated_as_its_sweeps_are(words: list[str]) -> None:
    given = ["model=llama3_1b", *SMALL[1:], "pp=1", "checkpointing=none", "reshard_after_forward=true", *words]
    planned = search(build_problem(read_request(given)), keep=1).best[0]
    names = ("dp_replicate", "dp_shard", "tp", "global_batch")
    values = {name: getattr(planned.layout, name) for name in names}
    job = ParallelParameters("llama3_1b", state="bf16" if "state=bf16" in words else "fp32", **values).job
    assert (planned.layout.sharding == "none") == (words == ["tp=8", "state=bf16"])
    assert job.layout == planned.layout


def test_options_may_stand_between_keys(tmp_path: Path) -> None:
    words = ["model=llama3_8b", f"out={tmp_path}/p.html", "hardware=h100", "gpus=8"]
    ended = run_in_process(main, tmp_path, *words, "pp=1", "tp=1")
    assert ended.code == 0, ended.err
    assert (tmp_path / "p.html").exists()


def test_a_required_key_is_named() -> None:
    with pytest.raises(UserInputError, match="model: required"):
        read_request(["hardware=h100", "gpus=8"])
    with pytest.raises(
        UserInputError, match=r"gpus: required\. Give the number, or tokens_per_day=, days= or max_cost="
    ):
        read_request(["model=llama3_8b", "hardware=h100"])


def test_numbers_may_have_an_exponent() -> None:
    request = read_request([*SMALL, "train_tokens=15T", "tokens_per_day=1e9"])
    assert request.train_tokens == 15e12 and request.tokens_per_day == 1e9
    with pytest.raises(UserInputError, match="network_gb_s=5M: must be a number of GB/s"):
        read_request([*SMALL, "network_gb_s=5M"])


@pytest.mark.parametrize("gpus", [1, 6, 48, 72, 4096])
def test_the_batch_is_a_multiple_of_the_gpus_of_about_four_million_tokens(gpus: int) -> None:
    batch = default_batch(8192, gpus)
    assert (batch % gpus == 0 and batch * 8192 >= TOKENS_PER_STEP > (batch - gpus) * 8192) or batch == gpus


def test_a_given_layout_is_compared_with_the_fastest_one(capsys: pytest.CaptureFixture[str]) -> None:
    given = answer(read_request([*SMALL, "tp=8"]))
    assert {candidate.layout.tp for candidate in given.result.best} == {8}
    assert given.faster is not None
    assert given.faster.estimate.step.total_s < given.best.estimate.step.total_s
    assert "(tensor_parallel)." in explain_slower(given.best.estimate.step, given.faster.estimate.step)

    assert COMMAND.run([*SMALL, "tp=8"]) == 0
    printed = capsys.readouterr().out
    assert "given     cp=1 micro_batch=1 tp=8" in printed
    assert "slower    by" in printed and "Tensor parallel ranks exchange activations in every block" in printed


def test_the_fewest_gpus_for_a_rate_reach_it_and_fewer_do_not() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=8", "tp=1", "cp=1", "pp=1", "micro_batch=1"]
    wanted = 20e9
    found = answer(read_request([*words, f"tokens_per_day={wanted}"]))
    gpus = found.problem.cluster.gpus
    assert tokens_of_a_day(found.best.estimate) >= wanted and gpus > 8
    fewer = search(build_problem(replace(read_request(words), gpus=gpus - 8)), keep=1).best[0]  # a node less
    assert tokens_of_a_day(fewer.estimate) < wanted and max(found.rates) == gpus
    least = answer(read_request([*words[:2], "gpus=37", *words[3:], "tokens_per_day=1e9"]))  # in whole nodes
    assert least.problem.cluster.gpus == 40


def test_every_layout_searched_is_unfit_slower_or_among_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    """The search estimates more layouts than it keeps: those count as slower too."""

    def read_counts(*words: str) -> list[int]:
        assert COMMAND.run([*SMALL, *words]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("searched")]
        return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]

    total, unfit, slower, best = read_counts()
    assert total == unfit + slower + best and best == 20
    total, unfit = read_counts("pp=1", "tp=1", "dp_shard=8", "sharding=fsdp2")
    assert unfit < total < 20  # all that fit are shown


def test_context_parallelism_beyond_measured_runs_is_marked() -> None:
    planned = answer(read_request([*SMALL[:3], "cp=4", "tp=1", "pp=1"]))
    assert "(cp beyond measured runs)" in layouts_table(planned)[1][0][-1]
    assert any("tokens on a context rank" in line for line in tail_lines(planned))


def test_the_fewest_gpus_for_a_rate_keep_a_given_batch(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=llama3_8b", "hardware=h100", "tp=1", "cp=1", "pp=1", "micro_batch=1", "tokens_per_day=20e9"]
    assert COMMAND.run([*words, "global_batch=96"]) == 0
    printed = capsys.readouterr().out
    assert "96 sequences of" in printed and "reached   by 24 GPUs" in printed and "too few are 16 GPUs\n" in printed

    at_least = answer(read_request([*words, "global_batch=96", "gpus=48"]))
    assert at_least.problem.cluster.gpus == 48 and list(at_least.rates) == [48]
    assert "slow end; gpus=48 is the fewest that were tried" in "\n".join(head_lines(at_least))
    with pytest.raises(UserInputError, match=r"96 GPUs reach .*, more GPUs no more; a larger global_batch may help"):
        answer(read_request([*words[:-1], "tokens_per_day=900e9", "global_batch=96"]))


def test_twice_the_memory_lets_layouts_fit_that_did_not() -> None:
    words = ["model=llama3_8b", "hardware=a100_40gb", "gpus=8", "tp=1", "cp=1", "pp=1", "micro_batch=1"]
    small = answer(read_request(words))
    larger = small.alternatives["twice the memory"]
    assert larger.estimate.memory.total_gib > 40 > small.best.estimate.memory.total_gib
    assert larger.estimate.step.total_s < small.best.estimate.step.total_s


def test_stages_of_given_sizes_change_what_their_ranks_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "pp=2", "tp=1", "stages_per_rank=1"]
    even = answer(read_request([*words, "last_stage_less_layers=0"])).best
    given = answer(read_request([*words, "last_stage_less_layers=12"])).best  # 22 and 10 layers
    assert given.estimate.step.total_s > 1.2 * even.estimate.step.total_s
    same = search(
        build_problem(read_request([*words, "first_stage_less_layers=1", "last_stage_less_layers=1"])), keep=1
    )
    assert same.best[0].estimate == even.estimate
    assert COMMAND.run([*words, "last_stage_less_layers=12"]) == 0
    assert "last_stage_less_layers=12" in capsys.readouterr().out


def test_a_whole_training_costs_what_its_gpu_hours_cost() -> None:
    words = [*SMALL, "pp=1", "tp=1", "train_tokens=1e12", "price_per_hour=2"]
    training = answer(read_request(words)).training
    assert training.cost == pytest.approx(2 * training.gpu_hours)
    assert training.gpu_hours == pytest.approx(24 * training.days * 8)
    without = answer(read_request([*words, "failures_per_gpu_day=0"])).training
    assert without.lost_share == 0
    assert without.days == pytest.approx(training.days * (1 - training.lost_share))


def test_training_that_failures_hold_up_is_refused() -> None:
    words = ["model=llama3_8b", "hardware=h100", "gpus=2048", "failures_per_gpu_day=1", "restart_s=3600"]
    with pytest.raises(UserInputError, match=r"2,048 GPUs fail every 42\.2 s, and restart_s=3600: training would not"):
        answer(read_request(words))


@pytest.mark.parametrize(("failures_s", "checkpoint_s"), [(1e6, 20.0), (1e6, 0.0), (3000.0, 20.0), (100.0, 300.0)])
def test_failures_cost_what_a_simulation_of_them_loses(failures_s: float, checkpoint_s: float) -> None:
    """With the checkpoint interval that loses the least of those tried; each segment is run until it succeeds."""
    restart_s, random = 60.0, np.random.default_rng(0)

    def lose(interval_s: float) -> float:
        passed_s, segments = 0.0, max(20, int(200 * failures_s / interval_s))
        for _ in range(min(segments, 4000)):
            left_s = interval_s + checkpoint_s
            while (failure_s := random.exponential(failures_s)) < left_s:
                passed_s, left_s = passed_s + failure_s, interval_s + checkpoint_s + restart_s
            passed_s += left_s
        return 1 - min(segments, 4000) * interval_s / passed_s

    least = min(lose(failures_s * share) for share in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0))
    reliability = Reliability(SECONDS_PER_DAY / failures_s, restart_s, checkpoint_s)
    assert reliability.lost_share(1) == pytest.approx(least, abs=0.02)


def test_a_model_and_a_network_of_ones_own(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    slow = "gpus_per_domain: 4\nwiring: host\nlink_gb_s: 32\nnetwork_gb_s: 3\n"
    (tmp_path / "slow.yaml").write_text(slow)
    own = [f"model={tmp_path / 'config.json'}", *SMALL[1:], "pp=1", "tp=1"]
    named, read = (search(build_problem(read_request(words)), keep=1).best for words in ([SMALL[0], *own[1:]], own))
    assert named == read
    problem = build_problem(read_request([*own, f"topology={tmp_path / 'slow.yaml'}"]))
    assert problem.cluster.topology.gpus_per_domain == 4
    assert search(problem, keep=1).best[0].estimate.step.total_s > read[0].estimate.step.total_s


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


ROUNDED = "1152.3 0.08 1,150|1152.3 0.2 1,200|57.46 0.08 57|7.305 0.08 7.3|401.2 0.08 400|0.0123456 0.08 0.0123"
ROUNDED += "|71.23 0.1 71|-4808.0 0.08 -4,800|22.8 0.59 23|1980.0 0.59 2,000|0.0 0.1 0"


@pytest.mark.parametrize(("value", "error", "text"), [case.split() for case in ROUNDED.split("|")])
def test_figures_have_no_more_digits_than_their_band_allows(value: str, error: str, text: str) -> None:
    assert round_to_band(float(value), float(error)) == text


@pytest.mark.parametrize(
    ("trainer", "measured_name", "workload"), [("own", "parallel", "parallel"), ("torchtitan", "torchtitan", "command")]
)
def test_what_sweeps_measured_on_such_a_cluster_corrects_its_plan_alone(
    trainer: str,
    measured_name: str,
    workload: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "tp=1", "pp=1", f"trainer={trainer}"]
    planned = answer(read_request(words)).best.estimate
    place = Place("h100", measured_name, 8, 8, "nodes of 8", load(workload).benchmark_version)
    keep(tmp_path, Correction(place, 1.25, 7, 1.1, 1.3, "2026-11-20"))
    measured = answer(read_request(words))
    assert measured.best.estimate.step.total_s == pytest.approx(1.25 * planned.step.total_s)
    assert COMMAND.run(words) == 0
    assert f"measured  step times x 1.25, the median of 7 layouts of {measured_name}" in capsys.readouterr().out
    others = (["gpus=16", f"trainer={trainer}"], ["gpus=8", "trainer=nemo"])
    assert all(build_problem(read_request([*SMALL[:2], *other])).correction is None for other in others)


SMALL_SPACES: list[tuple[str, str, str, int, int, dict[str, Any]]] = [
    ("llama3_8b", "own", "h100", 8, 16, {"cp": 1}),
    ("llama3_70b", "torchtitan", "h200", 16, 32, {"cp": 1, "tp": 8}),
    ("llama3_70b", "own", "h100_96gb", 32, 64, {"reshard_after_forward": True, "cp": 1, "micro_batch": 1, "tp": 4}),
    ("qwen3_30b_a3b", "megatron", "h100", 8, 16, {"cp": 1, "tp": 2, "micro_batch": 1}),
    ("llama3_8b", "deepspeed", "a100", 12, 24, {}),
]


@pytest.mark.parametrize(("model", "trainer", "device", "gpus", "batch", "fixed"), SMALL_SPACES)
def test_pruning_keeps_the_layouts_that_an_estimate_of_each_one_puts_first(
    model: str, trainer: str, device: str, gpus: int, batch: int, fixed: dict[str, Any]
) -> None:
    layout = Layout(global_batch=batch)
    template, target = Job(load_model(model), layout, 4096, trainer), build_cluster(device, None, gpus)
    options, fixed = TRAINERS[trainer].search, {**TRAINERS[trainer].fixed_degrees(), **fixed}
    estimates = [
        estimate_job(replace(template, layout=layout), target)
        for layout in flatten(list_families(template, target, options, fixed))
    ]
    sizes = [bound_gib(e.memory, template, target) for e in estimates]
    if model == "qwen3_30b_a3b":  # only estimates fit, no bound does
        assert min(sizes) > target.usable_gib
        sizes = [e.memory.needed_gib for e in estimates]
    fitting = sorted(e.step.total_s for e, size in zip(estimates, sizes, strict=True) if size <= target.usable_gib)
    assert 0 < len(fitting) < len(estimates)
    for kept in (1, 20):
        result = find_layouts(template, target, options, fixed, kept)
        assert [found.estimate.step.total_s for found in result.best] == pytest.approx(fitting[:kept])
        assert result.estimated + result.too_large + result.slower == len(estimates)
        assert result.estimated < len(fitting) or len(fitting) <= kept


FULL = ["model=qwen3_30b_a3b", "hardware=b200", "gpus=64", "dp_shard=64", "micro_batch=8", "checkpointing=selective"]
PAIR = ["model=llama3_8b", "hardware=h100", "gpus=2", "global_batch=16", "dp_shard=2", "checkpointing=selective"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([*PAIR, "micro_batch=1"], 0, "fits      up to 7"),
        ([*PAIR, "micro_batch=8"], 1, "no        gpus=2: no layout fits"),
        # 157.4 GiB estimated, and 13% of band: no run of this project's trainer on a B200 was measured.
        (
            [*FULL, "ep=1", "reshard_after_forward=false"],
            1,
            "no        up to 177.9 GiB (estimate 157.4) of 173.0 usable",
        ),
        (FULL, 0, "fits      up to 116.9 GiB (estimate 103.4) of 173.0 usable: dp_shard=64"),
    ],
)
def test_whether_a_layout_fits_is_an_exit_code(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main([*words, "fits=true"])
    assert ended.value.code == code
    assert capsys.readouterr().out.startswith(said)
    if said.startswith("no        up"):  # a given layout is planned all the same, with a warning
        assert any("no layout's bound of memory does" in line for line in tail_lines(answer(read_request(words))))


def test_one_bound_decides_what_is_recommended_what_fits_and_what_is_left() -> None:
    request = read_request(FULL[:3])
    planned = answer(request)
    problem, best = planned.problem, planned.result.best
    bounds = [bound_gib(candidate.estimate.memory, problem.job, problem.cluster) for candidate in best]
    assert max(bounds) <= problem.cluster.usable_gib == pytest.approx(0.97 * 178.35)
    rows = compare_hardware(request, ["b200"])[0]
    assert rows[0][7] == f"{0.97 * 178.35 - 1.13 * best[0].estimate.memory.needed_gib:.0f}"
    assert layouts_table(planned)[1][0][3] == f"{bounds[0]:.0f}"
    small = read_request(["model=qwen3_30b_a3b", "hardware=h100", "gpus=8", "trainer=megatron", "tp=2", "cp=1"])
    unsure = answer(small)
    marked = [compare_hardware(small, ["h100"])[0][0], layouts_table(unsure)[1][0]]  # only its estimate fits
    assert all("(may not fit)" in row[-1] for row in marked) and float(marked[0][7]) < 0
    of_search = re.compile(r"searched  ([\d,]+) valid layouts: ([\d,]+) do not fit(?:, ([\d,]+) may not fit)?")
    counts = [
        [int(text.replace(",", "")) for text in match.groups() if text]
        for match in (next(filter(None, map(of_search.match, head_lines(one)))) for one in (planned, unsure))
    ]
    assert len(counts[0]) == 2 and counts[1][0] == counts[1][1] + counts[1][2] > counts[1][1]


@pytest.mark.parametrize(
    ("hardware", "topology", "said"),
    [
        ("h100", "gb200_nvl72", ["has domains of 72 GPUs, h100 of 8", "has 900 GB/s for each GPU, h100 at most 450"]),
        ("b200", "gb200_nvl72", ["gb200_nvl72 has domains of 72 GPUs, b200 of 8"]),
        ("h100", "mi300x_8", ["mi300x_8 has wiring pairs, h100 has wiring switch"]),
        ("l40s", "dgx_h100", ["450 GB/s for each GPU, l40s at most 64", "wiring switch, l40s has wiring host"]),
        ("h200", "dgx_h100", []),
        ("h100", "pcie5_8", []),
        ("gb200", None, []),
        ("mi300x", None, []),
    ],
)
def test_a_topology_that_the_gpu_lacks_is_questioned(hardware: str, topology: str | None, said: list[str]) -> None:
    lines = list(list_mismatches(build_cluster(hardware, topology, 8)))
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.parametrize(("batch", "length", "is_explained"), [(8, 1024, True), (64, 4096, False)])
def test_unequal_loads_that_the_host_hides_are_explained(batch: int, length: int, is_explained: bool) -> None:
    words = ["model=qwen3_30b_a3b", "hardware=b200", "gpus=8", "ep=8", "trainer=megatron"]
    request = read_request([*words, f"global_batch={batch}", f"sequence_length={length}"])
    (line,) = (line for line in tail_lines(answer(request)) if line.startswith("routing"))
    assert ("the host takes 8 ms to launch a block, longer than the busiest GPU computes up to" in line) == is_explained


def test_the_parts_of_the_memory_add_up_to_the_bound() -> None:
    planned = answer(read_request(["model=llama3_8b", "hardware=b200", "gpus=8"]))
    _, rows = parts_table(planned)
    *parts, (name, total) = [(row[3], float(row[4])) for row in rows if row[3]]
    assert name == "at most" and sum(gib for _, gib in parts) == pytest.approx(total, abs=0.05 * len(parts))
    bound = bound_gib(planned.best.estimate.memory, planned.problem.job, planned.problem.cluster)
    assert total == pytest.approx(bound, abs=0.05)
    assert "error_band" in dict(parts) and "reserved" not in dict(parts)


def test_a_file_for_a_trainer_is_planned_as_that_trainer_runs_it() -> None:
    assert build_problem(read_request([*SMALL, "file=megatron"])).job.trainer == "megatron"
    assert build_problem(read_request([*SMALL, "file=megatron", "trainer=nemo"])).job.trainer == "nemo"
