"""Imported results as runs: one for the file, one below it for each result. Whole, or not at all."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from sweeper.ingest.derive import WARMUP_RULE, disagreements, figures
from sweeper.ingest.imported import Imported

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it tells of every table that it makes


def write(uri: str, experiment: str, path: Path, kind: str, results: Sequence[Imported]) -> str:
    """Write them, unless this content is there already; what was done, in words."""
    client, digest = MlflowClient(tracking_uri=uri), _digest(path)
    found = client.get_experiment_by_name(experiment)
    identifier = str(found.experiment_id if found else client.create_experiment(experiment))
    for run in client.search_runs(
        [identifier], f"tags.`sweeper.content` = '{digest}' and tags.`sweeper.kind` = 'import'"
    ):
        if run.info.status == "FINISHED":
            return "is there already"
        for child in client.search_runs(
            [identifier], f"tags.`mlflow.parentRunId` = '{run.info.run_id}'", max_results=50000
        ):
            client.delete_run(child.info.run_id)
        client.delete_run(run.info.run_id)  # what an import that was cut off has left
    tags = {
        "sweeper.kind": "import",
        "sweeper.content": digest,
        "format": kind,
        "file": path.name,
        "warmup": WARMUP_RULE,
    }
    parent = client.create_run(identifier, run_name=path.name, tags=tags).info.run_id
    for result in results:
        _write(client, identifier, parent, result)
    client.log_artifact(parent, str(path))
    client.set_terminated(parent, "FINISHED")
    return f"imported into {experiment}"


def _write(client: MlflowClient, experiment: str, parent: str, result: Imported) -> None:
    now, own = int(time.time() * 1e3), figures(result)
    odd = [*result.contradictions, *disagreements(result, own)]
    tags = {
        "mlflow.parentRunId": parent,
        "sweeper.kind": "imported",
        "outcome": "complete" if result.feasible else "infeasible",
        "device": result.device,
        "devices": str(result.devices or ""),
        "contradictions": "; ".join(odd),
        **{name: str(value) for name, value in result.machine_info.items()},
    }
    run = client.create_run(experiment, run_name=result.name).info.run_id
    values = {**own, **{f"claimed_{name}": value for name, value in result.claims.items()}}
    client.log_batch(
        run,
        metrics=[Metric(name, value, now, 0) for name, value in values.items()],
        params=[
            Param(name, f"{value:g}" if isinstance(value, float) else str(value))
            for name, value in result.params.items()
        ],
        tags=[RunTag(name, value[:5000]) for name, value in tags.items() if value],
    )
    client.set_terminated(run, "FINISHED")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]
