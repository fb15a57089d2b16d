"""Objectives and limits that no trial of a sweep could have are refused in a line, before Ray starts."""

from collections.abc import Callable

import pytest

from sweeper.execution import cluster
from tests.conftest import CommandResult

REFUSED = {
    "workload=llama_tiny objective=[tokens_per_s,peak_device_gib]": ["objective=peak_device_gib", "read from a GPU"],
    "workload=llama_tiny limits.peak_device_gib=70": ["limits.peak_device_gib", "read from a GPU"],
    "workload=llama_tiny objective=joules_per_token": ["objective=joules_per_token", "the energy of a CPU"],
    "objective=[tflops,tflop_per_joule]": ["objective=tflop_per_joule", "the energy of a CPU"],
    "limits.power_w=600": ["limits.power_w", "read from a GPU"],
    "objective=mfu": ["objective=mfu", "dense peak of cpu is not known", "use tflops"],
    "workload=memory objective=bandwidth_utilization": ["bandwidth of cpu is not known", "use gb_per_s"],
    "workload=llama_tiny objective=mamf_utilization": ["no matmul rate", "run workload=matmul first"],
    "objective=loss": ["has no loss. Available: tflops, tflops_sustained, step_time_ms, relative_error\n"],
    "gpus=2 objective=loss": ["Available: tflops, tflops_slowest_gpu, gpu_spread, tflops_sustained, step_time_ms, tfl"],
    "objective=latency": ["step_time_ms", "; on GPUs also tokens_per_joule, joules_per_token, ", "power_w"],
    "objective=tflops_per_gpu": ["objective=tflops_per_gpu", "set gpus="],
    "workload=llama_tiny objective=cost_per_million_tokens": ["there is no price", "price_per_hour="],
    "workload=llama_tiny objective=cost_per_million_tokens price_per_kwh=0.3": [
        "the energy of a CPU",
        "price_per_hour=",
    ],
}
TAKEN = [
    "objective=[tflops,relative_error] limits.step_time_ms=5",
    "gpus=2 objective=tflops_per_gpu",
    "workload=llama_tiny objective=[cost_per_million_tokens,peak_host_gib] price_per_hour=3",
    "objective=mfu hardware=h200",
]


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_the_devices_cannot_measure_is_refused(
    arguments: str, run_cli: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(cluster, "start", started.append)
    result = run_cli("hardware=cpu", *arguments.split())
    assert result.code == 2 and not started and len(result.err.splitlines()) == 1
    assert all(part in result.err for part in REFUSED[arguments]), result.err


@pytest.mark.parametrize("arguments", TAKEN)
def test_what_they_may_measure_is_taken(arguments: str, run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("hardware=cpu", *arguments.split(), "plan=true")
    assert result.code == 0, result.err
