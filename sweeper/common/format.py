"""Format numbers and parameters for tables and messages. CSV and JSON files contain unrounded values."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workloads.api.contract import BandEnds

MAX_WHOLE = 2**53  # floats represent every integer up to this number
MAX_DECIMALS = 16
_CELL = re.compile(r"(—|[-+]?[\d.,]+(e[-+]?\d+)?(%| [^ ]+/s)?)?")  # of a numeric column
DOUBTFUL = "; doubtful: "  # part of the verdict if the rounds of a finalist differ by more than noise
TIE = "a tie"  # the start of the verdict if the first two finalists do not differ significantly


def format_number(value: float) -> str:
    """Format a number: four digits below 1000, else an integer with separators. NaN (unknown) becomes empty."""
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def round_to_interval(value: float, half_width: float) -> float:
    """Round a value to two digits of the interval's half width. If there is no interval, round as in tables."""
    if not math.isfinite(value) or not value:
        return value
    if not (math.isfinite(half_width) and 0 < half_width < abs(value)):
        return float(format_number(value).replace(",", ""))
    return round(value, 1 - math.floor(math.log10(half_width)))


def round_to_band(value: float, half_width: float, apart_from: float = math.nan) -> str:
    """Round a value to the first digit of its error band's half width, a share of the value: within 8%, 1,152 becomes
    1,150, and 57.5 becomes 58. Keep at least two digits, and more if the result must differ from `apart_from`."""
    if not value or not math.isfinite(value):
        return format_number(value)
    return _round(value, decimals_apart(value, apart_from, _decimals(value, half_width)))


def _decimals(value: float, share: float) -> int:
    return -math.floor(math.log10(abs(value) * min(max(share, 1e-4), 0.1)) + 1e-9)


def _round(value: float, decimals: int) -> str:
    return f"{round(value, decimals) + 0.0:,.{max(0, decimals)}f}"


def show_range(value: float, ends: BandEnds, limit: float | None = None, *, is_rate: bool = False) -> str:
    """Format a rate, or a quantity proportional to time, with the range of its error band, as in `6.4 (4.1 to 15.9)`.

    All three have the digits of the narrower side, and are on the same side of a `limit` as without rounding.
    """
    if not value or not math.isfinite(value):
        return format_number(value)
    low, high = 1 - ends.below, 1 + ends.above
    exact = [value * factor for factor in ((1, low, high) if is_rate else (1, 1 / high, 1 / low))]
    least = _decimals(min(exact), min(ends))
    decimals = max(decimals_apart(one, limit or math.nan, least) for one in exact)
    return "{} ({} to {})".format(*(_round(one, decimals) for one in exact))


def decimals_apart(first: float, second: float, least: int) -> int:
    """Return the number of decimals, at least `least`, that keeps two numbers different after rounding."""
    return next((n for n in range(least, MAX_DECIMALS) if round(first, n) != round(second, n)), least)


def format_interval(low: float, high: float) -> str:
    """Format the bounds of an interval as `1.5 to 2.5`, or as empty text if either bound is unknown."""
    return "" if math.isnan(low) or math.isnan(high) else f"{format_number(low)} to {format_number(high)}"


def find_numeric(rows: Iterable[Sequence[str]]) -> list[bool]:
    """Return for each column of a table whether it is right-aligned: all cells are numbers, dashes or empty."""
    return [all(map(_CELL.fullmatch, column)) for column in zip(*rows, strict=True)]


def describe_use(use: float, process: str, cores: int) -> str:
    """Describe how many cores other processes use, and the busiest process, as `CoreWatch.find_use` returns them."""
    return f"other processes use {use:.1f} of {count(cores, 'core')}{process and f', most of it {process}'}"


def format_percent(share: float) -> str:
    """Format a fraction as a percentage, without the percent sign. NaN becomes empty."""
    return "" if math.isnan(share) else f"{100 * share:.1f}"


def name_some(names: Sequence[str], most: int = 5) -> str:
    """Join at most `most` names and append the number of remaining names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(dict.fromkeys(names[:most])) + more


def short_value(value: object) -> str:
    """Format a parameter value on one line for names and tables: integers in full, other numbers with six digits."""
    if isinstance(value, float) and not _is_whole(value):
        return f"{value:.6g}"
    return one_line(exact_value(value))


def exact_value(value: object) -> str:
    """Format a parameter value for MLflow in at most 500 characters. Numbers stay exact when read back."""
    if isinstance(value, float):
        return f"{value:.0f}" if _is_whole(value) else repr(float(value))
    return str(value)[:500]


def _is_whole(value: float) -> bool:
    return value.is_integer() and abs(value) < MAX_WHOLE


def format_point(params: Mapping[str, Any]) -> str:
    """Format a point of the space as `m=4096 n=512`."""
    return " ".join(f"{name}={short_value(value)}" for name, value in params.items()) or "no varying parameter"


def format_duration(seconds: float) -> str:
    """Format a duration as `m:ss`, or as `h:mm:ss` from one hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_phases(seconds: Mapping[str, float]) -> str:
    """Format durations by phase, omitting very short phases: `12.3 s: start 4.1, trials 0.3, recording 2.0`."""
    parts = [f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05]
    total = sum(seconds.values())
    shown = f"{total:.1f} s" if total < 600 else f"{format_duration(total)} ({total:.0f} s)"
    return f"{shown}: {', '.join(parts)}"


def count(number: int, noun: str) -> str:
    """Format a number with a noun, in the plural if the number is not 1: `3 trials`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Characters with an effect on terminals: control characters, including 8-bit ones, and Unicode characters that reverse
# or hide text (bidirectional and format characters, line separators).
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
_FORMULA = re.compile(r"[=+\-@\t\r]")
_PLAIN_NUMBER = re.compile(r"-?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?(e[-+]?\d+)?")
_NUMBER = re.compile(r"[-+]?(\d[\d,]*\.?\d*|\.\d+)(e[-+]?\d+)?%?|[-+]?(nan|inf(inity)?)", re.IGNORECASE)


def typed_value(text: str) -> Any:
    """Parse a text into a number, `[low, high]` for an interval, a bool or None. Return any other text unchanged."""
    bounds = text.split(" to ")
    if len(bounds) > 2 or not all(map(_PLAIN_NUMBER.fullmatch, bounds)):
        return {"True": True, "False": False, "None": None, "": None}.get(text, text)
    numbers = [(float if re.search("[.e]", bound) else int)(bound.replace(",", "")) for bound in bounds]
    return numbers if len(numbers) > 1 else numbers[0]


def printable(text: str) -> str:
    """Replace terminal control characters in a text with escapes such as `\\x1b`. Keep newlines and tabs."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Return the text on one printable line, with newlines and tabs escaped as well."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def shorten(text: str, length: int) -> str:
    """Shorten a text to at most `length` characters by replacing its middle with an ellipsis."""
    if len(text) <= length:
        return text
    end = length // 3
    return f"{text[: length - end - 1]}…{text[-end:]}"


def spreadsheet_cell(value: object) -> object:
    """Make a value safe to put in a CSV file. Non-numeric text that starts like a formula gets a leading ' (OWASP)."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value
