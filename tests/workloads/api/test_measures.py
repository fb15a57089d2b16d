"""What workloads declare to measure, on which the refusal of objectives relies, is what their trials measure."""

from typing import Any

import pytest

from workloads.api import registry
from workloads.api.contract import Measurement, Rank
from workloads.api.metrics import METRICS, Need, find_missing
from workloads.api.trial import run_trial

PARTS = [name for name in Measurement.__dataclass_fields__ if name.endswith(("_per_step", "_step_times_s"))]
SHORT: dict[str, Any] = {"warmup": 1, "repeats": 2}
SUSTAINED: dict[str, Any] = {**SHORT, "sustained_s": 0.01, "dtype": "fp32", "statistic": "median_warm"}
TINY: dict[str, Any] = {"model": "llama_tiny", "sequence_length": 16, "steps": 1, "warmup": 0, "dtype": "fp32"}
TRIALS: list[tuple[str, dict[str, Any]]] = [
    ("attention", SUSTAINED | {"sequence_length": 16, "heads": 2, "kv_heads": 1, "head_size": 8}),
    ("matmul", SUSTAINED | {"m": 8, "n": 8, "k": 8}),
    ("memory", SHORT | {"mib": 1}),
    ("precision_casts", SHORT | {"format": "fp8_tensorwise", "rows": 16, "columns": 64, "implementation": "eager"}),
    ("offload", TINY | {"sequences_per_step": 1, "device_gib": 1.0, "host_gib": 0.0}),
]


@pytest.mark.parametrize(("name", "parameters"), TRIALS)
def test_a_trial_has_every_declared_part_and_metric_and_no_other(name: str, parameters: dict[str, Any]) -> None:
    measured, declared = run_trial(name, parameters, Rank()), registry.load(name).measures.split()
    assert [part for part in PARTS if getattr(measured, part)] == [part for part in PARTS if part in declared]
    own = [part for part in declared if part in METRICS and METRICS[part].needs is not Need.GPU]
    assert set(own) <= measured.metrics.keys()
    reported = {metric for metric in measured.metrics if metric in METRICS and METRICS[metric].direction}
    assert not [metric for metric in reported if find_missing(metric, " ".join(declared))]


def test_a_metric_misses_the_parts_from_which_it_would_be_derived() -> None:
    assert find_missing("mfu", "flops_per_step") == find_missing("step_time_ms", "loss") == []
    assert find_missing("tokens_per_s_per_gpu", "flops_per_step") == ["tokens_per_step"]
    assert find_missing("loss", "tokens_per_step") == ["loss"] and find_missing("power_w", "loss") == []
