"""Rates in the lines of training scripts that no trainer's format describes."""

import time

import pytest

from workloads.formats.rate_lines import CommonLogReader, read_rates


@pytest.mark.parametrize(
    ("line", "rates"),
    [
        ("step 7 | loss 1.5 | 2,048 tok/s", {"tokens_per_s": 2048, "loss": 1.5}),
        ("step: 9, tokens/sec: 1.5k", {"tokens_per_s": 1500}),
        ("tokens_per_second=3.2M", {"tokens_per_s": 3.2e6}),
        ("{'loss': 2.0, 'samples_per_second': 12.5}", {"samples_per_s": 12.5, "loss": 2.0}),
        ("epoch 2: 4 it/s", {"step_time_s": 0.25}),
        ("250 ms/step", {"step_time_s": 0.25}),
        ("0.5 s/it", {"step_time_s": 0.5}),
        ("iter 30: loss 4.0, time 125.0ms, mfu 3.0%", {"step_time_s": 0.125, "loss": 4.0}),
        ("step 5 dt 20 ms 100 tokens/s", {"tokens_per_s": 100, "step_time_s": 0.02}),
        ("total time 30 s", {}),
        ("0 tok/s", {}),
        ("step 3 loss 1.0 50 ms/step 123350.0 tok/s", {"tokens_per_s": 123350, "step_time_s": 0.05, "loss": 1.0}),
        ("step 3 it/s", {}),
        ("step 10 ms/step 50.1 tok/s 123456", {"tokens_per_s": 123456, "step_time_s": 0.0501}),
        ("tok/s 123350 ms/step 50", {"tokens_per_s": 123350, "step_time_s": 0.05}),
        ("iter 5 s/iter 0.5 samples/s 64", {"samples_per_s": 64, "step_time_s": 0.5}),
        ("global_step 3 it/s 4.0", {"step_time_s": 0.25}),
        ("epoch 3 it/s 2.5", {"step_time_s": 0.4}),
        ("50 ms per step 1234 tok/s", {"tokens_per_s": 1234, "step_time_s": 0.05}),
        ("1.5ktok/s, 3% MFU", {"tokens_per_s": 1500}),
        ("tok/s 123 MFU 3%", {"tokens_per_s": 123}),
        ("step=10,50 ms/step", {"step_time_s": 0.05}),
        ("step 3 loss 2.200 tok/s 12003", {"tokens_per_s": 12003, "loss": 2.2}),
        ("loss 2.345 lr 3e-4 tok/s 12345 ms/step 80", {"tokens_per_s": 12345, "step_time_s": 0.08, "loss": 2.345}),
        ("step 100 | 98.1 ms/step | tok/s 1,234", {"tokens_per_s": 1234, "step_time_s": 0.0981}),
        ("loss 1.0 50 ms/step 123350 tok/s 3 workers", {"tokens_per_s": 123350, "step_time_s": 0.05, "loss": 1.0}),
        ("loss 2.2 tok/s", {}),
        ("loss 2.5,1234 tok/s", {"tokens_per_s": 1234, "loss": 2.5}),
        ("[00:10<01:30,8.0it/s]", {"step_time_s": 0.125}),
        ("loss 2,31 | 1234 tok/s", {"tokens_per_s": 1234}),
        ("1,234,567.5 tok/s", {"tokens_per_s": 1234567.5}),
        ("41150,8 tok/s", {}),
        ("41'150 tok/s", {}),
        ("41\u202f150 tok/s", {}),
        ("loss 2.000 speed 41 150 tok/s", {}),
        ("tok/s: 41 150 | loss: 2", {}),
        ("tok/s: 41150 512 2.3", {"tokens_per_s": 41150}),
        ("it/s: 2.5 512", {"step_time_s": 0.4}),
        ("tok/s: 150 480 W", {"tokens_per_s": 150}),
        ("iteration 41 150 tok/s", {"tokens_per_s": 150}),
        ("lr 1e-4 750 tok/s", {"tokens_per_s": 750}),
        ("step 41 150 tok/s 80 ms/step", {"tokens_per_s": 150, "step_time_s": 0.08}),
        ("it/s 4 150 tok/s", {"tokens_per_s": 150, "step_time_s": 0.25}),
        ("it/s: 1,5", {}),
        ("step 4 time 1,5 s", {}),
        ("100 tokens/sample", {}),
        ("1000 tokens/s/GPU", {"tokens_per_s_per_gpu": 1000}),
        ("step 3 | loss 2.1 | 8828 tok/sec/gpu", {"tokens_per_s_per_gpu": 8828, "loss": 2.1}),
        ("step 3 | 80 ms/step | 8,828 tok/s/gpu | mfu 40%", {"tokens_per_s_per_gpu": 8828, "step_time_s": 0.08}),
        ("step 3 tokens/sec/GPU 8828", {"tokens_per_s_per_gpu": 8828}),
        ("tok/sec/device: 8828", {"tokens_per_s_per_gpu": 8828}),
        ("step 10 | 8828 tokens per second per gpu", {"tokens_per_s_per_gpu": 8828}),
        ("tokens per GPU per second: 8828", {"tokens_per_s_per_gpu": 8828}),
        ("tokens_per_second_per_gpu=8828", {"tokens_per_s_per_gpu": 8828}),
        ("8.8k tok/gpu/s", {"tokens_per_s_per_gpu": 8800}),
        ("step 10 | 5,000 tokens/s per GPU", {"tokens_per_s_per_gpu": 5000}),
        ("step 10 tokens/s per GPU: 5000", {"tokens_per_s_per_gpu": 5000}),
        ("5000 tokens/s (per device)", {"tokens_per_s_per_gpu": 5000}),
        ("70,000 tok/s (8,750 tok/s/gpu)", {"tokens_per_s": 70_000, "tokens_per_s_per_gpu": 8750}),
        ("'train_samples_per_second': 12", {}),
    ],
)
def test_rates_are_read_from_common_lines(line: str, rates: dict[str, float]) -> None:
    assert read_rates(line) == pytest.approx(rates)


@pytest.mark.parametrize(
    "line",
    [
        "12 samples/s per GPU",
        "step 10 tok/s: 1.2G",
        "step 10 | loss 2.3 | elapsed time: 360 s",
    ],
)
def test_samples_of_one_gpu_and_a_time_of_something_else_are_not_the_jobs(line: str) -> None:
    assert read_rates(line) == {}


@pytest.mark.parametrize("line", ["0" * 60_000 + " x /s", "1," * 30_000 + "/s", "1" * 60_000 + "x tok/s"])
def test_a_long_line_is_read_quickly(line: str) -> None:
    started_s = time.process_time()
    read_rates(line)
    assert time.process_time() - started_s < 1


def test_a_line_has_the_time_of_its_step_and_the_loss_of_training() -> None:
    assert read_rates("step 10 | data time 3ms | step time 412ms") == {"step_time_s": pytest.approx(0.412)}
    assert read_rates("step 5, val loss 3.1 | train loss 2.2, 80 ms/step.")["loss"] == 2.2
    assert read_rates("Step 10: 4 it/s, loss 2.34.") == {"step_time_s": 0.25, "loss": 2.34}


def test_numbers_of_steps_have_commas_and_a_progress_bar_does_not_end_a_log() -> None:
    reader = CommonLogReader()
    bar = "Loading checkpoint shards: 100%|##########| 4/4 [00:01<00:00, 3.10it/s]"
    lines = [bar, *(f"step {n:,} 80 ms/step" for n in (999, 1000, 1001, 1001))]
    assert [step.number for step in map(reader.feed, lines) if step] == [999, 1000, 1001]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train_step={} 80 ms/step", [10, 20, 30]),
        ("[{}/4000] loss 2 80 ms/step", [10, 20, 30]),
        ("Epoch [1/10], Step [{}/40] 80 ms/step", [10, 20, 30]),
        ("epoch 1/100 {}/4000 80 ms/step", [10, 20, 30]),
        ("it {} | 80 ms/step", [10, 20, 30]),
        ("trainer/global_step: {} 80 ms/step", [10, 20, 30]),
        ("80 ms/step 12{} tok/s", [1, 2, 3]),
        ("12 it/s, total_steps=4000", [1, 2, 3]),
        ("80 ms/step ({}/4000)", [10, 20, 30]),
        ("[3/64] loss 2 80 ms/step", [1, 2, 3]),
        ("rank 3/256 80 ms/step", [1, 2, 3]),
        ("2026/11/28 80 ms/step", [1, 2, 3]),
    ],
)
def test_steps_have_the_numbers_that_the_log_prints(line: str, expected: list[int]) -> None:
    reader = CommonLogReader()
    assert [step.number for step in (reader.feed(line.format(n)) for n in (10, 20, 30)) if step] == expected


def test_ranks_that_print_a_step_apart_are_one_log() -> None:
    reader = CommonLogReader()
    numbers = [n - late for n in range(10, 100, 10) for late in (0, 0, 10) if n > late]
    steps = [step.number for step in (reader.feed(f"step {n} 80 ms/step") for n in numbers) if step]
    assert steps == list(range(10, 100, 10))


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        (
            [f"Epoch {e} [{i}/200] 1.2 s/it loss: 2.0" for e in (1, 2, 3) for i in (100, 200)],
            [100, 200, 300, 400, 500, 600],
        ),
        ([f"Epoch {e} | 1000/1000 | 1.2 s/it loss: 2.0" for e in (1, 2, 3)], [1000, 1001, 1002]),
        ([f"Epoch 1 [{i}/200] 1.2 s/it loss: 2.0" for i in (100, 100, 200, 200)], [100, None, 200, None]),  # two ranks
    ],
)
def test_steps_of_epochs_are_counted_on_and_those_of_other_ranks_are_not(
    lines: list[str], steps: list[int | None]
) -> None:
    reader = CommonLogReader()
    assert [step and step.number for step in map(reader.feed, lines)] == steps
