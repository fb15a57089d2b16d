"""Tests of imported logs: every log has the step time and tokens/s of its lines, or is refused with the reason."""

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sweeper.commands.ingest.imported import ImportedResult, derive_metrics, find_contradictions
from sweeper.commands.ingest.logs import is_log, read_log
from tests.conftest import REPOSITORY
from tests.support.expected_logs import REFERENCE_LOGS, SAMPLE_LOGS, WARMUP, Expected
from tests.support.trainer_logs import MEGATRON, TITAN
from workloads.api.errors import UserInputError

SAMPLES = REPOSITORY / "tests" / "samples" / "logs"
# Logs of other people's trainers beside the checkout, where there are any.
REFERENCE = REPOSITORY.parent / "shared" / "reference" / "logs"


def check(result: ImportedResult, expected: Expected) -> None:
    """Compare a result with the values that were worked out by hand; those that are None must be unknown."""
    derived = derive_metrics(result)
    assert derived["step_time_ms"] == pytest.approx(expected.step_ms)
    assert derived["warmup_steps"] == expected.warmup and result.devices == expected.devices
    assert derived.get("tokens_per_s") == (expected.tokens_per_s and pytest.approx(expected.tokens_per_s))
    if expected.tokens_per_s and expected.devices:
        assert derived["tokens_per_s_per_gpu"] == pytest.approx(expected.tokens_per_s / expected.devices)
    if expected.claimed is not None:
        assert result.claims.values["tokens_per_s_per_gpu"] == pytest.approx(expected.claimed, rel=1e-4)
    if expected.memory_gib is not None:
        assert result.metrics["peak_device_gib"] == pytest.approx(expected.memory_gib)
    assert derived.get("mfu") == (expected.mfu and pytest.approx(expected.mfu))
    assert expected.params.items() <= result.params.items()
    contradictions = find_contradictions(result, derived)
    assert len(contradictions) == bool(expected.contradiction), contradictions
    assert "".join(contradictions).startswith(expected.contradiction)


def check_log(path: Path, expected: str | tuple[Expected, ...]) -> None:
    """Compare the results of a log, or the reason for which it is refused."""
    if isinstance(expected, str):
        with pytest.raises(UserInputError) as error:
            list(read_log(path))
        assert str(error.value).startswith(str(path)) and expected in str(error.value)
        return
    results = list(read_log(path))
    assert len(results) == len(expected) and len({result.name for result in results}) == len(results)
    for result, values in zip(results, expected, strict=True):
        check(result, values)


@pytest.mark.parametrize("name", SAMPLE_LOGS)
def test_a_sample_is_read_as_worked_out_by_hand(name: str) -> None:
    check_log(SAMPLES / name, SAMPLE_LOGS[name])


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="the logs of other people's trainers are not here")
@pytest.mark.parametrize("name", REFERENCE_LOGS)
def test_a_log_of_another_project_is_read_as_worked_out_by_hand(name: str) -> None:
    check_log(REFERENCE / name, REFERENCE_LOGS[name])


def test_every_log_has_values_that_were_worked_out_by_hand() -> None:
    assert {path.name for path in SAMPLES.glob("*.log")} == SAMPLE_LOGS.keys() | {"titan_wrong_claim.log"}
    if REFERENCE.is_dir():
        assert {path.name for path in REFERENCE.glob("*.log")} == REFERENCE_LOGS.keys()


def test_a_claim_that_contradicts_the_steps_is_reported() -> None:
    (result,) = read_log(SAMPLES / "titan_wrong_claim.log")
    assert find_contradictions(result, derive_metrics(result)) == [
        "the stated MFU is 15.2%, but 300 TFLOP/s are 30.3% of the dense bf16 peak",
        "claimed tokens_per_s_per_gpu 1,170, but the median of the same steps gives 5,851",
    ]


# ── logs made for a test ──


def megatron_log(steps: int = 20, **changes: Any) -> str:
    """Return a log of Megatron-LM: 256 sequences of 8192 tokens in 2 s on 8 GPUs, after two slow steps."""
    run = {"ms": 2000.0, "length": 8192, "gpus": 8} | changes
    head = f"  seq_length ............... {run['length']}\n  world_size ............... {run['gpus']}\n"
    times_ms = {n: 9 * run["ms"] if n < 3 else run["ms"] for n in range(1, steps + 1)}
    lines = [  # 400 TFLOP/s in the steady steps, and less in the slow ones
        MEGATRON.format(n=n, samples=256 * n, ms=ms, tflops=400 * run["ms"] / ms, loss=9.0 / n)
        for n, ms in times_ms.items()
    ]
    return head + "\n".join(lines) + "\n"


def read_text(folder: Path, text: str) -> ImportedResult:
    (path := folder / "run.log").write_text(text)
    (result,) = read_log(path)
    return result


def test_values_that_a_log_does_not_contain_stay_unknown(tmp_path: Path) -> None:
    # Without the two lines of the configuration, and without the newline of the last line.
    result = read_text(tmp_path, "\n".join(megatron_log().splitlines()[2:]))
    assert result.tokens_per_step == 0 and result.devices is None and len(result.step_times_s) == 19
    derived = derive_metrics(result)
    assert "tokens_per_s" not in derived and derived["step_time_ms"] == 2000


def test_the_stated_mfu_of_a_log_is_compared_with_its_flops(tmp_path: Path) -> None:
    lines = [TITAN.format(rank=0, minute=4, second=2.0 * n, n=n, loss=3, tps=8192, tflops=449.0) for n in range(9)]
    head = "INFO - GPU capacity: NVIDIA H200 with 139.8GiB memory\n"
    result = read_text(tmp_path, head + "\n".join(lines).replace("45.40%", "22.70%") + "\n")
    assert result.device == "NVIDIA H200"
    message = "the stated MFU is 22.7%, but 449 TFLOP/s are 45.4% of the dense bf16 peak"
    assert find_contradictions(result, derive_metrics(result)) == [message]


def test_a_wrong_rate_is_reported_with_the_sequence_length_that_would_explain_it(tmp_path: Path) -> None:
    rate = "tokens per GPU (tokens/s/GPU): 524288.0 | throughput per GPU"
    result = read_text(tmp_path, megatron_log().replace("throughput per GPU", rate))
    assert find_contradictions(result, derive_metrics(result)) == [
        "claimed tokens_per_s_per_gpu 524,288, but the median of the same steps gives 131,072 "
        "(a sequence length of 32,768 tokens would explain it)"
    ]


def test_degrees_that_do_not_give_the_number_of_gpus_are_reported(tmp_path: Path) -> None:
    degrees = {"data_parallel_size": 4, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 4}
    arguments = "".join(f"  {name} ............... {degree}\n" for name, degree in degrees.items())
    result = read_text(tmp_path, arguments + megatron_log())
    assert result.contradictions == ("the parallel degrees dp 4 x pp 1 x tp 4 do not give 8 GPUs",)
    without_gpus = megatron_log().replace("world_size", "other_size")
    assert read_text(tmp_path, arguments + without_gpus).devices == 16


ARGUMENTS = {
    "num_layers": 12,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 16,
    "num_query_groups": 4,
    "vocab_size": 32000,
    "position_embedding_type": "rope",
    "bf16": True,
}
# 6 FLOPs a weight and 6 x sequence length x hidden size for causal attention in a layer, and the head
FLOPS_PER_TOKEN = 12 * (6 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 5632) + 6 * 8192 * 2048) + 6 * 2048 * 32000


@pytest.mark.parametrize(
    "form", ["  {} ................. {}\n", "[default0]:  {} ................ {}\n", "    {}: {}\n"]
)
def test_flops_and_mfu_follow_from_the_arguments_that_a_log_prints(tmp_path: Path, form: str) -> None:
    is_yaml = ":" in form[-6:]
    other = {"gated_linear_unit": "true", "share_embeddings_and_output_weights": "false", "add_bias_linear": "false"}
    if not is_yaml:
        other = {"swiglu": True, "untie_embeddings_and_output_weights": True, "add_bias_linear": False}
        other["group_query_attention"] = True
    text = "".join(form.format(name, value) for name, value in (ARGUMENTS | other).items()) + megatron_log()
    result = replace(read_text(tmp_path, text), device="h100")
    rate = 256 * 8192 / 2 / 8 * FLOPS_PER_TOKEN / 1e12
    assert derive_metrics(result)["tflops_per_gpu"] == pytest.approx(rate)
    assert is_yaml or derive_metrics(result)["mfu"] == pytest.approx(rate / 989)


def test_layers_that_are_not_known_have_no_flops(tmp_path: Path) -> None:
    arguments = ARGUMENTS | {"multi_latent_attention": True}
    text = "".join(f"  {name} ............... {value}\n" for name, value in arguments.items()) + megatron_log()
    result = read_text(tmp_path, text)
    assert "tflops" not in derive_metrics(result) and "multi_latent_attention=True" in result.notes[0]


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("h100", "bf16", "the claimed 1,200 TFLOP/s are above the device's dense bf16 peak of 989"),
        ("h100", "", ""),  # it may be fp8
        ("a100", "", "the claimed 1,200 TFLOP/s are above the device's highest dense peak of 312"),
    ],
)
def test_a_claim_above_the_peak_is_reported_without_an_mfu(
    tmp_path: Path, device: str, dtype: str, message: str
) -> None:
    head = f"  {dtype} ............... True\n" if dtype else ""
    result = replace(read_text(tmp_path, head + megatron_log().replace(": 400.0", ": 1200.0")), device=device)
    contradictions = find_contradictions(result, derive_metrics(result))
    assert contradictions == ([message] if message else [])


def test_an_mfu_above_one_is_reported_on_an_unknown_device(tmp_path: Path) -> None:
    lines = [TITAN.format(rank=0, minute=4, second=2.0 * n, n=n, loss=3, tps=8192, tflops=449.0) for n in range(9)]
    result = read_text(tmp_path, "\n".join(lines).replace("45.40%", "152.06%") + "\n")
    assert find_contradictions(result, derive_metrics(result)) == [
        "the stated MFU is 152.1%: no device computes more than its peak"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "iteration {n}/500 | speed: 12.1 | loss: 3.2 |",
        "step: {n}  loss: 3.20  lr: 1e-4",
        "step {n} | loss 3.2 | tokens 4096",
        "[step={n}] loss=3.2",
    ],
)
def test_the_log_of_an_unknown_trainer_is_not_read_as_another_ones(tmp_path: Path, line: str) -> None:
    (tmp_path / "run.log").write_text("".join(f"2026-01-02 03:04:{n:02d} {line.format(n=n)}\n" for n in range(9)))
    assert not is_log(tmp_path / "run.log")


def test_the_resolution_of_what_was_read_is_part_of_the_interval(tmp_path: Path) -> None:
    """Steps of 20 s in a log in 0.01 s are all equal."""
    lines = [MEGATRON.format(n=n, samples=1, ms=1.0, tflops=1.0, loss=9.0) for n in range(2, 9)]
    text = "\n".join(lines).replace("(ms): 1.0", "(s): 20.00") + "\n"
    derived = derive_metrics(read_text(tmp_path, text))
    assert derived["step_resolution_ms"] == pytest.approx(10) and derived["step_time_ms"] == 20_000
    tokens = 256 * 8192
    derived = derive_metrics(read_text(tmp_path, "  seq_length ............... 8192\n" + text))
    assert derived["tokens_per_s_ci_low"] == pytest.approx(tokens / 20.005)
    assert derived["tokens_per_s_ci_high"] == pytest.approx(tokens / 19.995)


def test_a_single_step_that_is_not_the_first_is_marked(tmp_path: Path) -> None:
    line = MEGATRON.format(n=7, samples=1, ms=2000.0, tflops=1.0, loss=9.0)
    assert "one timed step, number 7: whether it is warm-up is unknown" in read_text(tmp_path, f"{line}\n").notes
    (tmp_path / "run.log").write_text(line.replace("       7/", "       1/") + "\n")
    with pytest.raises(UserInputError, match=WARMUP):
        list(read_log(tmp_path / "run.log"))


def test_a_large_log_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    with path.open("w") as file:
        file.write(megatron_log(4))
        for _ in range(64):
            file.write("x" * 2**20)  # one line of 64 MiB
    tracemalloc.start()
    (result,) = read_log(path)
    assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    tracemalloc.stop()
    assert len(result.step_times_s) == 4
