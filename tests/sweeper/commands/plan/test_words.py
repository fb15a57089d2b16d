"""`python -m sweeper plan`: its words, and its errors."""

import json
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from sweeper.commands.plan.answer import answer, search
from sweeper.commands.plan.main import COMMAND, main
from sweeper.commands.plan.request import build_problem, read_request
from sweeper.config.catalogue import catalogue
from sweeper.preflight.clusters import build_cluster, list_mismatches
from tests.conftest import run_in_process
from tests.support.planner import SMALL
from workloads.api.errors import UserInputError
from workloads.hardware.precisions import PRECISIONS


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
        (
            ["model=llama3_8b", "hardware=rtx4090", "gpus=4"],
            "no layout fits; .*\\. It fits with state=bf16, for example$",
        ),
        (["model=llama3_70b", "gpus=4", "state=bf16"], "no layout fits; .*. It fits with gpus=8, for example$"),
        (["model=llama3_70b", "gpus=1"], "no layout fits; .*. It fits with gpus=16, for example$"),
        (["model=meta-llama/Llama-3.1-70B"], "unknown model 'meta-llama/Llama-3.1-70B'. Did you mean llama3_70b?"),
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
    with pytest.raises(UserInputError, match=r"file=sweeps/torchtitan.toml: cannot be written: Is a dir"):
        COMMAND.run([*SMALL, "trainer=torchtitan", "tp=1", "pp=1", "file=torchtitan"])


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
