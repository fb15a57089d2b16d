"""What `plan=true` prints."""

from __future__ import annotations

from collections.abc import Callable

from tests.conftest import CommandResult


def test_a_plan_names_the_values_that_the_device_does_not_support(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=matmul", "hardware=mi300x", "plan=true", "space.dtype=choice(bf16,fp16,mxfp8)")
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("excluded")]
    assert "space.dtype=mxfp8" in line and "gfx942" in line
