"""How far estimates are from published runs: the band around an estimate, and on how many runs it rests."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workloads.estimator.cluster import Cluster
from workloads.layouts.layout import Job

BANDS = Path(__file__).parent / "tables" / "bands.csv"
COVERED = 0.9  # of the runs are within the band


@dataclass(frozen=True)
class Band:
    """The band around estimates of a family of jobs.

    Attributes:
        error_share: half its width: 90% of the runs are within it, estimated with their source left out.
        runs: published runs of this family.
        devices, trainers: those of the runs.
    """

    error_share: float
    runs: int
    devices: frozenset[str]
    trainers: frozenset[str]

    def missing(self, job: Job, cluster: Cluster) -> list[str]:
        """Return what of a job no published run has, in plain words."""
        missing = []
        if cluster.device.name not in self.devices:
            missing.append(f"no published run on {cluster.device.name} is among those that the band rests on")
        if not any(trainer.startswith(job.trainer) for trainer in self.trainers):  # megatron: megatron-lm, …
            missing.append(f"no published run of trainer={job.trainer} is among those that the band rests on")
        return missing


@cache
def bands() -> dict[str, Band]:
    """Return the bands by family: dense, moe and memory."""
    with BANDS.open(newline="") as lines:
        return {row["family"]: _from_row(row) for row in csv.DictReader(lines)}


def find_band(job: Job) -> Band:
    """Return the band of a job's step time."""
    return bands()["moe" if job.model.experts else "dense"]


def _from_row(row: dict[str, str]) -> Band:
    return Band(
        error_share=float(row["error_percent"]) / 100,
        runs=int(row["runs"]),
        devices=frozenset(row["devices"].split()),
        trainers=frozenset(row["trainers"].split()),
    )


def half_width(errors: list[float]) -> float:
    """Return the smallest band, in percent, that covers 90% of the errors; of fewer than ten runs all of them."""
    sizes = sorted(abs(error) for error in errors)
    covered = len(sizes) if len(sizes) < 10 else -(-len(sizes) * 9 // 10)
    return sizes[covered - 1]
