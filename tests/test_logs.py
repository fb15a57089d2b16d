"""What trainers print: their formats as they are, in lines of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workloads.logs import LogReader, Step

MEGATRON = (
    " [2026-04-28 14:23:45] iteration {n:8d}/     500 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): {tflops:.1f} | "
    "learning rate: 3.000000E-04 | global batch size:   256 | lm loss: {loss:.6E} | loss scale: 1.0 | "
    "grad norm: 0.543 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
PRIMUS = (
    "[20251121 12:10:29][rank-31/32][INFO ] [--------trainer.py:2488] :  iteration {n:8d}/   36000 | "
    "consumed samples: {samples} | elapsed time per iteration (ms): {ms:.1f}/2712.7 | "
    "hip mem usage/free/total/usage_ratio: 227.35GB/28.63GB/255.98GB/88.81% | "
    "throughput per GPU (TFLOP/s/GPU): {tflops:.1f}/217.3 | tokens per GPU (tokens/s/GPU): 12130.4/12525.5 | "
    "global batch size:   256 | lm loss: {loss:.6E} | grad norm: 0.132 |"
)
NEMO = (
    "Training epoch 0, iteration {n}/499 | lr: 3e-05 | consumed_samples: {samples} | global_batch_size: 256 | "
    "global_step: {n} | reduced_train_loss: {loss:.4g} | train_step_timing in s: {s:.4g}"
)
TITAN = (
    "[rank{rank}]:[titan] 2026-05-18 16:{minute:02d}:{second:06.3f} - root - INFO - \x1b[31mstep: {n:2d}  "
    "\x1b[32mloss: {loss:8.5f}  \x1b[38;2;180;60;0mgrad_norm:  0.8319  \x1b[38;2;54;234;195mmemory:  9.46GiB(64.99%)  "
    "\x1b[34mtps: {tps:,}  \x1b[36mtflops: {tflops:,.2f}  \x1b[35mmfu: 45.40%\x1b[39m"
)


def read(text: str) -> tuple[LogReader, list[Step]]:
    reader = LogReader()
    return reader, [step for step in map(reader.feed, text.splitlines()) if step]


@pytest.mark.parametrize(
    ("kind", "line"), [("Megatron-LM", MEGATRON), ("Primus", PRIMUS), ("NeMo", NEMO)], ids=lambda each: each[:10]
)
def test_steps_times_and_losses_are_what_the_line_says(kind: str, line: str) -> None:
    lines = [line.format(n=n, samples=256 * n, ms=2701.3, s=2.7013, tflops=210.5, loss=2.25) for n in (1, 2, 3)]
    reader, steps = read("\n".join(["no step", *lines, "done"]))
    assert reader.kind == kind and [step.number for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.figures["step_time_s"] == pytest.approx(2.7013, rel=1e-3)
        assert step.figures["loss"] == 2.25 and step.figures["global_batch"] == 256
    if kind == "Primus":
        assert steps[0].figures["tokens_per_s_per_gpu"] == 12130.4 and reader.told["gpus"] == 32


def test_the_bridges_own_line_belongs_to_the_step_after_it() -> None:
    line = MEGATRON.replace(" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |", "")
    text = line.format(n=10, samples=5120, ms=5390.0, loss=2.5)
    reader, (step,) = read(f"Step Time : 5.39s GPU utilization: 647.0MODEL_TFLOP/s/GPU\n{text}")
    assert reader.kind == "Megatron-Bridge" and step.figures["tflops_per_gpu"] == 647


def test_torchtitan_says_rates_and_its_clock_says_how_long_a_step_took() -> None:
    lines = [
        TITAN.format(rank=rank, minute=4, second=10 + 1.25 * n, n=n, loss=3.5, tps=7282, tflops=1400.5)
        for n in (1, 2, 3)
        for rank in (0, 1)
    ]
    reader, steps = read("\n".join(lines))
    assert reader.kind == "torchtitan" and [step.number for step in steps] == [1, 2, 3]
    assert "step_time_s" not in steps[0].figures
    assert [step.figures["step_time_s"] for step in steps[1:]] == pytest.approx([1.25, 1.25])
    assert steps[0].figures["tokens_per_s_per_gpu"] == 7282 and steps[0].figures["mfu"] == pytest.approx(0.454)


def test_what_a_program_says_that_it_was_told() -> None:
    reader, _ = read(
        "  tensor_model_parallel_size ...................... 2\n"
        "  seq_length ...................................... 8192\n"
        "  world_size ...................................... 16\n"
        "  some_other_thing ................................ 7\n"
    )
    assert reader.told == {"tensor": 2, "sequence_length": 8192, "gpus": 16}
    reader, _ = read(
        '[titan] 2026-01-01 00:00:00,000 - root - INFO - Running with configs: {\n  "training": {\n'
        '    "seq_len": 2048,\n    "global_batch_size": -1\n  },\n'
        '  "activation_checkpoint": {\n    "mode": "full"\n  },\n'
        '  "compile": {\n    "enable": false\n  }\n}\n'
        "[titan] 2026-01-01 00:00:01,000 - root - INFO - GPU capacity: NVIDIA H200 with 139.8GiB memory"
    )
    assert reader.told == {"sequence_length": 2048, "checkpointing": "full", "compile": False}
    assert reader.device == "NVIDIA H200"


@given(st.lists(st.text(alphabet="iteration: 0123456789/|.,%stepl\x1b[m\x00é \t-", max_size=200), max_size=20))
def test_no_line_upsets_the_reader(lines: list[str]) -> None:
    reader = LogReader()
    numbers = [step.number for step in map(reader.feed, lines) if step]
    assert numbers == sorted(set(numbers))
