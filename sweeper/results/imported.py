"""Select imported results: the fastest result for each kind of work, and results with contradictions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pandas as pd

from sweeper.common.format import format_number, format_percent
from sweeper.metrics.derivation import MEMORY_METRICS, first_known

HEADING = ["result", "model", "sequence length", "global batch", "type", "device", "devices", "tokens/s"]
HEADING += ["tokens/s per device", "claimed per device", "ms a step", "steps", "MFU %", "stated MFU %"]
HEADING += ["claimed TFLOP/s per device", "FLOPs", "GiB", "contradictions", "notes", "as executed"]
CONTRADICTIONS_HEADING = ["result", "device", "tokens/s per device", "claimed per device", "contradiction"]
IDENTIFYING = ("model", "model_b", "sequence_length", "dtype", "global_batch")  # parameters with their own columns


@dataclass(frozen=True)
class Imported:
    """A successful imported result, from its row in the table of imported results."""

    run: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.run["run"])

    @property
    def model(self) -> str:
        """The model, or else the model size in billions of parameters, or "" if the file gives neither."""
        return self.get_text("param.model") or f"{self.get_text('param.model_b')}B".removeprefix("B")

    @property
    def contradictions(self) -> list[str]:
        return [text for text in self.get_text("tag.contradictions").split("; ") if text]

    @property
    def work(self) -> tuple[str, ...]:
        """The work and devices, as far as the file describes them."""
        names = ("param.sequence_length", "param.global_batch", "param.dtype", "tag.device", "tag.devices")
        return (self.model, *(self.get_text(name) for name in names))

    @property
    def rate_per_device(self) -> float:
        """Tokens/s per device, or NaN if the tokens or the number of devices are unknown."""
        return self.get_metric("tokens_per_s_per_gpu")

    @property
    def rates(self) -> list[str]:
        """Table cells with tokens/s per device, first as we derive it and then as claimed."""
        return [format_number(rate) for rate in (self.rate_per_device, self.claim_per_device("tokens_per_s"))]

    def claim_per_device(self, rate: str) -> float:
        """Return a claimed rate per device: as reported, else the claimed total divided by the devices, else NaN."""
        per_device = self.get_metric(f"claimed_{rate}_per_gpu")
        devices = self.get_text("tag.devices")
        if math.isnan(per_device) and devices.isdigit():
            return self.get_metric(f"claimed_{rate}") / int(devices)
        return per_device

    def get_text(self, column: str) -> str:
        value = self.run.get(column)
        return value if isinstance(value, str) else ""

    def get_metric(self, name: str) -> float:
        return float(self.run.get(f"metric.{name}", math.nan))


def list_results(runs: pd.DataFrame) -> list[Imported]:
    results = (Imported(run) for run in cast("list[dict[str, Any]]", runs.to_dict("records")))
    return [result for result in results if result.run.get("tag.outcome") == "complete"]


def select_fastest(results: list[Imported]) -> list[Imported]:
    """Return each file's fastest result for each kind of work. Prefer results without contradictions."""
    fastest: dict[tuple[str, ...], tuple[tuple[bool, float], Imported]] = {}
    for result in results:
        rate = result.get_metric("tokens_per_s")
        key = (str(result.run["parent"]), *result.work, *([result.name] if math.isnan(rate) else []))
        preference = not result.contradictions, rate
        if key not in fastest or preference > fastest[key][0]:
            fastest[key] = preference, result

    def sort_key(result: Imported) -> tuple[Any, ...]:
        rate = result.rate_per_device
        model, length, *_ = result.work
        descending = 0.0 if math.isnan(rate) else -rate
        return not model, model, float(length or 0), bool(result.contradictions), descending, result.name

    return sorted((result for _, result in fastest.values()), key=sort_key)


def list_rows(runs: pd.DataFrame) -> list[dict[str, str]]:
    """Return the selected results' cells by heading. Cells for unknown values are empty."""
    rows = []
    for result in select_fastest(list_results(runs)):
        params = {name.removeprefix("param."): value for name, value in result.run.items() if name.startswith("param.")}
        metric, executed = result.get_metric, {key: text for key, text in params.items() if isinstance(text, str)}
        cells = [
            *(result.name, *result.work, format_number(metric("tokens_per_s")), *result.rates),
            *(format_number(metric("step_time_ms")), format_number(metric("steps"))),
            *(format_percent(metric("mfu")), format_percent(metric("claimed_mfu"))),
            format_number(result.claim_per_device("tflops")),
            result.get_text("tag.claims_flops"),
            format_number(first_known(map(metric, MEMORY_METRICS))),
            "; ".join(result.contradictions),
            result.get_text("tag.notes"),
            " ".join(f"{name}={value}" for name, value in executed.items() if name not in IDENTIFYING),
        ]
        rows.append(dict(zip(HEADING, cells, strict=True)))
    return rows


def list_contradictions(runs: pd.DataFrame) -> Iterator[dict[str, str]]:
    """Yield the cells, by heading, for every contradiction in every result."""
    for result in list_results(runs):
        for contradiction in result.contradictions:
            cells = [result.name, result.get_text("tag.device"), *result.rates, contradiction]
            yield dict(zip(CONTRADICTIONS_HEADING, cells, strict=True))
