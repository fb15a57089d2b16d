"""Print bring_up.sh's table of measured values, expected values and verdicts, and mask the files to send back.

    python launch/amd/verdict.py FOLDER

Metrics come from a sweep's last `progress=json` line, or from a line of JSON that a check prints. The exit code is 1 if
a check failed or a metric is outside its bounds.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeper.commands.doctor.record import mask_text

ANCHORS = Path(__file__).with_name("anchors.csv")
TIMED_OUT = (124, 137)  # exit codes of `timeout`
INVALID = 2  # exit code for input that does not fit the machine, such as gpus=8 on four GPUs
FAILED = ("FAIL", "not run")


def _is_json(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


@dataclass(frozen=True)
class Check:
    """A check that ran: its exit code, its seconds, and what it printed."""

    name: str
    exit_code: int
    seconds: float
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of JSON that the check printed. A sweep prints to standard error; its last line has the results."""
        return [json.loads(line) for line in [*self.out.splitlines(), *self.err.splitlines()] if _is_json(line)]

    @property
    def report(self) -> Mapping[str, Any]:
        return self.events[-1] if self.events else {}

    @property
    def figures(self) -> Mapping[str, Any]:
        best = self.report.get("best")
        return best["metrics"] if best else self.report

    @property
    def failure(self) -> str:
        """The reason why there are no metrics; empty if the check succeeded."""
        if self.exit_code in TIMED_OUT:
            return f"not finished after {self.seconds:.0f} s"
        if not self.exit_code:
            return ""
        problems = [line[2:] for line in self.out.splitlines() if line.startswith("! ")]  # the doctor's
        reasons = [event["reason"] for event in self.events if event.get("reason")]  # of a sweep's failed trial
        lines = [line for line in self.err.splitlines() if line.strip() and not _is_json(line)]
        return "; ".join(problems) or [f"see {self.name}.out", *lines, *reasons][-1]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    check: str
    measured: str
    expected: str
    verdict: str
    source: str


def read_checks(folder: Path) -> list[Check]:
    """Return the checks of a folder in the order in which they ran."""
    checks = []
    for line in (folder / "checks.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        out, err = ((folder / f"{name}.{end}").read_text(errors="replace") for end in ("out", "err"))
        checks.append(Check(name, int(code), float(seconds), out, err))
    return checks


def read_anchors(device: str) -> list[dict[str, str]]:
    """Return the anchors of a device, given by its name."""
    with ANCHORS.open() as lines:
        return [row for row in csv.DictReader(lines) if row["device"] == "*" or row["device"] in device]


def judge(check: Check, anchors: Sequence[Mapping[str, str]]) -> Iterator[Row]:
    """Yield a row for each metric of a check, or a single row for a check without metrics."""
    if check.failure:
        yield Row(check.name, "", "", "not run" if check.exit_code == INVALID else "FAIL", check.failure)
        return
    expected = [anchor for anchor in anchors if anchor["check"] == check.name]
    for anchor in expected:
        value = check.figures.get(anchor["figure"])
        if value is None:
            yield Row(check.name, "", anchor["reason"], "FAIL", f"no {anchor['figure']} in {check.name}.err")
            continue
        measured = f"{value:.4g} {anchor['unit']}".strip()
        yield Row(check.name, measured, anchor["reason"], _verdict(float(value), anchor), anchor["source"])
    if not expected:
        yield Row(check.name, f"{check.seconds:.0f} s", "ends without a problem", "pass", f"{check.name}.out")


def _verdict(value: float, anchor: Mapping[str, str]) -> str:
    low, high = (float(anchor[bound]) if anchor[bound] else None for bound in ("low", "high"))
    if low is None and high is None:
        return "noted"
    inside = (low is None or value >= low) and (high is None or value <= high)
    return "pass" if inside else "FAIL"


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned columns, followed by the counts of verdicts."""
    columns = ("check", "measured", "expected", "verdict", "source")
    lines = [columns, *(tuple(getattr(row, name) for name in columns) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    verdicts = [row.verdict for row in rows]
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in dict.fromkeys(verdicts)]
    return "\n".join([*text, ", ".join(counts)])


def write_masked(folder: Path, table: str) -> None:
    """Write the files to send back to `masked`: the table and the logs, without what identifies the machine."""
    masked = folder / "masked"
    masked.mkdir(exist_ok=True)
    (masked / "table.txt").write_text(f"{table}\n")
    for path in folder.iterdir():
        if path.suffix in (".out", ".err", ".json", ".tsv"):
            (masked / path.name).write_text(mask_text(path.read_text(errors="replace")))


def main(arguments: Sequence[str]) -> int:
    """Print the table of a folder and write its masked copy. Returns the exit code."""
    folder = Path(arguments[0])
    checks = read_checks(folder)
    device = next((str(check.report["device"]) for check in checks if check.report.get("device")), "")
    rows = [row for check in checks for row in judge(check, read_anchors(device))]
    table = f"{device or 'unknown device'}\n{format_table(rows)}"
    print(table)
    write_masked(folder, table)
    return int(any(row.verdict in FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
