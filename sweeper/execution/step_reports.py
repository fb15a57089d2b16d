"""The steps that the running trials of a sweep report, and the trials that end after their next step."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from sweeper.common.trials import Trial
from sweeper.execution.worker import StepCollector

LAST_REPORTS_TIMEOUT_S = 10.0


class StepReports:
    """The driver's end of the step collector, an actor to which workers report.

    Attributes:
        collector: the actor, which a worker gets with its trial.
    """

    def __init__(self) -> None:
        self.collector = _start_collector()
        self._trials: dict[int, Trial] = {}  # by sequence number
        self._pending: Any = None  # a reference to the collector's next reports

    def add(self, sequence_number: int, trial: Trial) -> None:
        """Take the steps that are reported under this number to be those of this trial."""
        self._trials[sequence_number] = trial

    def take(self, *, wait: bool = False) -> list[tuple[Trial, int, float, dict[str, float]]]:
        """Return the steps that were reported since the last call: trial, step, time and metrics.

        Args:
            wait: wait up to 10 s for all reports; otherwise those that have not arrived come with a later call.
        """
        reports = []
        try:
            if self._pending and (wait or ray.wait([self._pending], timeout=0)[0]):
                reports, self._pending = ray.get(self._pending), None
            if self._pending is None:
                self._pending = self.collector.take.remote()
            if wait:
                reports, self._pending = reports + ray.get(self._pending, timeout=LAST_REPORTS_TIMEOUT_S), None
        except RayError:  # the actor is gone, with the reports that it held
            self.collector, self._pending = _start_collector(), None
        return [
            (self._trials[sequence_number], step, at_s, metrics) for sequence_number, step, at_s, metrics in reports
        ]

    def prune(self, sequence_number: int) -> None:
        """Ask the trial to end after its next step."""
        self.collector.prune.remote(sequence_number)

    def close(self) -> None:
        ray.kill(self.collector, no_restart=True)


def _start_collector() -> Any:
    """Start the step collector on this node, on which the sweep depends in any case."""
    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return ray.remote(StepCollector).options(num_cpus=0, scheduling_strategy=on_this_node).remote()
