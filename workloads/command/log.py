"""The log of a program that runs: its steps, and the lines after which the trial ends."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from workloads.api.contract import ProgramFailed, Scalar
from workloads.command import STEP_TIME_UNITS_S
from workloads.formats.logs import LogReader, Step
from workloads.formats.printed import NUMBERS, PrintedConfig

# A training loss that is not a number, as trainers print it: `lm loss: NAN |`, `loss:      nan`, `'loss': nan`,
# `train_loss=-inf`. The loss of an evaluation does not end the training.
_BAD_LOSS = re.compile(
    r"(?<![\w-])(?<!eval )(?<!val )(?<!test )(?<!validation )"
    r"(?:reduced_train_|train(?:ing)?[_ ])?loss['\"]?(?:\s*[:=]\s*|\s+)(?:tensor\()?[-+]?(nan|inf(?:inity)?)\b",
    re.IGNORECASE,
)
_STEP_NUMBER = re.compile(r"\b(?:global_step|step|iteration|iter)['\"]?[\s:=]{1,12}(\d+)", re.IGNORECASE)


@dataclass
class RegexLogReader:
    """Reads a log by the regular expressions of `command.log`. A step is complete when all of them have matched."""

    expressions: Mapping[str, str]
    reported_config: dict[str, Scalar] = field(default_factory=dict)
    kind: str = "command.log"
    device: str = ""
    _pending: dict[str, float] = field(default_factory=dict)
    _count: int = 0

    def feed(self, line: str) -> Step | None:
        """Return the step that the line completes, if it completes one."""
        for name, expression in self.expressions.items():
            match = re.search(expression, line)
            value = _parse_number(match[1]) if match else None
            if value is not None and (math.isfinite(value) or name == "loss"):
                metric = "step_time_s" if name in STEP_TIME_UNITS_S else name
                self._pending[metric] = value * STEP_TIME_UNITS_S.get(name, 1.0)
        if len(self._pending) < len(self.expressions):
            return None
        metrics, self._pending, self._count = self._pending, {}, self._count + 1
        return Step(self._count, metrics)


@dataclass
class ProgramLog:
    """The steps and the configuration that were read from a program's log.

    Attributes:
        warmup: steps that are not measured.
        config: the configuration that the program prints, except on the lines of warm-up steps.
        config_of_steps: the configuration on the lines of measured steps.
    """

    reader: LogReader | RegexLogReader
    warmup: int
    steps: list[Step] = field(default_factory=list)
    config: PrintedConfig = field(default_factory=PrintedConfig)
    config_of_steps: PrintedConfig = field(default_factory=PrintedConfig)

    @property
    def reported_config(self) -> dict[str, Scalar]:
        """The configuration that the program prints; of several values of one name the last."""
        return {name: values[-1] for name, values in self.config.values.items()} | self.reader.reported_config

    def feed(self, line: str) -> Step | None:
        """Return the step that the line completes, if it completes one.

        Raises:
            ProgramFailed: the training loss is not a number.
        """
        step = self.reader.feed(line)
        if step:
            self.steps.append(step)
        self._read_config(line, step)
        match = _BAD_LOSS.search(line)
        loss = float(match[1]) if match else step.metrics.get("loss", 0.0) if step else 0.0
        if not math.isfinite(loss):
            kind = "nan" if math.isnan(loss) else "infinite"
            raise ProgramFailed(f"loss is {kind} at step {self._step_number(line, step)}")
        return step

    def _read_config(self, line: str, step: Step | None) -> None:
        """Read what the line prints of the configuration. A batch may ramp up on the lines of warm-up steps."""
        if step is None:
            self.config.feed(line)
        elif len(self.steps) > self.warmup:
            sizes = {name: int(step.metrics[name]) for name in NUMBERS if name in step.metrics}
            self.config_of_steps.add({**self.config.feed(line), **sizes})

    def _step_number(self, line: str, step: Step | None) -> int:
        """Return the number of the line's step: the known format's, else a printed one, else the steps so far."""
        if step and isinstance(self.reader, LogReader):
            return step.number
        if printed := _STEP_NUMBER.search(line):
            return int(printed[1])
        return step.number if step else len(self.steps) + 1


def _parse_number(text: str | None) -> float | None:
    """Return the number, which may be infinite or nan; None for other text."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None
