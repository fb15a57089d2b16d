"""Write, read and compare accept.json: all evidence for a verdict, with a hash that reveals later changes."""

import hashlib
import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sweeper
from sweeper.commands.accept.experiments import Reading, spread_of
from sweeper.commands.accept.judge import Judgement, Verdict
from sweeper.commands.doctor.checks import Finding
from sweeper.common.files import write_whole
from sweeper.common.format import name_some
from sweeper.config.hardware import Target
from sweeper.metrics.intervals import Interval, ratio_interval
from sweeper.metrics.outliers import set_limit
from workloads.api.errors import UserInputError, first_line
from workloads.tables import read_toml

FORMAT = 1
HASH = "sha256"
Missing = tuple[str, str, str]  # the part and the test of a result that a comparison lacks, and the reason
NEEDED = {HASH, "date", "profile", "kind", "model", "verdict", "sentence", "results"}
RESUMED_WITHIN_S = 86_400.0  # after a day, the machine may have changed
FINGERPRINT: dict[str, list[str]] = read_toml(__file__, "fingerprint.toml")


def build_record(
    target: Target,
    profile: str,
    sentence: str,
    judgements: Sequence[Judgement],
    findings: Sequence[Finding],
    node_states: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the content of accept.json, including the hash, as plain values. NaN (a missing value) becomes null."""
    record = {
        "format": FORMAT,
        "sweeper": sweeper.__version__,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "profile": profile,
        "hardware": target.hardware.name,
        "kind": target.hardware.kind,
        "model": target.model,
        "devices": target.devices if target.is_gpu else len(target.nodes),
        "verdict": sentence.partition(":")[0].lower(),
        "sentence": sentence,
        "findings": [asdict(finding) for finding in findings],
        "nodes": {name: fingerprint(state) for name, state in node_states.items()},
        "results": [_result(judgement) for judgement in judgements],
    }
    return record | {HASH: hash_of(record)}


def fingerprint(state: Mapping[str, Any]) -> dict[str, str]:
    """Return, as text, the properties that should be equal on all nodes: kernel, versions, GPUs and GPU settings."""
    values = {"kernel": state["kernel"]["release"], "command line": " ".join(state["kernel"]["command_line"])}
    values |= {name: text for name, text in state["versions"].items() if text}
    values |= {"cores": state["cpus"], "governor": state["governor"], "GPUs": len(state["gpus"]), **state["networks"]}
    for field, (name, text) in FINGERPRINT.items():
        if of_gpus := [text.format(gpu[field]) for gpu in state["gpus"] if field in gpu]:
            values[f"GPU {name}"] = ", ".join(dict.fromkeys(of_gpus))
    return {name: str(value) for name, value in values.items() if value != ""}


def _result(judgement: Judgement) -> dict[str, Any]:
    limit = judgement.limit
    values = asdict(judgement.reading) | {name: getattr(judgement, name) for name in ("verdict", "reason", "cause")}
    values["limit"] = limit and limit.lowest
    values |= {name: limit and getattr(limit, name) for name in ("basis", "expected", "found_loss")}
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in values.items()}


@dataclass(frozen=True)
class Journal:
    """The readings of an unfinished acceptance, one per line. A rerun on the same nodes resumes the acceptance."""

    path: Path
    heading: str  # the first line, which names the model and the nodes

    def read(self) -> list[Reading]:
        """If a run on these nodes was interrupted in the last day, return its readings; else begin a new journal."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        is_recent = bool(lines) and time.time() - self.path.stat().st_mtime < RESUMED_WITHIN_S
        if not is_recent or lines[0] != self.heading:
            self.path.write_text(f"{self.heading}\n")
            return []
        rows = []
        for line in lines[1:]:
            with suppress(ValueError):  # a killed process may leave half a line
                rows.append(json.loads(line))
        write_whole(self.path, "\n".join([self.heading, *map(json.dumps, rows), ""]))
        return [Reading(**{**values, "nodes": tuple(values["nodes"])}) for values in rows]

    def add(self, readings: Sequence[Reading]) -> None:
        """Append the readings that have a value. A resumed run measures the others again."""
        with self.path.open("a") as file:
            file.writelines(f"{json.dumps(asdict(reading))}\n" for reading in readings if not reading.problem)


def hash_of(record: Mapping[str, Any]) -> str:
    """Return the hash of a record without its hash field, independent of key order and whitespace in the file."""
    others = {name: value for name, value in record.items() if name != HASH}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(record, indent=1) + "\n")


def read_record(path: Path, key: str = "", *, may_be_changed: bool = False) -> dict[str, Any]:
    """Return an accept.json's content. Raises UserInputError, naming `key`, if the file was changed or is invalid."""
    named = f"{key}={path}" if key else str(path)
    try:
        record = json.loads((path / "accept.json" if path.is_dir() else path).read_text())
    except (OSError, ValueError) as error:
        raise UserInputError(f"{named}: cannot be read ({first_line(error)})") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserInputError(f"{named}: is not an accept.json of this version")
    if lacking := NEEDED - record.keys():
        raise UserInputError(f"{named}: is not a whole accept.json, it has no {', '.join(sorted(lacking))}")
    if not may_be_changed and record[HASH] != hash_of(record):
        raise UserInputError(f"{named}: was changed after it was written; see `sweeper accept verify`")
    return record


def read_baseline(path: Path, target: Target, profile: str, parts: Collection[str]) -> dict[tuple[str, str], float]:
    """Return an accepted run's rates by test and part. Raises UserInputError if the run cannot be a baseline."""
    record = read_record(path.expanduser(), "baseline")
    if record["verdict"] == "fail":
        raise UserInputError(f"baseline={path}: that run failed; a baseline must be an accepted run")
    if parts_open := list(dict.fromkeys(row["part"] for row in record["results"] if row["verdict"] == "inconclusive")):
        reason = f"that run has no verdict on {name_some(parts_open)}; a baseline must be an accepted run"
        raise UserInputError(f"baseline={path}: {reason}")
    if used := _list_used(record):
        raise UserInputError(f"baseline={path}: other processes used {name_some(used)} during that run; use another")
    if record["model"] != target.model:
        raise UserInputError(f"baseline={path}: was measured on {record['model']}, not on {target.model}")
    if record["profile"] != profile:
        raise UserInputError(f"baseline={path}: has profile={record['profile']}, and this run profile={profile}")
    rates = {(row["test"], row["part"]): row["value"] for row in record["results"] if row["value"]}
    earlier = list(dict.fromkeys(part for _, part in rates))
    if not {*earlier} & {*parts}:
        raise UserInputError(f"baseline={path}: has none of this run's parts, but {name_some(earlier)}")
    return rates


@dataclass(frozen=True)
class Change:
    """The ratio of a later run's result to the earlier run's result."""

    test: str
    part: str
    ratio: Interval
    least: float  # the smallest ratio that is within the limit
    used: Sequence[str] = ()  # the nodes and GPUs of the part that other processes used during the later run

    @property
    def verdict(self) -> Verdict:
        """Return pass within the limit, else fail, or inconclusive if the interval includes 1 or the part was used."""
        is_open = self.ratio.high >= 1 or self.used  # without an interval, `high` is NaN
        return Verdict.PASS if self.ratio.value >= self.least else Verdict.INCONCLUSIVE if is_open else Verdict.FAIL


def compare_records(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the changes in common results, largest loss first. Raises UserInputError if models or profiles differ."""
    for name in ("model", "profile"):
        if before[name] != after[name]:
            raise UserInputError(f"the runs have the {name} {before[name]} and {after[name]}: only equal ones compare")
    earlier = {(row["test"], row["part"]): row for row in before["results"] if row["value"]}
    new_rows = {(row["test"], row["part"]): row for row in after["results"] if row["value"]}
    pairs = [(earlier[key], row) for key, row in new_rows.items() if key in earlier]
    changes, used = [], _list_used(after)
    for old, new in pairs:
        spread = spread_of(before["kind"], new["test"])
        limit = set_limit("the earlier run", old["value"], math.sqrt(2) * spread.run, spread.worth, len(pairs))
        first, second = (Interval(*(row[name] or math.nan for name in ("value", "low", "high"))) for row in (old, new))
        ratio, least = ratio_interval(second, first), limit.lowest / limit.expected
        of_part = [location for location in used if _is_part_of(location, new["part"])]
        changes.append(Change(new["test"], new["part"], ratio, least, of_part))
    return sorted(changes, key=lambda change: change.ratio.value)


def _list_used(record: Mapping[str, Any]) -> list[str]:
    """Return the nodes and GPUs that other processes used during a run."""
    return [finding["location"] for finding in record.get("findings", []) if finding.get("by_others")]


def _is_part_of(location: str, part: str) -> bool:
    """Return whether a node or GPU belongs to a part, as `n1 GPU 2` to `n1 GPU 2 + 3`, or is on its nodes."""
    node, _, gpu = location.partition(" GPU ")
    words = part.split()
    return part.startswith("the whole") or (node in words and (not gpu or "GPU" not in words or gpu in words))


def export(changes: Sequence[Change], missing: Sequence[Missing]) -> dict[str, list[dict[str, Any]]]:
    """Return a comparison as plain values. Changes are shares, such as -0.1 for 10% slower."""
    rows = list[dict[str, Any]]()
    for one in changes:
        interval = [one.ratio.low - 1, one.ratio.high - 1] if one.ratio.has_interval else None
        shares = {"change": one.ratio.value - 1, "interval": interval, "slower_below": one.least - 1}
        names = {"part": one.part, "test": one.test, "verdict": one.verdict.value, "used_by_others": list(one.used)}
        rows.append(names | shares)
    return {"changes": rows, "missing": [dict(zip(("part", "test", "reason"), row, strict=True)) for row in missing]}


def find_missing(records: Mapping[str, Mapping[str, Any]]) -> list[Missing]:
    """Return a part, a test and a text for each result that some of the named records lack."""
    keys = {name: [(row["part"], row["test"]) for row in r["results"] if row["value"]] for name, r in records.items()}
    tried = dict.fromkeys((row["part"], row["test"]) for record in records.values() for row in record["results"])
    lacking = ((key, [name for name, measured in keys.items() if key not in measured]) for key in tried)
    return [(*key, f"no result in {' and in '.join(names)}") for key, names in lacking if names]
