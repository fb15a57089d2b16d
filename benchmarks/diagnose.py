"""Simulate how often `sweeper diagnose` finds something in a clean log, and whether it names injected faults.

    python -m benchmarks.diagnose [--logs 300]

Writes logs in the formats of torchtitan (a line per rank) and Megatron-LM, and reads them as the command does. Steps
have log-normal noise of 0.2 to 2%, independent or correlated, a warm-up, and an occasional slow step, as is common. In
a last kind of log, each rank's steps also have noise of their own. Writes benchmarks/results/diagnose.md.
"""

import argparse
import tempfile
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from benchmarks.acceptance import upper_bound
from benchmarks.noise import autoregressive
from sweeper.commands.diagnose.main import examine, read_sources

PAGE = Path(__file__).parent / "results/diagnose.md"
FAULTS = {  # the first words of the correct finding
    "drift": "drift:",
    "jump": "jump:",
    "phase": "slow phase:",
    "checkpoints": "pauses every",
    "collections": "pauses every",
    "slow rank": "slow source:",
    "late rank": "slow source:",
}
RANK_SPREAD, CORRELATIONS = 0.02, (0.9, 0.95, 0.99)  # of each rank's own noise from step to step
START = datetime(2026, 5, 18, 16)


def draw_times(random: np.random.Generator, steps: int) -> np.ndarray:
    """Return the step times of a clean training run, in seconds."""
    noise = autoregressive(float(random.choice([0.0, 0.3, 0.6, 0.9])), float(random.choice([0.002, 0.005, 0.01, 0.02])))
    slow = random.random(steps) < random.choice([0.0, 0.002, 0.005])
    times_s = random.uniform(0.5, 8) * noise(1, steps, random)[0] * (1 + slow * random.exponential(0.5, steps))
    times_s[0] *= 10
    return times_s


def inject(random: np.random.Generator, times_s: np.ndarray, fault: str) -> tuple[np.ndarray, int]:
    """Return the times with a fault of 5 to 20%, or with five or more pauses of 0.3 to 3 steps, and the period."""
    place, share = np.arange(len(times_s)), random.uniform(0.05, 0.2)
    begin = int(random.uniform(0.2, 0.6) * len(place))
    period = int(random.choice([period for period in (10, 25, 40) if 5 * period < len(place)]))
    slower = {
        "drift": share * place / len(place),
        "jump": share * (place >= begin),
        "phase": share * ((place >= begin) & (place < begin + len(place) // 4)),
    }
    pauses = random.uniform(0.3, 3) * ((place + 1) % period == 0)
    return times_s * (1 + slower.get(fault, pauses if fault in ("checkpoints", "collections") else 0.0)), period


def write_log(
    path: Path,
    times_s: np.ndarray,
    ranks: int,
    slow_rank: float,
    saves_every: int,
    slow_from: int = 0,
    correlation: float | None = None,
) -> None:
    """Write a torchtitan log with a line per rank, or a Megatron-LM log for one rank; saves are printed. The
    last rank falls behind from step `slow_from` on. With a correlation, each rank's steps have noise of their own."""
    at, behind, lines = START, timedelta(0), list[str]()
    random = np.random.default_rng(len(times_s))
    noise = random.normal(0, 0.003, (ranks, len(times_s)))  # of each rank's lines
    if correlation is not None:
        noise += np.cumsum(autoregressive(correlation, RANK_SPREAD)(ranks, len(times_s), random) - 1, axis=1)
    for number, time_s in enumerate(times_s, start=1):
        if saves_every and number % saves_every == 0:
            lines.append(f"[{at:%Y-%m-%d %H:%M:%S}] saving checkpoint at iteration {number}")
        at += timedelta(seconds=float(time_s))
        behind += timedelta(seconds=float(time_s)) * (slow_rank - 1) * (number > slow_from)
        for rank in range(ranks):
            is_slow = rank == ranks - 1 and number > slow_from
            own_s = float(time_s * (1 + noise[rank, number - 1]) * (slow_rank if is_slow else 1.0))
            own = at + behind * (rank == ranks - 1) + timedelta(seconds=float(time_s * noise[rank, number - 1]))
            stamp = f"{own:%Y-%m-%d %H:%M:%S},{own.microsecond // 1000:03d}"
            lines.append(
                f"[rank{rank}]:[titan] {stamp} - root - INFO - step: {number:2d}  loss:  6.2250  "
                f"memory:  9.46GiB(64.9%)  tps: {8192 / own_s:,.0f}  tflops: 300.00  mfu: 30.00%"
                if ranks > 1
                else f" [{at:%Y-%m-%d %H:%M:%S}] iteration {number:8d}/    5000 | consumed samples: {256 * number} | "
                f"elapsed time per iteration (ms): {1e3 * time_s:.1f} | global batch size:   256 | lm loss: 2.5E+00 |"
            )
    path.write_text("\n".join(lines) + "\n")


def findings(random: np.random.Generator, fault: str, path: Path, correlation: float | None = None) -> list[str]:
    """Return the findings in a new log with this fault, or in a clean log if it is empty."""
    is_rank = fault in ("slow rank", "late rank")
    ranks = int(random.choice([2, 8])) if is_rank or correlation is not None or random.random() < 0.5 else 1
    steps = int(random.integers(100, 800 if ranks == 1 else 300))
    times_s, period = inject(random, draw_times(random, steps), fault)
    slower = 1 + random.uniform(0.03, 0.1) * (2 if fault == "late rank" else 1) if is_rank else 1.0
    slow_from = int(random.uniform(0.3, 0.7) * steps) if fault == "late rank" else 0
    write_log(path, times_s, ranks, slower, period if fault == "checkpoints" else 0, slow_from, correlation)
    return examine(read_sources([path]))[2]


def build_page(logs: int) -> str:
    random, false_alarms, named, wrong = np.random.default_rng(1), 0, 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        for _ in range(logs):
            found = findings(random, "", path)
            false_alarms += bool(found)
            wrong.update(f"clean: {text.partition(':')[0]}" for text in found)
        faults = [fault for fault in FAULTS for _ in range(max(1, logs // 30))]
        for fault in faults:
            found = findings(random, fault, path)
            right = len(found) == 1 and found[0].startswith(FAULTS[fault])
            right &= fault != "checkpoints" or "checkpoints, printed" in found[0]
            named += right
            if not right:
                wrong[f"{fault}: {' and '.join(text.partition(':')[0] for text in found) or 'nothing'}"] += 1
        alarms = {one: sum(bool(findings(random, "", path, one)) for _ in range(logs)) for one in CORRELATIONS}
    rows = [
        f"| {logs} clean of 2 or 8 ranks, each with its own noise of {RANK_SPREAD:.0%}, correlation {one} | "
        f"{count}, 95% at most {upper_bound(count, logs):.1%} |\n"
        for one, count in alarms.items()
    ]
    missed = "; ".join(f"{text} ({number})" for text, number in wrong.items()) or "none"
    return (
        f"# Findings of `sweeper diagnose` in simulated logs\n\n`python -m benchmarks.diagnose --logs {logs}`\n\n"
        f"| logs | with a finding |\n|---|---|\n"
        f"| {logs} clean | {false_alarms}, 95% at most {upper_bound(false_alarms, logs):.1%} |\n"
        f"| {len(faults)} with a fault | {named} named correctly, no other finding ({named / len(faults):.0%}) |\n"
        f"{''.join(rows)}\n"
        f"Faults, an equal number of logs each: {', '.join(FAULTS)}. Wrong: {missed}.\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=int, default=300)
    page = build_page(parser.parse_args().logs)
    PAGE.write_text(page)
    print(page)
