"""Read rates from lines that training scripts print, for logs that match no trainer's format.

A line counts as a step if it contains a number with the unit of a rate or of a step time, such as `1,234 tok/s`,
`tokens/sec: 1.2k`, `3.4 it/s`, `412 ms/step`, `time 98.1ms`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from workloads.formats.logs import LONGEST_LINE, LogReader, Step, parse_number, strip_colors

# A number whose groups or decimals are separated otherwise, such as 41'150 or 1,5, is not read in part.
_NUMBER = r"(?P<number>\d++(?:,\d{3})*+(?:\.\d++)?(?:[eE][-+]?\d++)?)(?![.,'\u00a0\u202f]?\d)(?:\s*(?P<suffix>[kKM]))?"
_LONGEST_KEY = 40  # characters before a number that are examined
_SEPARATED = re.compile(r"\d[,'\u00a0\u202f]$")
_OF_LIST = re.compile(r"(?:\.\d+|:\d\d|(?:step|iter|iteration)['\"]?[\s:=]+\d+),$")  # the comma follows a whole value
_COUNTER = re.compile(
    r"(?<![/\w])(?<!per )(?!\w*per_)(?:\w*_)?(?:step|iter|iteration|epoch|batch)s?['\"]?[\s:=#]{1,4}$", re.I
)
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
# For each unit, three places of its number: after a colon, before the unit, and after it.
_PLACES = [
    tuple(
        re.compile(pattern)
        for pattern in (
            rf"(?<![\w/])(?P<unit>{unit})['\"]?\s*[:=]\s*{_NUMBER}(?![A-Za-z])",
            rf"(?<![\w.]){_NUMBER}\s*(?P<unit>{unit})(?!/)",
            rf"(?<![\w/])(?P<unit>{unit})\s+{_NUMBER}(?![A-Za-z])",
        )
    )
    for unit, _, _ in _UNITS
]
_TIME = re.compile(
    r"(?:\b(?:step|iter|iteration|batch)[ _]?time|(?<![\w-])(?<![A-Za-z] )(?:time|dt))"
    r"['\"]?\s*[:= ]\s*(\d+(?:,\d{3})*(?:\.\d*)?)(?![\d.,']*\d)\s*(ms|s)\b"
)
_STEP = re.compile(
    r"(?<![\w-])(?<!total )(?<!max )(?:global_step|step|iteration|iter)s?['\"]?[\s:=#]{1,4}(\d+)", re.IGNORECASE
)
_LOSS = re.compile(
    r"(?<![\w-])(?<!val )(?<!eval )(?<!validation )(?:train(?:ing)?[_ ])?loss['\"]?\s*[:= ]\s*"
    r"([-+]?\d++(?:\.\d++|(?![,'\u00a0\u202f]\d))(?:[eE][-+]?\d+)?)",
    re.IGNORECASE,
)
_HINT = re.compile(r"/s|/it|/step|/batch|per[_ ]|time|dt")  # lines without a match are skipped


def _find_numbers(line: str) -> list[re.Match[str] | None]:
    """Return the match of each unit with its number.

    Without a colon, the first unit of the line decides for all units whether numbers precede or follow them: in
    `step 3 ms/step 50 tok/s 9000`, the 3 counts steps, so numbers follow.
    """
    after_colon, before, after = (
        [next((found for found in unit[place].finditer(line) if _is_whole(line, found)), None) for unit in _PLACES]
        for place in range(3)
    )
    loose = [(found.start("unit"), found in after) for found in (*before, *after) if found]
    chosen = after if min(loose, default=(0, False))[1] else before
    return [colon or other for colon, other in zip(after_colon, chosen, strict=True)]


def _is_whole(line: str, match: re.Match[str]) -> bool:
    """Return whether the number is not the rest of a longer one, and does not count steps."""
    start = match.start("number")
    text = line[max(0, start - _LONGEST_KEY) : start]
    if _SEPARATED.search(text) and not _OF_LIST.search(text):
        return False
    return match.start("unit") < start or not _COUNTER.search(text)


def read_rates(line: str) -> dict[str, float]:
    """Return the line's rates and loss under this project's names, or an empty dict if no rate is above zero."""
    if not _HINT.search(line):
        return {}
    rates: dict[str, float] = {}
    for (_, name, convert), match in zip(_UNITS, _find_numbers(line), strict=True):
        if match is None or name in rates or _PER_DEVICE.match(line, match.end()):
            continue
        if (value := parse_number(match["number"] + (match["suffix"] or "").upper())[0]) > 0:
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
