"""Read rates from lines that training scripts print, for logs that match no trainer's format.

A line counts as a step if it contains a number with the unit of a rate or of a step time, such as `1,234 tok/s`,
`tokens/sec: 1.2k`, `3.4 it/s`, `412 ms/step`, `time 98.1ms`.
"""

import re
from dataclasses import dataclass
from typing import Any

from workloads.formats.logs import LONGEST_LINE, LogReader, Step, parse_number, strip_colors
from workloads.tables import read_toml

_TABLE = read_toml(__file__, "rate_lines.toml")
_LONGEST_KEY = 40  # characters before a number that are examined


def _compile(pattern: str) -> re.Pattern[str]:
    for name, part in _TABLE["parts"].items():
        pattern = pattern.replace(name, part)
    return re.compile(pattern)


WHOLE_NUMBER: str = _TABLE["parts"]["WHOLE"]
_UNITS: list[dict[str, Any]] = _TABLE["unit"]
_PLACES = [[_compile(place.replace("UNIT", unit["pattern"])) for place in _TABLE["places"].values()] for unit in _UNITS]
_LINES = {name: _compile(pattern) for name, pattern in _TABLE["lines"].items()}


def _find_numbers(line: str) -> list[re.Match[str] | None]:
    """Return the match of each unit with its number: after a colon, or before or after the unit.

    Of two numbers beside a unit, the one before it counts, unless it is that of the previous unit or of another
    quantity: in `loss 2.2 ms/step 50 tok/s 9000`, numbers follow.
    """
    found = [[_find_whole(pattern, line) for pattern in patterns] for patterns in _PLACES]
    chosen = [colon for colon, _, _ in found]
    taken = {match.start("number") for match in chosen if match}
    places = {n: min((m.start("unit") for m in row[1:] if m), default=-1) for n, row in enumerate(found) if not row[0]}
    order = sorted((n for n, place in places.items() if place >= 0), key=places.__getitem__)
    first = found[order[0]][1] if order else None
    key = _LINES["key"].search(_text_before(line, first)) if first else None
    # In `bs 32 it/s 2.0`, numbers follow their names.
    follow = key is not None and not _LINES["of_rate"].search(key[1]) and all(found[n][2] for n in order)
    for n in order:
        _, before, after = found[n]
        before = None if follow else before
        if before and (before.start("number") in taken or _LINES["of_others"].search(_text_before(line, before))):
            before = None
        chosen[n] = before or after
        taken |= {match.start("number") for match in chosen if match}
    return chosen


def _find_whole(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """Return the first match whose number is not the rest of a longer one, and does not count steps."""
    for match in pattern.finditer(line):
        text = _text_before(line, match)
        is_counter = match.start("unit") > match.start("number") and _LINES["counter"].search(text)
        groups = re.match(r"\d{3}(?!\d)", match["number"]) and _LINES["groups"].search(text)
        name = _LINES["name"].search(text[: groups.start()]) if groups else None
        if groups and (name is None or _LINES["of_rate"].search(name[0])):  # otherwise they are the value of this name
            continue
        if not is_counter and (_LINES["of_list"].search(text) or not _LINES["separated"].search(text)):
            return match
    return None


def _text_before(line: str, match: re.Match[str]) -> str:
    start = match.start("number")
    return line[max(0, start - _LONGEST_KEY) : start]


def read_rates(line: str) -> dict[str, float]:
    """Return the line's rates and loss under this project's names, or an empty dict if no rate is above zero."""
    if not _LINES["hint"].search(line):
        return {}
    rates: dict[str, float] = {}
    for unit, match in zip(_UNITS, _find_numbers(line), strict=True):
        name = unit["metric"]
        if match is None or name in rates or _LINES["per_device"].match(line, match.end()):
            continue
        if (value := parse_number(match["number"] + (match["suffix"] or "").upper())[0]) > 0:
            rates[name] = 1 / value if unit.get("is_inverse") else value / unit.get("divisor", 1)
    if "step_time_s" not in rates and (match := _LINES["time"].search(line)):
        seconds = parse_number(match[1])[0] * (1e-3 if match[2] == "ms" else 1.0)
        is_of_step = rates or _LINES["step"].search(line)
        rates |= {"step_time_s": seconds} if seconds > 0 and is_of_step else {}
    if rates and (loss := _LINES["loss"].search(line)):
        rates["loss"] = float(loss[1])
    return rates


@dataclass
class CommonLogReader(LogReader):
    """Reads the trainers' formats, and falls back to reading rates from lines if no format matches."""

    _count: int = 0
    _offset: int = 0
    _epoch: str = ""
    _increment: int = 0  # the number of steps from one printed step to the next

    def feed(self, line: str) -> Step | None:
        if (step := super().feed(line)) or self.kind or self._pending or "%|" in line:  # a bar's times are means
            return step
        line = strip_colors(line[:LONGEST_LINE])
        if not (rates := read_rates(line)):
            return None
        if "loss" not in rates and _LINES["validation"].search(line):
            return None
        match = _LINES["step"].search(line) or _LINES["of_steps"].search(line)
        number = int(match[1].replace(",", "")) if match else None
        epoch = found[1] if (found := _LINES["epoch"].search(line)) else ""
        is_same, self._epoch = epoch == self._epoch, epoch
        if number is not None and is_same and 0 <= self._last - number <= self._increment:  # another rank's line
            return None
        if number is not None and 0 <= self._last < number:
            self._increment = number - self._last
        elif number is not None and number <= self._last:  # steps of an epoch, or a restart: counting goes on
            self._offset += self._last + max(1, self._increment) - number
        self._count, self._last = self._count + 1, -1 if number is None else number
        return Step(self._count if number is None else number + self._offset, rates)
