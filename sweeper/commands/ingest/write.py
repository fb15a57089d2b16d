"""Write imported results to MLflow: one parent run per file and one child run per result."""

import hashlib
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # `sweeper.tracking.store` does the same

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from sweeper.commands.ingest import imported
from sweeper.commands.ingest.imported import ImportedResult
from sweeper.common.format import exact_value
from sweeper.tracking import mlflow_store, new_store

# Identifies the set of values that the importer reads. After a change, files with unchanged content are imported again.
IMPORTER_VERSION = "3"
MAX_TAG_LENGTH = 5000

logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # at INFO, MLflow logs every created table


def write(uri: str, experiment: str, path: Path, settings: Mapping[str, str], results: Sequence[ImportedResult]) -> str:
    """Write a file's results, unless the store has results for the same content and settings. Describe the outcome."""
    client, experiment_id = _open(uri, experiment)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:32]
    same_content = {mlflow_store.CONTENT: digest, mlflow_store.KIND: mlflow_store.IMPORT_KIND}
    settings = {**settings, "importer": IMPORTER_VERSION}
    done = f"imported into {experiment}"
    for run in list(mlflow_store.search_runs(client, [experiment_id], same_content)):
        is_complete = run.info.status == "FINISHED"
        if is_complete and all(run.data.tags.get(name, "") == value for name, value in settings.items()):
            return "already imported"
        done = f"imported again into {experiment}" if is_complete else done  # an incomplete import was interrupted
        # List all runs before deleting any: a deletion removes a run from the search and would shift the next page.
        children = list(mlflow_store.search_runs(client, [experiment_id], {mlflow_store.PARENT_RUN: run.info.run_id}))
        for deleted in (*children, run):
            client.delete_run(deleted.info.run_id)
    tags = {**same_content, **settings, "file": path.name, "warmup": imported.WARMUP_RULE}
    parent_id = client.create_run(experiment_id, run_name=path.name, tags=tags).info.run_id
    for result in results:
        _write_result(client, experiment_id, parent_id, result)
    client.log_artifact(parent_id, str(path))
    client.set_terminated(parent_id, "FINISHED")
    return done


def write_run(
    uri: str, experiment: str, name: str, tags: Mapping[str, str], metrics: Mapping[str, float], files: Sequence[Path]
) -> None:
    """Write a single run with attached files, such as an acceptance run."""
    client, experiment_id = _open(uri, experiment)
    run_id = client.create_run(experiment_id, run_name=name, tags=dict(tags)).info.run_id
    now_ms = int(time.time() * 1e3)
    client.log_batch(run_id, metrics=[Metric(name, value, now_ms, 0) for name, value in metrics.items()])
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id, "FINISHED")


def _open(uri: str, experiment: str) -> tuple[MlflowClient, str]:
    new_store.create_if_missing(uri)
    client = MlflowClient(tracking_uri=uri)
    existing = client.get_experiment_by_name(experiment)
    experiment_id = str(existing.experiment_id if existing else client.create_experiment(experiment))
    new_store.keep_artifacts_beside(uri)
    return client, experiment_id


def _write_result(client: MlflowClient, experiment_id: str, parent_id: str, result: ImportedResult) -> None:
    now_ms = int(time.time() * 1e3)
    derived = imported.derive_metrics(result)
    claims = {f"claimed_{name}": value for name, value in result.claims.values.items()}
    metrics = {name: value for name, value in {**result.metrics, **derived, **claims}.items() if math.isfinite(value)}
    tags = {
        mlflow_store.KIND: mlflow_store.IMPORTED_KIND,
        mlflow_store.OUTCOME: "complete" if result.feasible else "infeasible",
        "device": result.device,
        "devices": str(result.devices or ""),
        "contradictions": "; ".join(imported.find_contradictions(result, derived)),
        "notes": "; ".join(result.notes),
        "claims_statistic": result.claims.statistic if result.claims.values else "",
        "claims_flops": result.claims.flops if result.claims.values.keys() & imported.FLOPS_CLAIMS else "",
        **{name: str(value) for name, value in result.machine_info.items()},
        mlflow_store.PARENT_RUN: parent_id,
    }
    run_id = client.create_run(experiment_id, run_name=result.name).info.run_id
    client.log_batch(
        run_id,
        metrics=[Metric(name, value, now_ms, 0) for name, value in metrics.items()],
        params=[Param(name, exact_value(value)) for name, value in result.params.items()],
        tags=[RunTag(name, value[:MAX_TAG_LENGTH]) for name, value in tags.items() if value],
    )
    client.set_terminated(run_id, "FINISHED")
