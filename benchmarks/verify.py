"""Measure a published result again, and report whether it still holds.

    make verify CARD=planner        (python benchmarks/verify.py planner)

A card, `benchmarks/cards/NAME.yaml`, has a claim, the command that measures it, the machine, and gates. The command
runs in the repository's root; `{scratch}` stands for a new folder. A gate reads a metric and compares it. The metric is
the median of a sweep's complete trials (`column` of `trials.csv` in `{scratch}`, for the trials with the values in
`where`), a value at a path in printed JSON (`key`), or the median of all matches of a regular expression with one group
(`pattern`) in the output. Exit codes: 0 the claim holds; 1 it does not hold, or the command failed; 2 invalid card; 4 a
different machine, on which nothing was run.
"""

import csv
import json
import operator
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).parents[1]
CARDS = Path(__file__).parent / "cards"
KEYS = (
    "page",
    "claims",
    "command",
    "gates",
    "machine",
    "commit",
    "date",
    "versions",
    "clocks",
    "samples",
    "interval",
    "missed",
)
COMPARISONS: dict[str, Callable[[float, float], bool]] = {"at least": operator.ge, "at most": operator.le}
HOLDS, FAILS, INVALID, OTHER_MACHINE = 0, 1, 2, 4


class InvalidCard(Exception):
    """A card that cannot be verified, with the reason."""


def read_card(path: Path) -> dict[str, Any]:
    """Return a card.

    Raises InvalidCard if a key is missing or unknown, or a gate has no metric, comparison or value.
    """
    card = yaml.safe_load(path.read_text())
    wrong = set(card) ^ set(KEYS)
    if wrong:
        raise InvalidCard(f"{path.name}: {', '.join(sorted(wrong))} missing or unknown. A card has {', '.join(KEYS)}")
    for gate in card["gates"]:
        reads = set(gate) - {"comparison", "value", "tolerance"}
        if reads not in ({"key"}, {"pattern"}, {"column"}, {"column", "where"}) or not {"comparison", "value"} <= set(
            gate
        ):
            raise InvalidCard(
                f"{path.name}: a gate has key, pattern or column (perhaps with where), comparison, value, and "
                f"perhaps tolerance: {gate}"
            )
        if gate["comparison"] not in (*COMPARISONS, "within"):
            raise InvalidCard(f"{path.name}: comparison is '{gate['comparison']}': at least, at most or within")
    return dict(card)


def list_gpus() -> list[str]:
    """Return the names of this machine's NVIDIA GPUs."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    printed = subprocess.run(command, capture_output=True, text=True, check=False)
    return printed.stdout.split("\n")[:-1] if printed.returncode == 0 else []


def lacks(machine: dict[str, Any], gpus: Sequence[str]) -> str:
    """Return what these GPUs lack compared with a card's machine; empty if they match or no GPU is needed."""
    count = int(machine.get("gpus", 0))
    if not count or sum(name == machine["gpu"] for name in gpus) >= count:
        return ""
    return f"measured on {count} x {machine['gpu']}; here are {', '.join(gpus) or 'no NVIDIA GPUs'}"


def read_column(gate: dict[str, Any], scratch: str) -> list[float]:
    """Return the values in a gate's column for the complete trials that it selects, over all sweeps in a folder."""
    wanted = {"outcome": "complete", **gate.get("where", {})}
    rows = [row for path in Path(scratch).glob("sweeps/*/trials.csv") for row in csv.DictReader(path.open())]
    chosen = [row for row in rows if all(row.get(name) == str(value) for name, value in wanted.items())]
    return [float(row[gate["column"]]) for row in chosen if row.get(gate["column"])]


def read_metric(gate: dict[str, Any], output: str, scratch: str) -> float | None:
    """Return a gate's metric from a command's output or files; None if it is in neither."""
    if "column" in gate:
        measured = read_column(gate, scratch)
        return statistics.median(measured) if measured else None
    if "pattern" in gate:
        found = [float(value.replace(",", "")) for value in re.findall(gate["pattern"], output, re.MULTILINE)]
        return statistics.median(found) if found else None
    try:
        value: Any = json.loads(output)
        for name in gate["key"].split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
        return float(value)
    except (ValueError, LookupError, TypeError):  # not JSON, another structure, or not a number
        return None


def passes(gate: dict[str, Any], metric: float) -> bool:
    """Return whether a metric passes a gate; a tolerance is a share of the gate's value."""
    slack = abs(gate["value"]) * gate.get("tolerance", 0.0)
    if gate["comparison"] == "within":
        return abs(metric - gate["value"]) <= slack
    towards = -slack if gate["comparison"] == "at least" else slack
    return COMPARISONS[gate["comparison"]](metric, gate["value"] + towards)


def verify(card: dict[str, Any]) -> int:
    """Run a card's command, print each gate with the measured value, and return the exit code."""
    if missing := lacks(card["machine"], list_gpus()):
        print(f"not verified: {missing}")
        return OTHER_MACHINE
    with tempfile.TemporaryDirectory() as scratch:
        words = [word.replace("{scratch}", scratch) for word in shlex.split(card["command"])]
        words[0] = sys.executable if words[0] == "python" else words[0]
        ran = subprocess.run(words, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
        metrics = [read_metric(gate, ran.stdout, scratch) for gate in card["gates"]]
    if ran.returncode:
        print(f"does not hold: the command ended with {ran.returncode}: {card['command']}")
        return FAILS
    if None in metrics:
        print(ran.stdout)
    verdicts = []
    for gate, metric in zip(card["gates"], metrics, strict=True):
        verdicts.append(metric is not None and passes(gate, metric))
        slack = f" ({gate['tolerance']:.0%})" if "tolerance" in gate else ""
        wanted = f"{gate['comparison']} {gate['value']:,}{slack}"
        measured = "nothing" if metric is None else f"{metric:,.6g}"
        name = gate.get("key") or gate.get("column") or gate["pattern"]
        print(f"{'holds' if verdicts[-1] else 'fails'}: {name}: {measured}, {wanted}")
    print(f"{'holds' if all(verdicts) else 'does not hold'}: measured {card['date']} at {card['commit']}")
    return HOLDS if all(verdicts) else FAILS


def main(arguments: Sequence[str]) -> int:
    names = sorted(path.stem for path in CARDS.glob("*.yaml"))
    if len(arguments) != 1 or arguments[0] not in names:
        print(f"CARD={' '.join(arguments)}: one of {', '.join(names)}", file=sys.stderr)
        return INVALID
    try:
        return verify(read_card(CARDS / f"{arguments[0]}.yaml"))
    except InvalidCard as error:
        print(error, file=sys.stderr)
        return INVALID


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
