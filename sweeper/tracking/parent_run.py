"""The parent run of a sweep in MLflow: its parameters, tags and artifacts from the start."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.tracking import mlflow_store
from sweeper.tracking.provenance import driver_versions
from workloads.api.secrets import masked


def opening_message(
    plan: SweepPlan, *, study: str, trials: int, command: str, provenance: dict[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Return what the recording process opens a sweep with.

    Args:
        study: the identity of the sweep's study.
        trials: the number of trials in the study.
        command: the command that runs the sweep, secrets masked.
        provenance: of this run.
        texts: tags in words, such as the devices; empty ones are left out.
    """
    config = plan.config
    resolved = OmegaConf.to_yaml(OmegaConf.create(masked(asdict(config))))
    objectives = json.dumps({objective.metric: objective.direction for objective in plan.criteria.objectives})
    versions = {f"version.{name}": version for name, version in provenance["versions"].items() if version}
    return {
        "uri": config.tracking.uri or mlflow_store.default_uri(plan.directory),
        "experiment": config.tracking.experiment,
        "study_id": study,
        "sweep": plan.name,
        "parent": {
            "trials": trials,
            "started_at": time.strftime("%Y-%m-%d %H-%M-%S UTC", time.gmtime()),
            "params": {
                "sweep.gpus": plan.resources.gpus,
                "sweep.sampler": config.search.sampler,
                "sweep.seed": config.seed,
                **plan.space.described(),
            },
            "tags": {
                "workload": config.workload.name,
                "hardware": plan.target.hardware.name,
                "device": plan.target.model,
                "command": command,
                **({mlflow_store.OBJECTIVES: objectives} if plan.criteria.has_front else {}),
                "git_commit": provenance["git"].get("commit", ""),
                "driver": driver_versions(provenance),
                **versions,
                **{name: text for name, text in texts.items() if text},
            },
            "artifacts": {"config.yaml": resolved, "provenance.json": json.dumps(provenance, indent=2)},
        },
    }
