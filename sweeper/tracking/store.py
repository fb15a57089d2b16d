"""Write a sweep to an MLflow store: a parent run for the sweep and a child run for each trial.

The study on disk is the source of truth, and the runs mirror it. Everything can be written repeatedly but appears only
once. The writing process may be killed, and the server may go down, at any time. The next writer adds what is missing.
"""

import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# A call makes only a few short attempts. The recording process itself retries until it succeeds, and reports errors.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
# MLflow would print each trial's URL, for which it reads the run again (one of six requests per trial).
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException

from sweeper.common.format import exact_value
from sweeper.common.trials import TrialRecord, TrialStatus, run_name
from sweeper.tracking import mlflow_store, mlflow_view, new_store
from sweeper.tracking.child_runs import PAGE_SIZE, ChildRuns
from sweeper.tracking.mlflow_view import RankedTrial, SweepView
from sweeper.tracking.shown_metrics import USUAL, shown_metrics

# MLflow has three final states for a run. Other statuses become KILLED. The tag `outcome` has the trial's own status.
RUN_STATUS = {
    TrialStatus.COMPLETE: "FINISHED",
    TrialStatus.PRUNED: "FINISHED",
    TrialStatus.INFEASIBLE: "FAILED",
    TrialStatus.FAILED: "FAILED",
}
NOTHING: Mapping[str, Any] = {}
MAX_METRICS, MAX_TEXTS, MAX_NAME_LENGTH = 800, 100, 250  # maximum per batch (1,000 in total), and characters per name
MAX_EXPERIMENT_TAG_LENGTH = 5000  # MLflow rejects longer tags
SWEEPS_HEADING = "**Sweeps**:"  # the text after this in an experiment's description is rewritten with each sweep
LISTED_SWEEPS = 12  # sweeps listed in that text; a collapsed page still shows the first line


class Store:
    """A sweep's runs in an MLflow store."""

    def __init__(
        self,
        uri: str,
        experiment: str,
        study_id: str,
        sweep: str,
        parent: Mapping[str, Any],
        on_page: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Open or create the experiment and the parent run, and find out which trials are written.

        Args:
            study_id: the id of the sweep's study, which identifies the sweep's runs.
            parent: the parent run's `tags`, `params` and text `artifacts` by name; `started_at`, the start time of the
                command; `trials`, the number of trials in the study at that time; and `objectives`, the metrics that
                rank the trials.
            on_page: called with the number of runs so far, while runs are listed.
        """
        self.uri = uri
        self._study_id = study_id
        self._sweep = sweep
        self._parent_tags = parent["tags"]
        self._listed_first = [*parent.get("objectives", ()), *USUAL]
        new_store.create_if_missing(uri)
        self._client = MlflowClient(tracking_uri=uri)
        self.experiment_id = self._open_experiment(experiment)
        new_store.keep_artifacts_beside(uri)
        self._is_marked_running = True
        self.written_before = 0  # how many of the first trials were written when the sweep was last closed
        # Arguments of `finish_results` for a finished sweep with complete results, or empty if anything is missing.
        self.stored_results: dict[str, str] = {}
        self.parent_id = self._open_parent(parent)
        self.children = ChildRuns(self._client, self.experiment_id, study_id, self.parent_id)
        if self.written_before and self.written_before == parent.get("trials"):
            self.children.expect(self.written_before)
        else:
            self.children.list_all(on_page)

    def write_trial(self, record: TrialRecord) -> None:
        """Write a trial. The call can be repeated even if an earlier call wrote only part of the trial."""
        end_ms = int(record.ended_at_s * 1e3)
        name = run_name(record.number, record.params, record.remeasurement)
        run_id = self._child_id(record.number, name, record.started_at_s)
        metrics = shown_metrics(record.metrics, self._listed_first) | dict(record.metrics)
        metrics |= {"trial_time_s": record.duration_s, mlflow_view.TRIAL: record.number}
        tags = {name: value for name, value in self._trial_tags(record).items() if value not in ("", None)}
        self._log(run_id, end_ms, metrics, {name: str(value)[:5000] for name, value in tags.items()}, record.all_params)
        self._client.log_text(run_id, record.to_json(), "trial.json")
        if record.detail:
            self._client.log_text(run_id, legal_text(record.detail), "last_lines.txt")
        for path in filter(os.path.exists, record.files):  # the user may have deleted some files
            self._client.log_artifact(run_id, path)
        self._client.set_terminated(run_id, RUN_STATUS.get(record.status, "KILLED"), end_ms)
        self._leave_out_attempt(record)

    def _leave_out_attempt(self, record: TrialRecord) -> None:
        if record.retry and record.superseded is not None and (run := self.children.find(record.superseded)):
            other = {record.number, record.retry.trial} - {record.superseded}
            self._client.set_tag(run.info.run_id, mlflow_store.RETRIED_AS, str(*other))

    def set_aside(self, record: TrialRecord, reason: str) -> None:
        """End the run of a trial whose values MLflow rejects. Write the outcome, the reason and the record file."""
        name = run_name(record.number, record.params, record.remeasurement)
        run_id = self._child_id(record.number, name, record.started_at_s)
        self._log(run_id, tags={mlflow_store.OUTCOME: record.status.value, mlflow_store.REFUSED: reason})
        self._client.log_text(run_id, record.to_json(), "trial.json")
        self._client.set_terminated(run_id, RUN_STATUS.get(record.status, "KILLED"), int(record.ended_at_s * 1e3))
        self._leave_out_attempt(record)

    def write_step(self, number: int, name: str, step: int, at_s: float, metrics: Mapping[str, float]) -> None:
        """Write a running trial's step as a point of the metrics `steps/…`. `at_s` is in epoch seconds."""
        points = {f"steps/{key}": value for key, value in metrics.items()}
        self._log(self._child_id(number, name, at_s), int(at_s * 1e3), points, step=step)

    def write_front(self, numbers: Sequence[int]) -> None:
        """Mark only these trials as the front, with a tag, and with a metric for sorting and filtering in MLflow."""
        now_ms = int(time.time() * 1e3)
        tagged = self.children.find_with_tag(mlflow_store.FRONT, "yes")
        for number, run in tagged.items():
            if number not in numbers:
                self._client.log_metric(run.info.run_id, mlflow_store.FRONT, 0, now_ms)
                self._client.delete_tag(run.info.run_id, mlflow_store.FRONT)
        for number in numbers:
            if number not in tagged and (run := self.children.find(number)):
                self._log(run.info.run_id, now_ms, {mlflow_store.FRONT: 1}, {mlflow_store.FRONT: "yes"})

    def close(
        self,
        status: str,
        metrics: Mapping[str, float],
        tags: Mapping[str, str],
        artifacts: Mapping[str, str],
        plots: Sequence[str],
        abandoned: Sequence[int] = (),
        written: int | None = None,
        digest: str = "",
    ) -> None:
        """Write the sweep's results to the parent run and end the run.

        Args:
            artifacts, plots: text files' contents by file name, and the path of the page of plots.
            abandoned: numbers of trials without a record that will not run again. If such a trial reported steps, its
                run ends as cancelled.
            written: how many of the first trials have ended and are written; None if any of them has not ended.
            digest: the digest of all of the sweep's results.
        """
        now_ms = int(time.time() * 1e3)
        self._client.set_tag(self.parent_id, mlflow_store.RESULTS, json.dumps({"begun": digest}))
        for run in filter(None, map(self.children.find, abandoned)):
            self._client.set_tag(run.info.run_id, mlflow_store.OUTCOME, TrialStatus.CANCELLED.value)
            self._client.set_terminated(run.info.run_id, "KILLED", now_ms)
        self._log(self.parent_id, now_ms, metrics, tags)
        for path, text in artifacts.items():
            self._client.log_text(self.parent_id, text, path)
        for path in plots:
            self._client.log_artifact(self.parent_id, path, "plots")
        if written is not None:
            self._client.set_tag(self.parent_id, mlflow_store.WRITTEN, str(written))
        self._client.set_terminated(self.parent_id, status, now_ms)

    def write_view(self, view: SweepView, on_place: Callable[[int], None] = lambda place: None) -> str:
        """Rank the best trials and write the sweep's view. Returns the key of the view.

        The key is empty for unknown versions of MLflow, which may not show the view as intended. `on_place` is called
        with each place in the ranking that is written.
        """
        self._write_ranking(view.ranking, on_place)
        is_known = mlflow_view.is_known(mlflow_store.read_version(self.uri))
        self._link_sweeps(is_known)
        if not is_known:
            return ""
        key = mlflow_view.share_key(self._study_id)
        value = mlflow_view.encode(mlflow_view.build_trials_state(view, self._study_id))
        if len(value) <= MAX_EXPERIMENT_TAG_LENGTH:
            self._client.set_experiment_tag(self.experiment_id, mlflow_view.TAG_PREFIX + key, value)
        links = self._describe_links(self._sweep, key)
        description = self._client.get_run(self.parent_id).data.tags.get(mlflow_store.DESCRIPTION, "")
        self._client.set_tag(self.parent_id, mlflow_store.DESCRIPTION, f"{links}\n\n{description}")
        return key

    def _link_sweeps(self, is_known: bool) -> None:
        sweeps, links = {mlflow_store.KIND: mlflow_store.SWEEP_KIND}, list[str]()
        found = mlflow_store.search_runs(self._client, [self.experiment_id], sweeps, LISTED_SWEEPS)
        for run in itertools.islice(found, LISTED_SWEEPS):
            key = mlflow_view.share_key(run.data.tags[mlflow_store.STUDY]) if is_known else ""
            links.append(self._describe_links(run.info.run_name, key))
        written = self._client.get_experiment(self.experiment_id).tags.get(mlflow_store.DESCRIPTION, "")
        kept = written.partition(SWEEPS_HEADING)[0]  # text that a person wrote
        text = f"{kept}{SWEEPS_HEADING} {', '.join(links)}"
        if len(text) <= MAX_EXPERIMENT_TAG_LENGTH:
            self._client.set_experiment_tag(self.experiment_id, mlflow_store.DESCRIPTION, text)

    def _describe_links(self, sweep: str, key: str) -> str:
        page = mlflow_view.runs_page(self.experiment_id, sweep, key).removeprefix("/")  # works on every page
        return f"[{sweep}]({page}) ([charts]({page}{mlflow_view.AS_CHARTS}))"

    def finish_results(self, digest: str, view: str) -> None:
        """Mark the results that `close` began to write as complete, unless another process has called `close` since."""
        begun = self._client.get_run(self.parent_id).data.tags[mlflow_store.RESULTS]
        if json.loads(begun) == {"begun": digest}:
            complete = json.dumps({"digest": digest, "view": view})
            self._client.set_tag(self.parent_id, mlflow_store.RESULTS, complete)

    def _write_ranking(self, ranking: Sequence[RankedTrial], on_place: Callable[[int], None]) -> None:
        now_ms = int(time.time() * 1e3)
        ranked = {trial.number: trial for trial in ranking}
        # Remove values in trials' runs that no longer hold because the sweep was extended.
        for number, run in self.children.find_with_metric(mlflow_view.PLACE).items():
            run_id, tags = run.info.run_id, ranked[number].tags if number in ranked else {}
            if number not in ranked:
                self._client.log_metric(run_id, mlflow_view.PLACE, math.nan, now_ms)
            if mlflow_store.FRONT_VERDICT in run.data.tags and not tags:
                self._client.log_metric(run_id, mlflow_store.FRONT_SHARE, math.nan, now_ms)
            for tag in (mlflow_store.FRONT_VERDICT, mlflow_store.SAME_AS, mlflow_store.EXCEEDED):
                if tag in run.data.tags and tag not in tags:
                    self._client.delete_tag(run_id, tag)
        self._client.log_metric(self.parent_id, mlflow_view.PLACE, 0, now_ms)
        if ranking and ranking[0].metrics:  # the parent run also shows the result of the finals
            self._client.set_tag(self.parent_id, mlflow_view.INTERVAL, ranking[0].interval)
        for place, trial in enumerate(ranking, start=1):
            tags = ({mlflow_view.INTERVAL: trial.interval} if trial.interval else {}) | dict(trial.tags)
            if run := self.children.find(trial.number):  # None if MLflow rejects the trial
                self._log(run.info.run_id, now_ms, {mlflow_view.PLACE: place, **trial.metrics}, tags)
            on_place(place)

    def _open_experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                # MLflow shows this kind of experiment with run tables and charts, and others as a chat application.
                kind = {"mlflow.experimentKind": "custom_model_development"}
                return str(self._client.create_experiment(name, tags=kind))
            except MlflowException:  # another sweep created the experiment first
                if (experiment := self._client.get_experiment_by_name(name)) is None:
                    raise
        if experiment.lifecycle_stage == "deleted":
            self._client.restore_experiment(experiment.experiment_id)
        return str(experiment.experiment_id)

    def _open_parent(self, parent: Mapping[str, Any]) -> str:
        started_at = parent["started_at"]
        tags = {name: str(value) for name, value in parent["tags"].items()}
        tags[mlflow_store.SWEEP_NAME] = self._sweep  # the trials have the same tag, so pages show them together
        artifacts = dict(parent["artifacts"])
        identifying = {mlflow_store.STUDY: self._study_id, mlflow_store.KIND: mlflow_store.SWEEP_KIND}
        if runs := list(mlflow_store.search_runs(self._client, [self.experiment_id], identifying, PAGE_SIZE)):
            run_id, earlier_tags = str(runs[0].info.run_id), runs[0].data.tags
            self._is_marked_running = runs[0].info.status == "RUNNING"
            self.written_before = int(earlier_tags.get(mlflow_store.WRITTEN, 0))
            results = json.loads(earlier_tags.get(mlflow_store.RESULTS, "{}"))
            if runs[0].info.status == "FINISHED" and "digest" in results:
                self.stored_results = results
            # Keep the earlier configuration, and add the differences of this command.
            for name, value in tags.items():
                if value not in (lines := earlier_tags.get(name, "")).splitlines():
                    lines = f"{lines}\n{value}".strip()
                tags[name] = lines
            if earlier_tags.get(mlflow_store.STARTED_AT) != started_at:
                differs = any(earlier_tags.get(name) != value for name, value in tags.items())
                artifacts = {f"since {started_at}/{path}": text for path, text in artifacts.items() if differs}
        else:
            tags[mlflow_store.STARTED_AT] = started_at
            run = self._client.create_run(self.experiment_id, run_name=self._sweep, tags=identifying)
            run_id = str(run.info.run_id)
        self._log(run_id, tags=tags, params=parent["params"])
        for path, text in artifacts.items():
            self._client.log_text(run_id, text, path)
        return run_id

    def _log(
        self,
        run_id: str,
        at_ms: int = 0,
        metrics: Mapping[str, float] = NOTHING,
        tags: Mapping[str, str] = NOTHING,
        params: Mapping[str, Any] = NOTHING,
        step: int = 0,
    ) -> None:
        points = [Metric(name, value, at_ms, step) for name, value in _with_legal_names(metrics).items()]
        texts = {name: legal_text(exact_value(value)) for name, value in _with_legal_names(params).items()}
        settings = [Param(name, text) for name, text in texts.items()]
        labels = [RunTag(name, legal_text(value)) for name, value in tags.items()]
        while True:
            self._client.log_batch(run_id, points[:MAX_METRICS], settings[:MAX_TEXTS], labels[:MAX_TEXTS])
            points, settings, labels = points[MAX_METRICS:], settings[MAX_TEXTS:], labels[MAX_TEXTS:]
            if not (points or settings or labels):
                return

    def _child_id(self, number: int, name: str, started_at_s: float) -> str:
        if not self._is_marked_running:
            self._client.update_run(self.parent_id, status="RUNNING")
            self._is_marked_running = True
        return str(self.children.find_or_create(number, legal_text(name), started_at_s).info.run_id)

    def _trial_tags(self, record: TrialRecord) -> dict[str, Any]:
        return {
            mlflow_store.OUTCOME: record.status.value,
            **record.repeats,
            "changed": ("; ".join(record.retry.changed) or "nothing that is recorded") if record.retry else None,
            "attempts": record.attempts,
            "reason": record.reason,
            mlflow_store.WORK: json.dumps(dict(record.work)) if record.work else "",
            # As columns next to the metrics, these distinguish the runs of different sweeps.
            mlflow_store.SWEEP_NAME: self._sweep,
            "hardware": self._parent_tags.get("hardware", ""),
            "device": self._parent_tags.get("device", ""),
            **_machine_tags(record),
            **record.where,
        }


def legal_name(name: str) -> str:
    """Return the name of a metric or parameter with only the characters and path parts that MLflow allows."""
    parts = re.sub(r"[^\w\-. :/]", "_", name).split("/")
    legal = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    if len(legal) <= MAX_NAME_LENGTH:
        return legal
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:8]
    return f"{legal[: MAX_NAME_LENGTH - 9]}_{digest}"


def _with_legal_names(values: Mapping[str, Any]) -> dict[str, Any]:
    legal: dict[str, Any] = {}
    for name, value in values.items():
        new = shortest = legal_name(name)
        while new != name and (new in values or new in legal):
            new = f"{shortest}_{len(legal)}"
        legal[new] = value
    return legal


def legal_text(text: str) -> str:
    """Return text that every database accepts, without lone surrogates and NUL characters (PostgreSQL rejects NUL)."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()


def _machine_tags(record: TrialRecord) -> dict[str, Any]:
    if not record.measurements:
        return {}
    ranks = [measurement["machine_info"] for measurement in record.measurements]
    backends = {str(info["attention"]) for info in ranks if "attention" in info}
    limits_w = {limit_w for info in ranks if (limit_w := info.get("power_limit_w"))}
    throttle_reasons = {reason for info in ranks for reason in str(info.get("slowed_by", "")).split()}
    # The source of the energy values, or why they are unknown, or empty if no device reports any.
    energies = [energy for measurement in record.measurements if (energy := measurement.get("energy"))]
    return {
        "dtype": record.measurements[0]["matrix_dtype"],
        "attention": " or ".join(sorted(backends)),
        "power_limit_w": " or ".join(f"{limit_w:g}" for limit_w in sorted(limits_w)),
        "slowed_by": " ".join(sorted(throttle_reasons)),
        "energy": " or ".join(dict.fromkeys(energy["missing"] or energy["source"] for energy in energies)),
        "tainted": "yes" if any(info.get("tainted") for info in ranks) else "",
    }
