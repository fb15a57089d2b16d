"""Turn a trial's result into the record to store, with the metrics or the reason why there are none."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sweeper.common.format import one_line
from sweeper.common.trials import Trial, TrialRecord, TrialResult, TrialStatus, rank_file_name
from sweeper.config.schema import Hardware
from sweeper.config.space import Parameters
from sweeper.metrics import derivation
from sweeper.metrics.criteria import Criteria
from sweeper.metrics.derivation import Prices, cost_metrics, describe_missing
from sweeper.preflight.work import WorkIdentifier
from workloads.api.metrics import find_source
from workloads.api.secrets import mask


@dataclass(frozen=True)
class TrialJudge:
    """Derives the metrics of each trial and writes the trial's files."""

    criteria: Criteria  # objectives and limits; a complete trial must have their metrics
    hardware: Hardware
    achieved_tflops: Mapping[str, float]  # the device's matmul ceilings, by dtype
    predict: Callable[[Parameters], Mapping[str, float]]  # estimates the metrics of a point
    work: WorkIdentifier
    files: Path  # the folder for trials' files
    prices: Prices = field(default_factory=Prices)

    def build_record(self, trial: Trial, result: TrialResult, *, attempts: int, elapsed_s: float) -> TrialRecord:
        """Write the files of a finished trial and return its record."""
        status, reason, derived = result.status, result.reason, dict[str, float]()
        if status is TrialStatus.COMPLETE:
            derived = derivation.derive(
                result.measurements, self.hardware.dense_peak_tflops, self.achieved_tflops, self.hardware.bandwidth_tb_s
            )
            derived |= cost_metrics(derived, len(result.measurements), self.prices)
            derived |= self.predict(trial.params)
            if reason := next((m.unranked for m in result.measurements if m.unranked), ""):  # the speed is not ranked
                for name in self.criteria.metrics:
                    if find_source(name) or not self.criteria.has_front:  # an emulated format has errors but no speed
                        derived.pop(name, None)
            if impossible := derivation.describe_impossible(derived, self.hardware.clock_headroom):
                status, reason = TrialStatus.FAILED, impossible
            elif not reason and (reason := describe_missing(self.criteria, result.measurements, derived)):
                status = TrialStatus.FAILED
        return TrialRecord(
            number=trial.number,
            params=trial.params,
            status=status,
            reason=one_line(mask(reason)),
            detail=mask(result.detail),
            metrics=derived if status is TrialStatus.COMPLETE else {},
            measurements=[asdict(replace(measurement, files={})) for measurement in result.measurements],
            files=self._write_files(trial, result),
            where=result.where,
            started_at_s=result.started_at_s,
            ended_at_s=result.ended_at_s,
            elapsed_s=elapsed_s,
            attempts=attempts,
            fixed=self.work.fixed_parameters(trial.params),
            work=self.work.identify(trial.params, result.measurements),
            remeasurement=trial.remeasurement,
            retry=trial.retry,
        )

    def derive_step(self, trial: Trial, metrics: Mapping[str, float], ranks: int) -> dict[str, float]:
        """Return a running trial's metrics at a step, including the MFU and the cost if what they need is known."""
        dtype = {**self.work.fixed_parameters(trial.params), **trial.params}.get("dtype")
        peak_tflops = self.hardware.dense_peak_tflops.get(str(dtype))
        return derivation.with_utilization(metrics, peak_tflops, ranks) | cost_metrics(metrics, ranks, self.prices)

    def _write_files(self, trial: Trial, result: TrialResult) -> list[str]:
        folder = self.files / f"{trial.number:04d}"
        files = {
            rank_file_name(rank, name): content
            for rank, measurement in enumerate(result.measurements)
            for name, content in measurement.files.items()
        }
        paths = []
        for name, content in {**files, **result.files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            is_text = path.suffix == ".txt"  # a program's log may contain a secret
            path.write_bytes(mask(content.decode(errors="replace")).encode() if is_text else content)
            paths.append(str(path.absolute()))
        if result.detail:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "last_lines.txt").write_text(mask(result.detail))
        return paths
