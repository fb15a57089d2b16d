"""A store and its records for the tests of tracking."""

from typing import Any

from sweeper.common.trials import TrialRecord
from sweeper.tracking.store import Store
from tests.support.factories import trial_record

PARENT = {
    "started_at": "now",
    "params": {"seed": 0},
    "tags": {"workload": "probe"},
    "artifacts": {"config.yaml": "a: 1"},
}


def record(number: int) -> TrialRecord:
    return trial_record(
        number, metrics={"score": 1.5}, where={"node": "n"}, started_at_s=1e9, ended_at_s=1e9 + 1, elapsed_s=1.0
    )


def open_store(uri: str, **changes: Any) -> Store:
    return Store(**{**store_arguments(uri), **changes})


def store_arguments(uri: str) -> dict[str, Any]:
    return {"uri": uri, "experiment": "e", "study_id": "study", "sweep": "sweep", "parent": PARENT}
