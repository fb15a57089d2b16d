"""The view of a small sweep in MLflow, whose finals have turned the order of its search around."""

from collections.abc import Mapping, Sequence
from typing import Any

from sweeper.common.trials import Remeasurement
from sweeper.tracking.mlflow_view import RankedTrial, SweepView
from sweeper.tracking.shown_metrics import FINAL, shown_name
from sweeper.tracking.store import Store
from tests.support.factories import trial_record


def make_view(
    objective: str, memory_metric: str, parameters: Sequence[str], ranking: Sequence[RankedTrial]
) -> SweepView:
    """Return the view of a sweep with finals that maximizes `objective`."""
    return SweepView(
        objective=objective,
        metrics=[shown_name(objective, FINAL), *map(shown_name, (objective, "mfu", memory_metric))],
        parameters=parameters,
        ranking=ranking,
        memory=memory_metric,
    )


def write_sweep(
    uri: str,
    experiment: str,
    name: str,
    view: SweepView,
    trials: Sequence[tuple[Mapping[str, Any], Mapping[str, float]]],
    remeasured: tuple[Remeasurement, float],
    **fields: Any,
) -> Store:
    """Write the parent run, trials by their parameters and metrics, and a round of the finals with its rate.

    Args:
        uri: the store's.
        experiment: the workload's name.
        name: of the sweep.
        view: of the sweep; it is not written.
        trials: of the search.
        remeasured: the round.
        fields: further fields of every trial's record.
    """
    tags = {"workload": experiment, "device": "cpu"}
    parent = {"started_at": "now", "params": {}, "tags": tags, "artifacts": {}, "objectives": [view.objective]}
    store = Store(uri, experiment, "study", name, parent)
    for number, (params, metrics) in enumerate(trials):
        store.write_trial(trial_record(number, params, metrics=dict(metrics), **fields))
    remeasurement, rate = remeasured
    params = trials[remeasurement.trial][0]
    metrics = {view.objective: rate}
    store.write_trial(trial_record(len(trials), params, metrics=metrics, remeasurement=remeasurement, **fields))
    return store
