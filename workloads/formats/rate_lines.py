"""Read rates from lines that training scripts print, for logs that match no trainer's format.

A line counts as a step if it contains a number with the unit of a rate or of a step time, such as `1,234 tok/s`,
`tokens/sec: 1.2k`, `3.4 it/s`, `412 ms/step`, `time 98.1ms`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from workloads.formats.logs import LONGEST_LINE, LogReader, Step, parse_number, strip_colors

# A number whose groups or decimals are separated otherwise, such as 41'150 or 1,5, is not read in part.
_NUMBER = r"(?<!\d[,'\u00a0\u202f])(\d+(?:,\d{3})*(?:\.\d+)?(?:[eE][-+]?\d+)?)(?![\d.,'\u00a0\u202f]*\d)\s*([kKM]?)"
_SECOND = r"(?:s|secs?|seconds?)\b"
_STEPWISE = r"(?:/|_per_| per )(?:it|iter|iteration|step|batch)\b"
_PER_DEVICE = re.compile(r"\s*[(,]?\s*(?:per|/)[ _]?(?:gpu|device|rank)|[A-Za-z_]", re.IGNORECASE)  # not the job's rate
# The unit before or after the number, this project's metric, and a function that converts to the metric's unit.
_UNITS: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    (rf"(?:tok|toks|tokens?)(?:/|_per_| per ){_SECOND}", "tokens_per_s", float),
    (rf"(?:samples?|examples?|sequences?|seqs?|imgs?|images?)(?:/|_per_| per ){_SECOND}", "samples_per_s", float),
    (rf"(?:it|its|iters?|iterations?|steps?)(?:/|_per_| per ){_SECOND}", "step_time_s", lambda rate: 1 / rate),
    (rf"(?:ms|msecs?|milliseconds?){_STEPWISE}", "step_time_s", lambda ms: ms / 1e3),
    (rf"(?:s|secs?|seconds?){_STEPWISE}", "step_time_s", float),
)
_RATES = [
    (re.compile(pattern), name, convert)
    for unit, name, convert in _UNITS
    for pattern in (
        rf"(?<![\w/]){unit}['\"]?\s*[:=]\s*{_NUMBER}",
        rf"(?<![\w.])(?<!^step )(?<!^iter )(?<![^/_]step )(?<![^/_]iter ){_NUMBER}\s*{unit}(?!/)",
        rf"(?<![\w/]){unit}\s+{_NUMBER}",
    )
]
_TIME = re.compile(
    r"(?:\b(?:step|iter|iteration|batch)[ _]?time|(?<![\w-])(?<![A-Za-z] )(?:time|dt))"
    r"['\"]?\s*[:= ]\s*(\d+(?:,\d{3})*(?:\.\d*)?)(?![\d.,']*\d)\s*(ms|s)\b"
)
_STEP = re.compile(
    r"(?<![\w-])(?<!total )(?<!max )(?:global_step|step|iteration|iter)s?['\"]?[\s:=#]{1,4}(\d+)", re.IGNORECASE
)
_LOSS = re.compile(
    r"(?<![\w-])(?<!val )(?<!eval )(?<!validation )"
    r"(?:train(?:ing)?[_ ])?loss['\"]?\s*[:= ]\s*([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)",
    re.IGNORECASE,
)
_HINT = re.compile(r"/s|/it|/step|/batch|per[_ ]|time|dt")  # lines without a match are skipped


def read_rates(line: str) -> dict[str, float]:
    """Return the line's rates and loss under this project's names, or an empty dict if no rate is above zero."""
    if not _HINT.search(line):
        return {}
    rates: dict[str, float] = {}
    for pattern, name, convert in _RATES:
        match = None if name in rates else pattern.search(line)
        if match and _PER_DEVICE.match(line, match.end()):
            continue
        if match and (value := parse_number(match[1] + match[2].upper())[0]) > 0:
            rates[name] = convert(value)
    if "step_time_s" not in rates and (match := _TIME.search(line)):
        seconds = parse_number(match[1])[0] * (1e-3 if match[2] == "ms" else 1.0)
        is_of_step = rates or _STEP.search(line)
        rates |= {"step_time_s": seconds} if seconds > 0 and is_of_step else {}
    if rates and (loss := _LOSS.search(line)):
        rates["loss"] = float(loss[1])
    return rates


@dataclass
class CommonLogReader(LogReader):
    """Reads the trainers' formats, and falls back to reading rates from lines if no format matches."""

    _count: int = 0

    def feed(self, line: str) -> Step | None:
        if (step := super().feed(line)) or self.kind or self._pending or self.has_progress_bar:
            return step
        line = strip_colors(line[:LONGEST_LINE])
        if not (rates := read_rates(line)):
            return None
        number = int(match[1]) if (match := _STEP.search(line)) else None
        if number is not None and number == self._last:  # another rank's line
            return None
        self._count, self._last = self._count + 1, -1 if number is None else number
        return Step(self._count if number is None else number, rates)
