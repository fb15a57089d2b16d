"""Programs in the place of trainers, and one trial of such a program."""

from typing import Any

from tests.support.trainer_logs import MEGATRON
from workloads.api.contract import Measurement, Rank
from workloads.api.trial import run_trial

STEPS = f"""
import sys, time
for n in range(1, 200):
    print({MEGATRON!r}.format(n=n, samples=4 * n, ms=50.0 if n > 2 else 900.0, tflops=1.0, loss=5 / n), flush=True)
    time.sleep(0.002)
"""


def escape(program: str) -> str:
    """Return the program as a template without placeholders."""
    return program.replace("{", "{{").replace("}", "}}")


def run_program(
    program: str, rank: Rank | None = None, parameters: dict[str, Any] | None = None, **changes: Any
) -> Measurement:
    """Run a trial of `python -c program` with three steps of warm-up and five measured ones."""
    settings = {"run": ["{python}", "-c", escape(program)], "warmup": 3, "steps": 5, **changes}
    return run_trial("command", parameters or {}, rank or Rank(), settings)
