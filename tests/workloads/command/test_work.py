"""A program is held to its declared work: batch, model, layout and data type."""

from typing import Any

import pytest

from tests.support.programs import STEPS, run_program
from workloads.api.contract import ParameterMismatch, Rank
from workloads.command import CommandSettings
from workloads.command.run import RegexLogReader
from workloads.command.work import read_declared_work
from workloads.formats.printed import Printed, add_printed, read_printed

# What torchtitan 0.2.2 prints without FSDP.
UNMIXED = '"dtype": "%s",\n"mixed_precision_param": "bfloat16",\nMixed precision training is disabled'
LAYOUT = {"global_batch": "256", "sequence_length": "128", "model": "llama_tiny"}  # what a layout needs


def find_differences(printed: str, parameters: dict[str, Any] | None = None, **settings: Any) -> str:
    """Return in what the lines differ from a command of one GPU with these settings."""
    work = read_declared_work(CommandSettings(run=["x"], **settings), parameters or {}, {"world_size": 1})
    config: dict[str, list[Printed]] = {}
    for line in printed.splitlines():
        add_printed(config, read_printed(line))
    return "; ".join(work.find_differences(config, {}))


@pytest.mark.parametrize(
    ("printed", "settings", "difference"),
    [
        ("global batch size: 64", {"global_batch": "128"}, "global_batch=64, requested 128 (command.global_batch)"),
        ("seq_length ...... 4096", {"sequence_length": "2048"}, "sequence_length=4096, requested 2048"),
        ("tensor_model_parallel_size ...... 4", {"parameters": {"tp": 2}}, "tp=4, requested 2 (space.tp)"),
        ("context parallel size: 1", {"layout": {"cp": 2}, **LAYOUT}, "cp=1, requested 2 (command.layout.cp)"),
        ("world_size ...... 8", {}, "gpus=8, requested 1 (gpus)"),
        ("num_layers ...... 16", {"model": "llama3_8b"}, "layers=16, requested llama3_8b (command.model) has 32"),
        ("model: llama3_1b", {"model": "llama3_8b"}, "model=llama3_1b, requested llama3_8b"),
        ('    "flavor": "70B",', {"model": "llama3_8b"}, "model of 70B, requested llama3_8b"),
        (
            "Model llama3 debugmodel size: 6,139,136 total parameters",
            {"model": "llama3_8b"},
            "6,139,136 parameters, requested llama3_8b (command.model) has 8,030,261,248",
        ),
        ("params_dtype ...... torch.float16", {"dtype": "bf16"}, "dtype=fp16, requested bf16 (command.dtype)"),
        ("fp8 ...... hybrid", {"dtype": "bf16"}, "dtype=fp8, requested bf16"),
        (UNMIXED % "float32", {"dtype": "bf16"}, "dtype=fp32, since mixed precision is disabled without FSDP"),
        ("fp8 ...... None", {"dtype": "fp8_hybrid"}, "fp8=none, requested fp8_hybrid"),
        ("Float8 training active with recipe rowwise", {"dtype": "fp8_tensorwise"}, "fp8=fp8_rowwise, requested"),
    ],
    ids=str,
)
def test_printed_work_that_is_not_the_declared_one_is_found(
    printed: str, settings: dict[str, Any], difference: str
) -> None:
    assert find_differences(printed, **settings).startswith(difference)


@pytest.mark.parametrize(
    ("printed", "settings"),
    [
        ("global_batch_size ...... 256\nparams_dtype ...... torch.bfloat16", {"global_batch": "256", "dtype": "bf16"}),
        ("num_layers ...... 32\nModel llama3 8B size: 8,030,261,248 total parameters", {"model": "llama3_8b"}),
        ("Model llama3 8B_flex size: 8,030,261,248 total parameters", {"model": "llama3_8b"}),
        ("fp8 ...... hybrid\nparams_dtype ...... torch.bfloat16", {"dtype": "fp8_hybrid"}),
        ("Float8 training active with recipe rowwise", {"dtype": "fp8_rowwise"}),
        ("model: Transformer(", {"model": "llama3_8b"}),
        ("data_parallel_shard_degree: 8", {"parameters": {"dp_shard": -1}}),  # the program chooses
        ("dtype: float32", {"dtype": "tf32"}),
        (UNMIXED % "bfloat16", {"dtype": "bf16"}),
        ("seq_length: 8192\nvision:\n  seq_length: 729", {"sequence_length": "8192"}),
    ],
    ids=str,
)
def test_printed_work_that_is_the_declared_one_has_no_difference(printed: str, settings: dict[str, Any]) -> None:
    assert find_differences(printed, **settings) == ""


def test_degrees_and_gpus_are_those_of_the_layout() -> None:
    layout = {"tp": "{tensor}", "pp": 1}
    program = "print('using world size: 4, tensor-model-parallel size: 4, pipeline-model-parallel size: 1')\n" + STEPS
    with pytest.raises(ParameterMismatch, match=r"tp=4, requested 2 \(command\.layout\.tp\), as its program prints$"):
        run_program(program, Rank(0, 4, ranks_per_node=4), {"tensor": 2}, layout=layout, **LAYOUT)


def test_a_program_of_other_work_ends_at_its_first_step() -> None:
    with pytest.raises(ParameterMismatch):
        run_program("import time\nprint('world_size ..... 9')\n" + STEPS.replace("0.002", "60"))


RAMP = STEPS.replace(", flush=True)", ".replace('256 |', '128 |' if n < FULL else '256 |'), flush=True)")


@pytest.mark.parametrize("declared", ["256", ""])
def test_a_batch_that_ramps_up_belongs_to_the_warm_up(declared: str) -> None:
    settings = {"global_batch": declared, "sequence_length": "128"}
    assert run_program(RAMP.replace("FULL", "4"), **settings).tokens_per_step == 256 * 128
    with pytest.raises(ParameterMismatch, match="128, requested 256" if declared else "batches of 128 and 256"):
        run_program(RAMP.replace("FULL", "6"), **settings)


def test_a_line_of_a_step_is_believed_before_the_configuration() -> None:
    """The arguments say 1024 while the batch ramps up, and nothing is declared."""
    program = "print('  global_batch_size ..... 1024')\n" + STEPS
    assert run_program(program, sequence_length="128").tokens_per_step == 256 * 128


def test_a_log_of_its_own_is_held_to_the_declared_work() -> None:
    program = "print('global batch size: 64')\nfor _ in range(9): print('took 5 ms')"
    settings = {"log": {"step_time_ms": r"took (\d+)"}, "sequence_length": "128"}
    with pytest.raises(ParameterMismatch, match="global_batch=64, requested 128"):
        run_program(program, global_batch="128", **settings)
    assert run_program(program, **settings).tokens_per_step == 64 * 128


@pytest.mark.parametrize(
    ("name", "text", "resolution_s"), [("step_time_s", "0.41", 0.01), ("step_time_ms", "412", 1e-3)]
)
def test_the_resolution_of_a_printed_time_is_that_of_its_last_digit(name: str, text: str, resolution_s: float) -> None:
    step = RegexLogReader({name: "took (.*)"}).feed(f"took {text}")
    assert step is not None and step.resolution_s == pytest.approx(resolution_s)


def test_a_metric_may_be_the_number_of_the_step() -> None:
    reader = RegexLogReader({"step": r"step (\d+)", "loss": r"loss ([\d.]+)"})
    assert [step.number for step in map(reader.feed, ["step 100 loss 2", "step 110 loss 1"]) if step] == [100, 110]


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("step 10: 412 ms/step: 0.5 s", [10, 10]),
        ("ms per step: 412.5 s", [1, 2]),
        ("tokens per step: 4096, 3 s", [1, 2]),
        ("step: 3 s", [1, 2]),
    ],
)
def test_a_step_has_the_number_that_is_printed_as_its_own(line: str, numbers: list[int]) -> None:
    reader = RegexLogReader({"step_time_s": r"([\d.]+) s"})
    assert [step.number for step in map(reader.feed, [line, line]) if step] == numbers
