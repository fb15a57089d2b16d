"""Report a trial's steps in this process, and end the trial after a step if requested."""

import time
from collections.abc import Mapping

from workloads.api.contract import Pruned, Rank, TrialTimeout


class StepReports:
    """Counts and reports the steps of a workload with `reports_steps`."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._step, self._started_s = 0, time.monotonic()

    def report(self, metrics: Mapping[str, float]) -> Exception | None:
        """Report a finished step. Return the exception that must end the trial (Pruned or TrialTimeout), or None."""
        self._step += 1
        reporter, timeout_s = self._rank.reporter, self._rank.timeout_s
        if reporter and reporter.report(self._step, metrics):
            return Pruned()
        if time.monotonic() - self._started_s > timeout_s:
            return TrialTimeout(f"took longer than trial.timeout_s={timeout_s:g}")
        return None

    def report_training(
        self, step_time_s: float, tokens: int, flops_per_token: float, peak_bytes: int, loss: float
    ) -> Exception | None:
        """Report a training step on `tokens` tokens. `peak_bytes` is the peak GPU memory, or 0 on a CPU."""
        memory = {"peak_device_gib": peak_bytes / 2**30} if peak_bytes else {}
        rate = tokens / step_time_s
        return self.report({"tokens_per_s": rate, "tflops": rate * flops_per_token / 1e12, **memory, "loss": loss})
