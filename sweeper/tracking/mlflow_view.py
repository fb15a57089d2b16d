"""Build the view of a sweep's trials for MLflow's web UI.

MLflow stores a shared view of an experiment's runs in the experiment tag `mlflow.sharedViewState.KEY` and opens the
view if the URL contains `?viewStateShareKey=KEY`. The tag's value is the page's state as JSON, which may be compressed.
The format is undocumented. The fields below come from `ExperimentPageUIState` and `ExperimentPageSearchFacetsState` in
MLflow's JavaScript, and `tests/sweeper/tracking/test_mlflow_ui.py` opens the view with the installed server.

Importing MLflow takes seconds, so this module, which the driver uses, does not import it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import urllib.parse
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from sweeper.tracking import mlflow_store

TAG_PREFIX = "mlflow.sharedViewState."
COMPRESSED = "deflate;"  # the prefix of a compressed value in base64
# Since 3.17, MLflow's run list keeps column order and width and filters by missing tags. Version 4 is unknown.
FIRST_VERSION, FIRST_UNKNOWN_VERSION = (3, 17), (4, 0)
RANKED_TRIALS = 10  # the number that the summary shows; each takes a write (10 ms on an idle machine)

# Values that runs in a view have in addition to the metrics of the trial.
PLACE = "place"  # 0 for the parent run, 1 for the winner, 2 for the next trial
INTERVAL = "interval"  # the 95% interval of the rate, as text
TRIAL = "trial"  # the trial's number as a metric, because charts offer no other axis for it

# Widths in pixels. At 1400 px, MLflow's menu and assistant leave 780 px for the table, 70 of them for check boxes.
RUN_NAME_PX, CREATED_PX, DURATION_PX = 150, 45, 80
COLUMN_PX = {PLACE: 50, mlflow_store.FRONT: 50, INTERVAL: 150}
MIN_COLUMN_PX, MIN_METRIC_PX, MAX_COLUMN_PX = 50, 85, 140  # MLflow does not round metrics
CHARACTER_PX, PADDING_PX = 7, 20  # widths in a column heading
RUN_NAME, CREATED, DURATION = "attributes.`Run Name`", "runDateAndNestInfo", "duration"  # ids of MLflow's own columns
SECTION = "Sweep"  # the section of our charts
OTHER_SECTION = "Model metrics"  # the section where MLflow puts charts of all other metrics
CHART_COLUMNS = 2
MAX_PARAMETER_CHARTS = 6
MACHINE_LEARNING = "workflowType=machine_learning"  # without this, MLflow shows an experiment as a chat application
AS_CHARTS = "&compareRunsMode=CHART"
MAX_LINES = 100  # runs in a chart; MLflow initially loads this many


@dataclass(frozen=True)
class RankedTrial:
    """One of a sweep's best trials. The metrics come from the finals and are empty if the trial was not a finalist."""

    number: int
    metrics: dict[str, float]
    interval: str  # the 95% interval of the rate as text; empty if there is none
    tags: Mapping[str, str] = field(default_factory=dict)  # additional tags for the trial's run


@dataclass(frozen=True)
class SweepView:
    objective: str
    metrics: Sequence[str]  # metric columns; the first has the winner's rate
    parameters: Sequence[str]  # parameters that vary
    ranking: Sequence[RankedTrial] = ()  # best first
    other_objectives: Sequence[str] = ()
    memory: str = ""  # the memory metric on the x-axis of a chart of the objective; empty for no chart

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SweepView:
        return SweepView(**{**values, "ranking": [RankedTrial(**trial) for trial in values["ranking"]]})


def is_known(version: str) -> bool:
    """Return whether this version of MLflow is known to show the view as intended."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and FIRST_VERSION <= (int(match[1]), int(match[2])) < FIRST_UNKNOWN_VERSION


def share_key(identity: str) -> str:
    """Return a view's key. The key is the same each time the view is written, so printed links stay valid."""
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def runs_page(experiment_id: str | None, sweep: str, key: str) -> str:
    """Return the path of the MLflow page with a sweep's runs: the view or, without a key, the list sorted by place."""
    if key:
        return f"/#/experiments/{experiment_id}/runs?{MACHINE_LEARNING}&viewStateShareKey={key}"
    sweep_filter = urllib.parse.quote(mlflow_store.tag_filter({mlflow_store.SWEEP_NAME: sweep}))
    order = urllib.parse.quote(_metric_column(PLACE))
    search = f"searchFilter={sweep_filter}&orderByKey={order}&orderByAsc=true"
    return f"/#/experiments/{experiment_id}/runs?{MACHINE_LEARNING}&{search}"


def encode(state: Mapping[str, Any]) -> str:
    """Encode a view's state as a tag value, compressed because a tag has at most 5,000 characters."""
    text = json.dumps(state, separators=(",", ":"))
    return COMPRESSED + base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def build_trials_state(view: SweepView, study_id: str) -> dict[str, Any]:
    """Return the page state for a sweep's parent run and the trials of the search, winner first."""
    rate, *others = (_metric_column(name) for name in view.metrics if name != mlflow_store.FRONT)
    marks = [_metric_column(name) for name in (PLACE, mlflow_store.FRONT) if name == PLACE or name in view.metrics]
    parameters = [f"params.`{name}`" for name in view.parameters]
    of_sweep = mlflow_store.tag_filter({mlflow_store.STUDY: study_id})
    return {
        "searchFilter": " and ".join([of_sweep, *(f"tags.`{tag}` IS NULL" for tag in mlflow_store.LEFT_OUT)]),
        "orderByKey": _metric_column(PLACE),
        "orderByAsc": True,
        **_columns([*marks, rate, f"tags.`{INTERVAL}`", *parameters, *others]),
        **_charts(list(_build_charts(view))),
    }


def _columns(columns: Sequence[str]) -> dict[str, Any]:
    widths_px = {RUN_NAME: RUN_NAME_PX, CREATED: CREATED_PX}
    for column in columns:
        kind, name, _ = column.split("`")
        least_px = MIN_METRIC_PX if kind == "metrics." else MIN_COLUMN_PX
        fitting_px = min(MAX_COLUMN_PX, max(least_px, CHARACTER_PX * len(name) + PADDING_PX))
        widths_px[column] = COLUMN_PX.get(name, fitting_px)
    widths_px[DURATION] = DURATION_PX
    return {"selectedColumns": list(widths_px)[2:-1], "columnOrder": list(widths_px), "columnWidths": widths_px}


def _metric_column(name: str) -> str:
    return f"metrics.`{name}`"


def _charts(charts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    common = {"metricSectionId": SECTION, "deleted": False, "isGenerated": False}
    return {
        "runsHiddenMode": "SHOW_ALL",  # otherwise charts show only ten runs
        "compareRunCharts": [{**common, **chart} for chart in charts],
        "compareRunSections": [
            {"uuid": name, "name": name, "display": name == SECTION, "isReordered": True, "columns": CHART_COLUMNS}
            for name in (SECTION, OTHER_SECTION)
        ],
        "isAccordionReordered": True,  # keeps this section order
    }


def _build_charts(view: SweepView) -> Iterator[dict[str, Any]]:
    """Yield a sweep's charts. They omit the parent run, which lacks the metrics and parameters."""
    pairs = [(view.objective, view.memory)] if view.memory else []
    if view.other_objectives:
        pairs = list(combinations((view.objective, *view.other_objectives), 2))
    axes = [(y, {"key": x, "type": "METRIC"}) for y, x in ((view.objective, TRIAL), *pairs)]
    axes += [(view.objective, {"key": name, "type": "PARAM"}) for name in view.parameters[:MAX_PARAMETER_CHARTS]]
    for y, x in axes:
        yield {
            **{"type": "SCATTER", "uuid": f"{y} over {x['key']}", "runsCountToCompare": MAX_LINES},
            **{"xaxis": x, "yaxis": {"key": y, "type": "METRIC"}},
        }
    if len(view.parameters) > 1:
        selected = {"selectedParams": list(view.parameters), "selectedMetrics": [view.objective], "showAllRuns": True}
        yield {"type": "PARALLEL", "uuid": "parallel", "runsCountToCompare": MAX_LINES, **selected}
