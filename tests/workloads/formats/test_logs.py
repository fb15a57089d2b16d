"""Parsing the logs of trainers, with lines in their formats."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.trainer_logs import MEGATRON, NEMO, PRIMUS, TITAN
from workloads.formats.logs import LogReader, Step


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


def test_a_loss_that_is_no_number_is_reported_and_other_metrics_are_dropped() -> None:
    line = MEGATRON.format(n=7, samples=1, ms=2000.0, tflops=400.0, loss=1.0)
    _, (step,) = read(line.replace("1.000000E+00", "NAN").replace("0.543", "nan"))
    assert math.isnan(step.metrics["loss"]) and "grad_norm" not in step.metrics
    _, (step,) = read("step:  3  loss:      nan  grad_norm:  nan  memory:  9.46GiB(64.99%)  tps: 9")
    assert math.isnan(step.metrics["loss"]) and step.metrics["peak_device_gib"] == 9.46


def test_the_most_memory_of_any_rank_belongs_to_the_steps_after_its_line() -> None:
    memory = "[Rank {}] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {} | max reserved: {}.0"
    lines = [MEGATRON.format(n=n, samples=1, ms=2000.0, tflops=400.0, loss=1.0) for n in (1, 2)]
    text = [lines[0], memory.format(0, 2048.0, 3072), memory.format(8, 1024.0, 4096), lines[1]]
    _, (first, second) = read("\n".join(text))
    assert "peak_device_gib" not in first.metrics
    assert (second.metrics["peak_memory_gib"], second.metrics["peak_device_gib"]) == (2.0, 4.0)


def test_a_restart_begins_a_new_configuration() -> None:
    line = MEGATRON.format(n=7, samples=1, ms=2000.0, tflops=400.0, loss=1.0)
    numbered = [line.replace("       7/", f"{n:8d}/") for n in range(20)]
    arguments = "  bf16 .............. True\n  world_size ............... {}\n  seq_length ............... 4096"
    reader, steps = read("\n".join([arguments.format(8), *numbered[3:6]]))
    assert [step.start for step in steps] == [0, 0, 0] and (reader.dtype, reader.reported_config["gpus"]) == ("bf16", 8)
    # With its configuration printed again a program may go on at any step; without, going back is what shows.
    reader, steps = read(
        "\n".join([arguments.format(8), *numbered[3:6], "  world_size ............... 16", *numbered[6:8]])
    )
    assert [(step.start, step.number) for step in steps] == [(0, 3), (0, 4), (0, 5), (1, 6), (1, 7)]
    assert reader.reported_config == {"gpus": 16} and reader.dtype == ""
    _, steps = read("\n".join([*numbered[3:6], *numbered[3:6]]))
    assert [(step.start, step.number) for step in steps] == [(0, 3), (0, 4), (0, 5), (1, 3), (1, 4), (1, 5)]


@pytest.mark.parametrize("prefix", ["", "[rank0]:", "0: ", " 12: ", "[default3]:[rank3]:", "worker-0 | ", "(pid=7) "])
def test_a_launchers_prefix_does_not_hide_the_configuration(prefix: str) -> None:
    config = [
        "[titan] 2026-01-01 00:00:00,000 - root - INFO - Running with configs: {",
        '  "model": {',
        '    "name": "llama3",',
        '    "flavor": "8B"',
        "  },",
        '  "training": {',
        '    "local_batch_size": 2,',
        '    "global_batch_size": -1,',
        '    "seq_len": 8192,',
        '    "other": {',
        '      "seq_len": 1',
        "    }",
        "  }",
        "}",
        "[titan] INFO - Building device mesh with parallelism: pp=2, dp_replicate=2, dp_shard=4, cp=1, tp=2, ep=4",
        "[titan] INFO - CUDA capacity: NVIDIA H100 80GB HBM3 with 79.10GiB memory",
    ]
    reader, _ = read("\n".join(prefix + line for line in config))
    assert (reader.model, reader.device) == ("llama3_8b", "NVIDIA H100 80GB HBM3")
    assert reader.reported_config == {"micro_batch": 2, "sequence_length": 8192, "gpus": 32, "global_batch": 16}


def test_a_step_has_the_highest_memory_of_the_ranks_that_print_it_and_of_no_other_step() -> None:
    line = "[rank{r}]:[titan] INFO - step: {n}  loss: 2.5  memory: {gib}GiB(50.9%)  tps: 5,000  tflops: 280.1  mfu: 28%"
    printed = [(1, 0, 70.3), (2, 0, 40.3), (1, 1, 71.7), (2, 1, 60.0), (3, 0, 40.0), (3, 1, 30.0)]
    _, steps = read("\n".join(line.format(n=n, r=r, gib=gib) for n, r, gib in printed))
    assert [step.metrics["peak_device_gib"] for step in steps] == [71.7, 60.0, 40.0]


def test_a_rank_that_prints_later_is_not_a_restart() -> None:
    line = "[rank{r}]:[titan] INFO - step: {n}  loss: 2.5  memory: 40.3GiB(50.9%)  tps: 5,000  tflops: 280.1  mfu: 28%"
    printed = [(n, 0) for n in range(1, 6)] + [(n, 1) for n in range(1, 6)] + [(6, 1), (6, 0)]
    _, steps = read("\n".join(line.format(n=n, r=r) for n, r in printed))
    assert [(step.start, step.number) for step in steps] == [(0, n) for n in range(1, 7)]
    of_task = [f"0: {line.format(n=n, r=r)}" for n, r in printed]  # srun labels a task with several ranks
    _, steps = read("\n".join(of_task))
    assert [(step.start, step.number) for step in steps] == [(0, n) for n in range(1, 7)]
    _, steps = read("\n".join(line.format(n=n, r=r) for n, r in [*printed, (1, 1), (1, 0), (2, 0)]))
    assert [(step.start, step.number) for step in steps][6:] == [(1, 1), (1, 2)]


def test_torchtitan_s_line_on_its_batch_is_read_without_its_configuration() -> None:
    line = "[titan] INFO - Trainer is initialized with local batch size 1, global batch size 8, sequence length 8192, "
    reader, _ = read(f"{line}total steps 100 (warmup 2)")
    assert reader.reported_config == {"micro_batch": 1, "global_batch": 8, "sequence_length": 8192}


@given(st.lists(st.text(alphabet="iteration: 0123456789/|.,%stepl\x1b[m\x00é \t-", max_size=200), max_size=20))
def test_any_lines_are_read_without_an_error(lines: list[str]) -> None:
    reader = LogReader()
    numbers = [(step.start, step.number) for step in map(reader.feed, lines) if step]
    assert numbers == sorted(set(numbers))


def test_a_batch_is_not_derived_from_rates_that_are_rounded_too_far() -> None:
    line = "[batch={n}/90]:\n Train throughput/batches_per_sec: {b}\n Train throughput/samples_per_sec: {s}\n"
    coarse = [line.format(n=n, b=b, s="31.9") for n, b in enumerate(("0.0999", "0.0998"), 1)]
    fine = line.format(n=3, b="0.0999", s="31.9680")
    _, steps = read("".join([*coarse, fine, "end"]))
    assert [step.metrics.get("global_batch") for step in steps] == [None, None, 320]
    _, (step,) = read(f"{line.format(n=1, b='9' * 200, s='32.0')}end")  # whose square is beyond the numbers
    assert step.metrics["step_time_s"] == pytest.approx(1e-200)


def test_a_long_line_takes_time_in_proportion() -> None:
    """A pattern that searches a line from each of its characters needs minutes for this one."""
    log = Path("tests/samples/logs/gpt_neox.log").read_text()
    line = next(line for line in log.splitlines() if "samples/sec: 16.000 | iteration" in line)
    start = time.process_time()
    _, (step,) = read(f"{'word ' * 2000}{line} {'samples/sec: ' * 2000}")
    assert time.process_time() - start < 5
    assert (step.number, step.metrics["step_time_s"]) == (10, 4.0)
