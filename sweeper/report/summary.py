"""The report's tables, as headings and cells, whatever they are shown in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sweeper.report import published
from sweeper.report.best import SPEEDS, WORK, BestResult, varying
from sweeper.report.store import Stored
from sweeper.ui.tables import markdown_of

PEAKS = "Peaks"
MEMORY = ("peak_device_gib", "peak_memory_gib")


@dataclass(frozen=True)
class Table:
    """aside: figures that were not measured here, shown in another style."""

    title: str
    heading: list[str]
    rows: list[list[str]]
    note: str = ""
    aside: bool = False


def tables(stored: Stored, price_per_hour: float | None) -> list[Table]:
    """What ran, the peaks, and apart from them what others have measured of such models."""
    own = [sweeps_table(stored), peak_table(stored.best_results, stored.trials, price_per_hour)]
    own = [each for each in own if each.rows]  # a store may have imported results alone
    models = {peak.work["model"] for peak in stored.best_results if "model" in peak.work}
    rows = [*published.published(models), *published.imported(stored.imported)]
    heading, rows = _filled(published.HEADING, rows)
    return [*own, Table("Others' figures", heading, rows, published.NOTE, aside=True)] if rows else own


def sweeps_table(stored: Stored) -> Table:
    """What ran where, and how it ended."""
    heading = ["sweep", "workload", "device", "power limit W", "began", "ended", "state", "trials", "versions"]
    rows = [_sweep(sweep, stored.trials) for sweep in stored.sweeps.sort_values("start").to_dict("records")]
    return Table("What ran where", *_filled(heading, rows))


def _sweep(sweep: dict[Any, Any], trials: pd.DataFrame) -> list[str]:
    own = trials[trials["tag.sweeper.study"] == sweep["tag.sweeper.study"]] if len(trials) else trials
    outcomes = own["tag.outcome"].value_counts() if len(own) else pd.Series(dtype=int)
    tainted = int((own["tag.tainted"] == "yes").sum()) if "tag.tainted" in own else 0
    counts = [f"{count} {name}" for name, count in outcomes.items()] + [f"{tainted} tainted"] * (tainted > 0)
    limits = own["tag.power_limit_w"].dropna().unique() if "tag.power_limit_w" in own else []
    versions = {name: _text(sweep.get(f"tag.version.{name}")) for name in ("torch", "ray")}
    return [
        sweep["run"],
        _text(sweep.get("tag.workload")),
        _text(sweep.get("tag.machine")) or _text(sweep.get("tag.device")),
        " or ".join(sorted(limits)),
        *("" if pd.isna(sweep[when]) else f"{sweep[when]:%Y-%m-%d %H:%M} UTC" for when in ("start", "end")),
        sweep["status"].lower(),
        ", ".join(counts),
        " ".join(f"{name} {version}" for name, version in versions.items() if version),
    ]


def peak_table(found: Sequence[BestResult], trials: pd.DataFrame, price_per_hour: float | None) -> Table:
    """The best of each device at each kind of work. Rows of different work stand apart and are not compared."""
    kinds = [name for name in WORK if any(name in peak.work for peak in found)]
    shares = {"mfu": "MFU", "hfu": "HFU", "mamf_utilization": "of reached"}
    shown = [name for name in shares if any(not math.isnan(peak.metric(name)) for peak in found)]
    heading = [*kinds, "device", "speed", "95%", "per device", "TFLOP/s"]
    heading += [f"{shares[name]} %" for name in shown] + ["GiB", "repeats", "of trials"]
    tokens = any(peak.speed == "tokens_per_s" for peak in found)
    heading += ["10^9 tokens a day"] * tokens + ["cost of 10^6 tokens"] * (tokens and price_per_hour is not None)
    heading += ["as executed"]
    rows = []
    for peak in found:
        figure, count = peak.figure, peak.devices
        interval = f"{_short(figure.low)} to {_short(figure.high)}" if figure.known else ""
        cells = [peak.work.get(name, "") for name in kinds]
        cells += [peak.platform, f"{_short(figure.value)} {SPEEDS[peak.speed]}"]
        cells += [interval, _short(figure.value / count) if count > 1 else ""]
        cells += [_short(peak.metric("tflops")) if peak.speed != "tflops" else ""]  # not what stands there already
        cells += ["" if math.isnan(peak.metric(name)) else f"{100 * peak.metric(name):.1f}" for name in shown]
        memory = next((v for n in MEMORY if not math.isnan(v := peak.metric(n))), math.nan)
        cells += ["" if math.isnan(memory) else f"{memory:.4g}", _repeats(peak), str(len(peak.trials))]
        if tokens:
            of_tokens = peak.speed == "tokens_per_s"
            cells.append(f"{figure.value * 86400 / 1e9:.3g}" if of_tokens else "")
            if price_per_hour is not None:
                cells.append(f"{count * price_per_hour / figure.value / 3600 * 1e6:.3g}" if of_tokens else "")
        of_sweep = trials[trials["tag.sweeper.study"] == peak.trial["tag.sweeper.study"]]
        own = {name: peak.trial.get(f"param.{name}") for name in varying(of_sweep)}
        cells.append(" ".join(f"{name}={value}" for name, value in own.items()))
        rows.append(cells)
    note = f"Rows that differ in {', '.join(WORK)} are of different work, and are not ranked together."
    if any(peak.rounds for peak in found):
        note += (
            " Rounds: the winner of a sweep's finals, with the mean of its rounds there; else the best single trial."
        )
    return Table(PEAKS, *_filled(heading, rows), note)


def _repeats(peak: BestResult) -> str:
    return f"{peak.rounds} rounds" if peak.rounds else _short(peak.metric("steps"))


def _filled(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the columns that have nothing in them."""
    filled = [n for n in range(len(heading)) if any(row[n] for row in rows)]
    return [heading[n] for n in filled], [[row[n] for n in filled] for row in rows]


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _text(value: object) -> str:
    return " or ".join(value.splitlines()) if isinstance(value, str) else ""


def markdown(tables: Sequence[Table]) -> str:
    parts = [["## " + each.title, markdown_of(each.heading, each.rows), each.note] for each in tables]
    return "\n\n".join(text for part in parts for text in part if text)
