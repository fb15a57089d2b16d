"""Start a run of a sweep: acquire the lock, open the study, and start the recording process."""

import gc
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from sweeper.common.format import count
from sweeper.common.trials import RETRIED
from sweeper.execution import lock
from sweeper.pages import plan_view
from sweeper.preflight.sweep_plan import SweepPlan
from sweeper.results.description import SweepDescription, describe_sweep
from sweeper.search.progress import SweepProgress
from sweeper.search.study import Study
from sweeper.tracking import client, provenance
from sweeper.tracking.client import TrackingClient
from workloads.api import secrets


@dataclass(frozen=True)
class OpenedSweep:
    """The state of one run of a sweep."""

    arguments: Sequence[str]  # the command line that resumes the sweep
    lock: IO[str]
    study: Study
    progress: SweepProgress
    tracking: TrackingClient
    description: SweepDescription  # the content of sweep.json
    retry_note: str  # describes the trials that run again; empty without `retry`

    @property
    def command(self) -> str:
        return shlex.join(secrets.masked_arguments(self.arguments))


def open_sweep(plan: SweepPlan, arguments: Sequence[str]) -> OpenedSweep:
    """Lock the sweep, open its study, and start the recording process with all existing records."""
    gathered = provenance.gather(plan.target, arguments)
    sweep_lock = lock.acquire(plan.folder)
    study = _open_study(plan, provenance.comparable_state(gathered, plan.resolved))
    retry_note = ""
    if retry := plan.config.retry:
        changes = dict.fromkeys(change for retried in study.retries for change in retried.changed)
        changed = "; ".join(changes) or "nothing that is recorded"
        verb = "runs" if len(study.retries) == 1 else "run"
        runs = f"{count(len(study.retries), 'trial')} {verb} again; changed since: {changed}"
        retry_note = f"{retry}: {runs if study.retries else 'there is no such trial'}"
    opening = client.opening_message(
        plan,
        study=study.id,
        trials=study.trial_count,
        command=shlex.join(secrets.masked_arguments(arguments)),
        provenance=gathered,
        texts={
            "machine": plan_view.describe_devices(plan),
            "environment": plan_view.describe_environment(plan),
            "retry": retry_note,
        },
    )
    description = describe_sweep(plan, study=study.id, arguments=arguments, provenance=gathered, uri=opening["uri"])
    description.write(plan.folder)
    tracking = TrackingClient(opening, plan.folder, plan.directory, sweep_lock.fileno())
    for record in study.records.values():
        tracking.log_trial(record)
    searched = [record for record in study.records.values() if not record.remeasurement]
    repeated = study.replaced | study.retried
    progress = SweepProgress(
        plan.criteria,
        plan.config.budget,
        [record for record in searched if record.number not in repeated],
        repeated=[record for record in searched if record.number in repeated],
        gpus=plan.resources.gpus,
        nodes=len(plan.target.nodes),
        gpu_price_per_hour=plan.config.price_per_hour,
    )
    return OpenedSweep(arguments, sweep_lock, study, progress, tracking, description, retry_note)


def _open_study(plan: SweepPlan, run_state: dict[str, str]) -> Study:
    gc.disable()  # reading a study frees nothing, and a full collection takes 0.4 s with 20,000 trials
    try:
        return Study(
            plan.folder / "study.journal",
            plan.identity,
            plan.space,
            plan.config.search,
            plan.config.seed,
            plan.criteria,
            initial_points=plan.initial_points,
            retry=RETRIED[plan.config.retry] if plan.config.retry else (),
            run_state=run_state,
        )
    finally:
        gc.freeze()
        gc.enable()
