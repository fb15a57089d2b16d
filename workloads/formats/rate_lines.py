"""Read rates from lines that training scripts print, for logs that match no trainer's format.

A line counts as a step if it contains a number with the unit of a rate or of a step time, such as `1,234 tok/s`,
`tokens/sec: 1.2k`, `3.4 it/s`, `412 ms/step`, `time 98.1ms`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from workloads.formats.logs import LONGEST_LINE, LogReader, Step, parse_number, strip_colors

# Three digits after a space are a group of up to three digits before it, unless they have a unit.
_NO_GROUP = r"(?:(?<=\d{4})|(?<=[.,]\d)|(?<=[.,]\d\d)|(?<=[.,]\d{3})|(?! \d{3}(?![\d.,]|\s*[%A-Za-z])))"
# A number whose groups or decimals are separated otherwise, such as 41'150 or 1,5, is not read in part.
_DIGITS = r"\d++(?:,\d{3})*+(?:\.\d++)?(?:[eE][-+]?\d++)?"
_NUMBER = rf"(?P<number>{_DIGITS})(?![.,'\u00a0\u202f]?\d){_NO_GROUP}(?:\s*(?P<suffix>[kKM]))?"
_LONGEST_KEY = 40  # characters before a number that are examined
_SEPARATED = re.compile(r"\d[:,'\u00a0\u202f]$")
_GROUPS = re.compile(r"(?<![\d.,:/-])(?<!/ )\d{1,3}(?: \d{3})* $")  # before the last three digits of 41 150
_OF_LIST = re.compile(r"(?:\.\d+|:\d\d|(?:step|iter|iteration)['\"]?[\s:=]+\d+),$")  # the comma follows a whole value
_COUNTER = re.compile(
    r"(?<![/\w])(?<!per )(?!\w*per_)(?:\w*_)?(?:step|iter|iteration|epoch|batch)s?['\"]?[\s:=#]{1,4}$", re.I
)
_OF_OTHERS = re.compile(
    r"(?:loss|lr|learning[ _]rate|norm|acc(?:uracy)?|ppl|perplexity|[mh]fu|mem(?:ory)?|flops|temp|scale)\w*['\"]?"
    r"[\s:=]{1,4}$",
    re.IGNORECASE,
)
_KEY = re.compile(r"(?<![\w/])([A-Za-z][\w.-]*)['\"]?[\s:=]{1,4}$")
_NAME = re.compile(r"[A-Za-z][\w./-]*['\"]?[\s:=]{1,4}$")
_OF_RATE = re.compile(r"time|took|takes|speed|throughput|rate|avg|mean|average|\b(?:at|dt)\b", re.IGNORECASE)
_VALIDATION = re.compile(r"\b(?:val|valid|validation|eval|evaluation)\b", re.IGNORECASE)
_SECOND = r"(?:s|secs?|seconds?)\b"
_PER, _OF_GPU = r"(?:/|_per_| per )", r"(?i:\s*\(?(?:/|_per_|per[ _])\s?(?:gpu|device|rank)\b(?!-)\)?)"
_STEPWISE = r"(?:/|_per_| per )(?:it|iter|iteration|step|batch)\b"
_PER_DEVICE = re.compile(r"\s*[(,]?\s*(?:per|/)[ _]?(?:gpu|device|rank)|[A-Za-z_]", re.IGNORECASE)  # not the job's rate
# The unit before or after the number, this project's metric, and a function that converts to the metric's unit.
_UNITS: tuple[tuple[str, str, Callable[[float], float]], ...] = (
    (rf"(?:tok|toks|tokens?){_PER}(?:s|secs?|seconds?){_OF_GPU}", "tokens_per_s_per_gpu", float),
    (rf"(?:tok|toks|tokens?){_OF_GPU}{_PER}{_SECOND}", "tokens_per_s_per_gpu", float),
    (rf"(?:tok|toks|tokens?){_PER}{_SECOND}(?!{_OF_GPU})", "tokens_per_s", float),
    (rf"(?:samples?|examples?|sequences?|seqs?|imgs?|images?){_PER}{_SECOND}", "samples_per_s", float),
    (rf"(?:it|its|iters?|iterations?|steps?){_PER}{_SECOND}", "step_time_s", lambda rate: 1 / rate),
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
WHOLE_NUMBER = r"(\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
# A counter by its name, such as `train_step=7` or `Step [7/400]`, or beside a total, as in `[7/4000]`. Totals below 100
# may be of ranks.
_STEP = re.compile(
    r"(?<![\w/-])(?<!total )(?<!max )(?<!per )(?:train(?:er|ing)?[_/])?(?:global_|current_|optimizer_)?"
    r"(?:step|iteration|iter|it)s?['\"]?[\s:=#[(]{1,4}" + WHOLE_NUMBER,
    re.IGNORECASE,
)
_OF_STEPS = re.compile(
    r"(?:^|(?<=[\s[(|]))(?<!epoch )(?<!epoch \[)(?<!rank )(?<!rank \[)" + WHOLE_NUMBER + r"/\d{3,}(?=[])\s:,|]|$)",
    re.IGNORECASE,
)
_LOSS = re.compile(
    r"(?<![\w-])(?<!val )(?<!eval )(?<!validation )(?:train(?:ing)?[_ ])?loss['\"]?\s*[:= ]\s*"
    r"([-+]?(?:\d++(?:\.\d++|(?![,'\u00a0\u202f]\d))(?:[eE][-+]?\d+)?|nan\b|inf(?:inity)?\b))",
    re.IGNORECASE,
)
_HINT = re.compile(r"/s|/it|/step|/batch|per[_ ]|time|dt")  # lines without a match are skipped


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
    key = _KEY.search(_text_before(line, first)) if first else None
    # In `bs 32 it/s 2.0`, numbers follow their names.
    follow = key is not None and not _OF_RATE.search(key[1]) and all(found[n][2] for n in order)
    for n in order:
        _, before, after = found[n]
        before = None if follow else before
        if before and (before.start("number") in taken or _OF_OTHERS.search(_text_before(line, before))):
            before = None
        chosen[n] = before or after
        taken |= {match.start("number") for match in chosen if match}
    return chosen


def _find_whole(pattern: re.Pattern[str], line: str) -> re.Match[str] | None:
    """Return the first match whose number is not the rest of a longer one, and does not count steps."""
    for match in pattern.finditer(line):
        text = _text_before(line, match)
        is_counter = match.start("unit") > match.start("number") and _COUNTER.search(text)
        groups = re.match(r"\d{3}(?!\d)", match["number"]) and _GROUPS.search(text)
        name = _NAME.search(text[: groups.start()]) if groups else None
        if groups and (name is None or _OF_RATE.search(name[0])):  # otherwise they are the value of this name
            continue
        if not is_counter and (_OF_LIST.search(text) or not _SEPARATED.search(text)):
            return match
    return None


def _text_before(line: str, match: re.Match[str]) -> str:
    start = match.start("number")
    return line[max(0, start - _LONGEST_KEY) : start]


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
    _offset: int = 0
    _increment: int = 0  # the number of steps from one printed step to the next

    def feed(self, line: str) -> Step | None:
        if (step := super().feed(line)) or self.kind or self._pending or "%|" in line:  # a bar's times are means
            return step
        line = strip_colors(line[:LONGEST_LINE])
        if not (rates := read_rates(line)):
            return None
        if "loss" not in rates and _VALIDATION.search(line):
            return None
        match = _STEP.search(line) or _OF_STEPS.search(line)
        number = int(match[1].replace(",", "")) if match else None
        if number is not None and 0 <= self._last - number <= self._increment:  # another rank's line
            return None
        if number is not None and 0 <= self._last < number:
            self._increment = number - self._last
        elif number is not None and number < self._last:  # steps of an epoch, or a restart: counting goes on
            self._offset += self._last + max(1, self._increment) - number
        self._count, self._last = self._count + 1, -1 if number is None else number
        return Step(self._count if number is None else number + self._offset, rates)
