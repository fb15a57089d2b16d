"""`python -m sweeper diagnose`: what it reads from logs, and what it reports."""

import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.diagnose import FAULTS, findings, inject, write_log
from sweeper.commands.diagnose.main import COMMAND, DiagnoseRequest, diagnose, examine, main, read_sources
from tests.conftest import REPOSITORY
from workloads.api.errors import UserInputError

PUBLIC = REPOSITORY.parent / "shared/reference/logs"
SAMPLES = REPOSITORY / "tests/samples/logs"
STAMP = re.compile(r"\d{4}-\d\d-\d\d [\d:]+,\d+ - root - INFO - ")  # the timestamp of a line of torchtitan


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, 0.005, steps))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "train.log"


def test_nothing_unusual_is_an_answer(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(log, 2.0 * noise(200), ranks=1, slow_rank=1.0, saves_every=0)
    assert diagnose(DiagnoseRequest(logs=[str(log)])) == 0
    assert "steps of Megatron-LM after the warm-up, 2" in (out := capsys.readouterr().out) and "nothing unusual" in out


def test_too_few_steps_are_no_verdict(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(log, 2.0 * noise(20), ranks=1, slow_rank=1.0, saves_every=0)
    assert diagnose(DiagnoseRequest(logs=[str(log)])) == 3
    assert "nothing unusual" not in capsys.readouterr().out


def test_pauses_have_the_cause_that_is_printed_before_them(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times_s = noise(200) * (1 + 2.0 * (np.arange(1, 201) % 25 == 0))
    for saves_every, cause in ((25, "Likely: checkpoints, printed before 8 of 8"), (0, "Likely: unknown")):
        write_log(log, times_s, ranks=1, slow_rank=1.0, saves_every=saves_every)
        assert diagnose(DiagnoseRequest(logs=[str(log)])) == 1
        assert "! pauses every 25 steps" in (out := capsys.readouterr().out) and cause in out


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"model": "llama3_8b"}, "^model=llama3_8b: .* also needs hardware= and gpus="),
        ({"hardware": "h100", "gpus": 8}, "^hardware=h100 gpus=8: .* also needs model="),
    ],
)
def test_a_part_of_a_plan_is_refused(log: Path, given: dict[str, Any], missing: str) -> None:
    with pytest.raises(UserInputError, match=missing):
        diagnose(DiagnoseRequest(logs=[str(log)], **given))


def test_findings_have_the_step_numbers_of_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times_ms = 80 * noise(400) * np.where(np.arange(400) < 250, 1.0, 1.2)
    log.write_text("".join(f"[{10 * n + 10}/4000] {time_ms:.2f} ms/step\n" for n, time_ms in enumerate(times_ms)))
    assert diagnose(DiagnoseRequest(logs=[str(log)])) == 1
    assert "from step 2510 on" in capsys.readouterr().out


@pytest.mark.parametrize(
    "prefix", ["[rank{}]:", "[default{}]:", "{}: ", "node-{}: ", "[20251121 12:10:29][rank-{}/4] "]
)
def test_ranks_and_hosts_that_lines_name_are_told_apart(log: Path, prefix: str) -> None:
    write_log(log, noise(50), ranks=1, slow_rank=1.0, saves_every=0)
    lines = log.read_text().splitlines()
    log.write_text("".join(f"{prefix.format(rank)}{line}\n" for line in lines for rank in range(3)))
    assert [len(source.steps) for source in read_sources([log])] == [50, 50, 50]


def test_each_log_is_a_source_and_the_slow_one_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = [tmp_path / f"host{number}.log" for number in range(3)]
    for number, path in enumerate(logs):
        slower = 1.05 if number == 1 else 1.0
        write_log(path, slower * 2.0 * noise(100, number), ranks=1, slow_rank=1.0, saves_every=0)
    assert diagnose(DiagnoseRequest(logs=[str(path) for path in logs])) == 1
    assert "! slow source: host1.log takes 4.9% longer than the others" in capsys.readouterr().out


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public logs are not here")
@pytest.mark.parametrize(("hardware", "text"), [("h200", "in its band"), ("a100_40gb", "not compared with a plan:")])
def test_a_log_is_compared_with_the_plan_of_its_layout(
    hardware: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(PUBLIC / "40_titan_full_noprefix.log"), "model=llama3_8b", f"hardware={hardware}", "gpus=8"]
    assert COMMAND.run(words) in (1, 3)
    assert text in capsys.readouterr().out


@pytest.mark.parametrize(("hardware", "gpus", "code"), [("h10", 8, 2), ("h100", 8, 3)])
def test_a_comparison_that_was_asked_for_and_not_made_is_no_pass(
    hardware: str, gpus: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.log"
    write_log(path, 2.0 * noise(100, 1), ranks=1, slow_rank=1.0, saves_every=0)  # its layout is not in it
    with pytest.raises(SystemExit) as ended:
        main([str(path), "model=llama3_8b", f"hardware={hardware}", f"gpus={gpus}"])
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert ("Did you mean hardware=h100?" in shown.err) == (code == 2)
    assert ("not compared with a plan:" in shown.out) == (code == 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"hello\n", "unknown format. Supported: log of .*torchtitan.*; .* `step 7 80 ms/step` of any"),
        (b"", "is empty"),
        (b"\x89PNG", "is not text"),
    ],
)
def test_a_file_that_is_no_log_is_refused_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UserInputError, match=f"x: {reason}"):
        diagnose(DiagnoseRequest(logs=[str(tmp_path / "x")]))


def test_a_missing_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMAND.main([str(tmp_path / "none")])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"sweeper diagnose: {tmp_path}/none: No such file or directory\n"


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_an_injected_fault_is_named_and_a_clean_log_is_not(fault: str, log: Path) -> None:
    found = findings(np.random.default_rng(5), fault, log)
    assert [text.startswith(FAULTS.get(fault, "")) for text in found] == [True] * bool(fault)


def test_lines_of_a_program_without_a_known_format_are_diagnosed(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times_ms = [80 + (n % 7) / 5 + (20 if n >= 120 else 0) for n in range(200)]
    lines = [f"step {n + 1} loss {3 - n / 100:.2f} {time:.1f} ms/step" for n, time in enumerate(times_ms)]
    log.write_text("\n".join(lines) + "\n")
    assert diagnose(DiagnoseRequest(logs=[str(log)])) == 1
    printed = capsys.readouterr().out
    assert "steps after the warm-up" in printed
    assert "step 121" in printed


def diagnosed(log: Path, lines: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    log.write_text("\n".join(lines) + "\n")
    return diagnose(DiagnoseRequest(logs=[str(log)])), capsys.readouterr().out


def test_numbers_of_steps_before_a_colon_are_not_ranks(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("{}", "step{}"):
        code, printed = diagnosed(
            log, [f"{label.format(n)}: loss 2.5 {80 + n % 3} ms/step" for n in range(100)], capsys
        )
        assert code == 0 and "100 steps after the warm-up" in printed and "nothing unusual" in printed


def test_pauses_of_a_program_that_prints_every_tenth_step_are_of_one_step_each(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = []
    for n in range(0, 2000, 10):
        lines += [f"step {n}: train loss 3.0, val loss 3.1"] if n % 100 == 0 else []
        lines.append(f"iter {n}: loss 3.0, time {9120 if n % 100 == 0 else 1650 + n % 7}.00ms")
    code, printed = diagnosed(log, lines, capsys)
    assert code == 1 and "pauses every 100 steps take 4.1% of the time" in printed and "Likely: validation" in printed


def test_a_slower_restart_and_a_nan_loss_are_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "iteration {:8d}/    5000 | consumed samples: 256 | elapsed time per iteration (ms): {:.1f} | lm loss: {} |"
    ran = [(n, 2000 + n % 7, "2.5E+00") for n in range(1, 121)]
    ran += [(n, 2500 + n % 7, "nan" if n > 150 else "2.5E+00") for n in range(80, 160)]
    code, printed = diagnosed(log, [line.format(*row) for row in ran], capsys)
    assert code == 1 and "of the longest of 2 starts" in printed
    assert "restart: steps are slower by 25.0% since start 2 than in start 1" in printed
    assert "loss: it is nan in 9 of 159 steps, first in step 151" in printed


def test_a_rank_that_ends_before_the_others_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"[rank{r}]: step {n} {80 + n % 3} ms/step" for n in range(1, 101) for r in (0, 1) if r == 0 or n < 60]
    code, printed = diagnosed(log, lines, capsys)
    assert code == 1 and "ended source: rank1 ends at step 59, others at 100" in printed


def test_ranks_that_print_rarely_and_lines_after_the_training_end_nothing(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        f"[rank{r}]: step {n} {80 + n % 3} ms/step" for n in range(1, 96) for r in range(4) if r == 0 or n % 50 == 0
    ]
    code, printed = diagnosed(log, [*lines, "Training finished: 95 steps, average 2.0 it/s"], capsys)
    assert code == 0 and "nothing unusual" in printed


def test_a_validation_is_not_a_step_and_a_nan_loss_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for n in range(1, 201):
        lines += [f"eval step {n} | val loss 2.4 | 3.2 it/s"] if n % 40 == 0 else []
        lines.append(f"step {n} loss {'nan' if n > 150 else 2.5} {80 + n % 3} ms/step")
    code, printed = diagnosed(log, lines, capsys)
    assert code == 1 and "200 steps" in printed and "loss: it is nan in 50 of 200 steps, first in step 151" in printed
    assert "pauses" not in printed


def test_a_second_start_of_any_program_goes_on_counting(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"step {n} {ms + n % 3} ms/step" for ms in (80, 100) for n in range(1, 301)]
    code, printed = diagnosed(log, lines, capsys)
    assert code == 1 and "600 steps" in printed and "jump: steps are slower by 24" in printed and "step 301" in printed


RATE_LINES = {  # of a step's number and time
    "torchtitan": (
        lambda n, s: f"[titan] - \x1b[31mstep: {n:2}  \x1b[32mloss: 10.1  memory: 38GiB(41%)  tps: {16384 / s:,.0f}",
        "tokens/s per GPU",
    ),
    "torchtitan without the escape character": (
        lambda n, s: (
            f"[rank0]: - [31mstep: {n:2}  [32mloss: 10.1  [38;2;1;2;3mmemory: 38GiB(41%)  [34mtps: {16384 / s:,.0f}"
        ),
        "tokens/s per GPU",
    ),
    "torchtitan of 2024": (
        lambda n, s: f"- INFO - step: {n:2}  loss: 10.1  memory: 38GiB(41%)  wps: {16384 / s:,.0f}  mfu: 41.05%",
        "tokens/s per GPU",
    ),
    "Primus": (
        lambda n, s: f"[rank-0/8][INFO ] step: {n:2}  loss: 10.1  memory: 38GiB(41%)  tps: {16384 / s:,.0f}",
        "tokens/s per GPU",
    ),
    "NeMo Automodel": (
        lambda n, s: f"root | step {n} | epoch 0 | loss 2.5 | mem 20.1 GiB | tps {65536 / s:.2f}({8192 / s:.2f}/gpu)",
        "tokens/s",
    ),
    "DeepSpeed": (
        lambda n, s: f"[timer.py:260:stop] {n}/{n}, SamplesPerSec={8 / s:.4f}, CurrSamplesPerSec={8 / s:.4f}",
        "samples/s",
    ),
    "Megatron-LM": (
        lambda n, s: f" iteration {n}/ 400 | consumed samples: {n} | throughput per GPU (TFLOP/s/GPU): {800 / s:.1f} |",
        "TFLOP/s per GPU",
    ),
    "MaxText": (
        lambda n, s: (
            f"completed step: {n}, seconds: {s:.3f}, TFLOP/s/device: 400, Tokens/s/device: {16384 / s:.3f}, loss: 9"
        ),
        "tokens/s per GPU",
    ),
    "torchtune": (
        lambda n, s: f"Step {n} | loss:2.5 lr:1e-5 tokens_per_second_per_gpu:{16384 / s:.2f}",
        "tokens/s per GPU",
    ),
    "axolotl": (
        lambda n, s: f"{{'loss': '2.5', 'tokens/train_per_sec_per_gpu': '{16384 / s:.2f}', 'epoch': '0.1'}}",
        "tokens/s per GPU",
    ),
}


@pytest.mark.parametrize("program", RATE_LINES)
def test_a_rate_replaces_missing_times(program: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, unit = RATE_LINES[program]
    times_s = 2.0 * noise(120) * np.where(np.arange(120) < 60, 1.0, 1.1)
    code, printed = diagnosed(log, [line(n + 1, time_s) for n, time_s in enumerate(times_s)], capsys)
    assert code == 1 and f" {unit}\n! jump: steps are slower by 1" in printed and "from step 61 on" in printed
    assert printed.count("!") == 1


@pytest.mark.parametrize("fault", ["", "drift", "checkpoints", "slow rank", "late rank"])
def test_faults_are_named_in_a_log_with_rates_instead_of_timestamps(fault: str, log: Path) -> None:
    random = np.random.default_rng(3)
    times_s, period = inject(random, 2.0 * noise(200), fault)
    slower, late = (1.1 if "rank" in fault else 1.0), (100 if fault == "late rank" else 0)
    write_log(log, times_s, 4, slower, period if fault == "checkpoints" else 0, late)
    log.write_text(STAMP.sub("", log.read_text()))
    first, _, found = examine(read_sources([log]))
    assert first.measure == "tokens_per_s_per_gpu" and len(found) == bool(fault)
    assert all(text.startswith(FAULTS[fault]) for text in found)
    assert "rank3" in found[0] if "rank" in fault else "checkpoints, printed" in str(found) or fault != "checkpoints"


@pytest.mark.parametrize("step_s", [0.7, 2.1, 5.03])
def test_timestamps_in_seconds_give_no_pauses_and_a_rate_is_preferred(
    step_s: float, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, usual in ((f"  tps: {4096 / step_s:,.0f}", f"{4096 / step_s:,.0f} tokens/s per GPU"), ("", " s each")):
        stamps = (datetime(2026, 5, 18) + timedelta(seconds=float(s)) for s in np.cumsum(step_s * noise(300)))
        lines = [
            f"{at:%Y-%m-%d %H:%M:%S} - step: {n}  loss: 2.5  memory: 9GiB(9%){rate}" for n, at in enumerate(stamps)
        ]
        code, printed = diagnosed(log, lines, capsys)
        assert code == 0 and usual.replace(",", "") in printed.replace(",", "") and "nothing unusual" in printed


@pytest.mark.parametrize(
    ("hardware", "gpus", "text"), [("h100", 8, "within the plan's band: 0.7"), ("b200", 8, "slower")]
)
def test_a_rate_is_compared_with_the_plan(
    hardware: str, gpus: int, text: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log.write_text(STAMP.sub("", (SAMPLES / "titan.log").read_text()))
    COMMAND.run([str(log), "model=llama3_8b", f"hardware={hardware}", f"gpus={gpus}"])
    assert "5,851 tokens/s per GPU" in (printed := capsys.readouterr().out) and text in printed
    log.write_text(log.read_text().replace("tps:", "unread:"))
    COMMAND.run([str(log), "model=llama3_8b", f"hardware={hardware}", f"gpus={gpus}"])
    assert "not compared with a plan: the log has TFLOP/s per GPU, but" in capsys.readouterr().out


def test_a_log_without_steps_is_named_and_a_progress_bar_is_not_a_time(
    log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(log, 2.0 * noise(100), ranks=1, slow_rank=1.0, saves_every=0)
    (other := log.with_name("rank1.log")).write_text("starting\n")
    assert diagnose(DiagnoseRequest(logs=[str(log), str(other)])) == 0
    assert f"\n  without a step's time or rate: {other}\n" in capsys.readouterr().out
    (second := log.parent / "node 2").mkdir()
    write_log(second / log.name, 2.0 * noise(100), ranks=1, slow_rank=1.0, saves_every=0)
    assert diagnose(DiagnoseRequest(logs=[str(log), str(second / log.name)])) == 0
    assert "of 2 ranks or hosts, " in (printed := capsys.readouterr().out) and "without a step" not in printed
    other.write_text("".join(f"  {n}%|█    | {n}/100 [00:{n:02}<01:00,  1.00s/it]\n" for n in range(50)))
    with pytest.raises(
        UserInputError, match=r"no line has a step's time or rate, .*; the times of a progress bar are av"
    ):
        diagnose(DiagnoseRequest(logs=[str(other)]))
