"""Define the sweeps of a calibration: command arguments, sweep names and trial rows."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sweeper.common.trials import WITHOUT_RESULT, TrialStatus, narrowest_retry
from sweeper.config.hardware import Target
from sweeper.results.stored import StoredSweep
from workloads.tables import read_toml

WORDS: dict[str, dict[str, str]] = read_toml(__file__, "sweeps.toml")


@dataclass(frozen=True)
class CalibrationSweep:
    """One sweep of a calibration: the command arguments, and the results folder."""

    words: tuple[str, ...]
    folder: Path

    def read_rows(self) -> list[dict[str, str]]:
        """Return each complete trial's parameters and metrics by name; empty if the sweep has not ended."""
        path = self.folder / "trials.csv"
        if not path.exists():
            return []
        with path.open(newline="") as lines:
            return [row for row in csv.DictReader(lines) if row["outcome"] == "complete"]

    @property
    def without_result(self) -> list[TrialStatus]:
        """The statuses of failed, lost and disturbed trials, which a rerun measures again."""
        return [record.status for record in StoredSweep(self.folder).current_records if record.status in WITHOUT_RESULT]


def plan_sweeps(target: Target, run: str, directory: Path, further: Sequence[str]) -> dict[str, CalibrationSweep]:
    """Return a calibration's sweeps, keyed by the operation that they measure. Collectives need several GPUs or a CPU.

    Args:
        run: the name of the calibration; a rerun uses the same name to resume the sweeps.
        further: additional arguments for all sweeps.
    """
    sweeps = {}
    for name, text in WORDS["gpu" if target.is_gpu else "cpu"].items():
        words = text.split()
        if name == "collectives" and target.is_gpu:
            if target.devices == 1:
                continue
            # Group sizes that use different links: all ranks, the ranks of a node, and pairs.
            local = gpus_per_node(target)
            sizes = [0, *([local] if 1 < local < target.devices else []), *([2] if local > 2 else [])]
            groups = [str(size) for size in sizes if not size or target.devices % size == 0]
            words += ["gpus=all", f"space.ranks={','.join(groups)}"]
        sweep_name = f"{run}-{name}"
        words += ["search=grid", "finals.top=0", "budget.same_failures=null", f"name={sweep_name}", f"dir={directory}"]
        sweep = CalibrationSweep((*words, *further), directory / "sweeps" / sweep_name)
        if statuses := sweep.without_result:
            sweep = replace(sweep, words=(*sweep.words, f"retry={narrowest_retry(statuses)}"))
        sweeps[name] = sweep
    return sweeps


def gpus_per_node(target: Target) -> int:
    """Return the smallest number of GPUs on any of the target's nodes."""
    return min(node.gpus for node in target.nodes)
