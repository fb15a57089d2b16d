"""What `plan=true` prints."""

import re
from collections.abc import Callable

from sweeper.commands.plan.answer import answer
from sweeper.commands.plan.request import read_request
from sweeper.common.format import round_to_band
from tests.conftest import CommandResult
from workloads.layouts.layout import describe


def test_a_plan_names_the_values_that_the_device_does_not_support(run_cli: Callable[..., CommandResult]) -> None:
    result = run_cli("workload=matmul", "hardware=mi300x", "plan=true", "space.dtype=choice(bf16,fp16,mxfp8)")
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith("excluded")]
    assert "space.dtype=mxfp8" in line and "gfx942" in line


def test_the_first_point_of_a_trainer_is_the_best_layout_of_its_plan(run_cli: Callable[..., CommandResult]) -> None:
    """Faster layouts that fit only if the estimate of memory is too high come after all others."""
    words = ["gpus=8", "hardware=h100"]
    swept = run_cli("workload=megatron", *words, "plan=true", "command.directory=.")
    assert swept.code == 0, swept.err
    first = re.search(r"(?m)^ +1 +([\d,]+) +\+0\.0 +(\d+) +(.*?) *$", swept.out)
    planned = answer(read_request(["model=llama3_8b", *words, "trainer=megatron", "global_batch=128"])).best
    tokens_per_s = round_to_band(8 * planned.estimate.tokens_per_s_per_gpu, 0.14)
    assert first and first.groups() == (
        tokens_per_s,
        f"{planned.estimate.memory.needed_gib:.0f}",
        describe(planned.layout),
    )
    assert re.search(r"the last \d+ need more than the 77 GiB that are usable", swept.out)
