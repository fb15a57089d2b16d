"""Parsing the logs of trainers, with lines in their formats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer_logs import MEGATRON, NEMO, PRIMUS, TITAN
from workloads.api.logs import LogReader, Step


def read(text: str) -> tuple[LogReader, list[Step]]:
    reader = LogReader()
    return reader, [step for step in map(reader.feed, text.splitlines()) if step]


@pytest.mark.parametrize(
    ("kind", "line"),
    [("Megatron-LM", MEGATRON), ("Primus", PRIMUS), ("NeMo", NEMO)],
    ids=["Megatron-LM", "Primus", "NeMo"],
)
def test_steps_times_and_losses_are_parsed(kind: str, line: str) -> None:
    lines = [line.format(n=n, samples=256 * n, ms=2701.3, s=2.7013, tflops=210.5, loss=2.25) for n in (1, 2, 3)]
    reader, steps = read("\n".join(["no step", *lines, "done"]))
    assert reader.kind == kind and [step.number for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.metrics["step_time_s"] == pytest.approx(2.7013, rel=1e-3)
        assert step.metrics["loss"] == 2.25 and step.metrics["global_batch"] == 256
    if kind == "Primus":
        assert steps[0].metrics["tokens_per_s_per_gpu"] == 12130.4 and reader.reported_config["gpus"] == 32


def test_megatron_bridges_line_belongs_to_the_step_after_it() -> None:
    line = MEGATRON.replace(" throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |", "")
    text = line.format(n=10, samples=5120, ms=5390.0, loss=2.5)
    reader, (step,) = read(f"Step Time : 5.39s GPU utilization: 647.0MODEL_TFLOP/s/GPU\n{text}")
    assert reader.kind == "Megatron-Bridge" and step.metrics["tflops_per_gpu"] == 647


def test_torchtitan_prints_rates_and_its_timestamps_give_the_step_times() -> None:
    lines = [
        TITAN.format(rank=rank, minute=4, second=10 + 1.25 * n, n=n, loss=3.5, tps=7282, tflops=1400.5)
        for n in (1, 2, 3)
        for rank in (0, 1)
    ]
    reader, steps = read("\n".join(lines))
    assert reader.kind == "torchtitan" and [step.number for step in steps] == [1, 2, 3]
    assert "step_time_s" not in steps[0].metrics
    assert [step.metrics["step_time_s"] for step in steps[1:]] == pytest.approx([1.25, 1.25])
    assert steps[0].metrics["tokens_per_s_per_gpu"] == 7282 and steps[0].metrics["mfu"] == pytest.approx(0.454)


def test_the_reported_configuration_is_parsed() -> None:
    reader, _ = read(
        "  tensor_model_parallel_size ...................... 2\n"
        "  seq_length ...................................... 8192\n"
        "  world_size ...................................... 16\n"
        "  some_other_thing ................................ 7\n"
    )
    assert reader.reported_config == {"tp": 2, "sequence_length": 8192, "gpus": 16}
    reader, _ = read(
        '[titan] 2026-01-01 00:00:00,000 - root - INFO - Running with configs: {\n  "training": {\n'
        '    "seq_len": 2048,\n    "global_batch_size": -1\n  },\n'
        '  "activation_checkpoint": {\n    "mode": "full"\n  },\n'
        '  "compile": {\n    "enable": false\n  }\n}\n'
        "[titan] 2026-01-01 00:00:01,000 - root - INFO - GPU capacity: NVIDIA H200 with 139.8GiB memory"
    )
    assert reader.reported_config == {"sequence_length": 2048, "checkpointing": "full", "compile": False}
    assert reader.device == "NVIDIA H200"


@given(st.lists(st.text(alphabet="iteration: 0123456789/|.,%stepl\x1b[m\x00é \t-", max_size=200), max_size=20))
def test_any_lines_are_read_without_an_error(lines: list[str]) -> None:
    reader = LogReader()
    numbers = [step.number for step in map(reader.feed, lines) if step]
    assert numbers == sorted(set(numbers))
