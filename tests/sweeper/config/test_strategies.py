"""Fixed layouts by name, on any number of GPUs."""

import pytest

from sweeper.config.device_values import Strategy, layout_on, read_strategies
from tests.support.planner_estimates import cluster
from workloads.api.errors import UserInputError
from workloads.layouts.layout import Job, Layout
from workloads.layouts.rules import find_violation
from workloads.models.hugging_face import load_model

ROWS = [(name, row) for name, rows in read_strategies().items() for row in rows]


@pytest.mark.parametrize("gpus", [4, 8, 12, 16, 64, 1024])
def test_a_strategy_uses_all_gpus_or_says_which_numbers_it_takes(gpus: int) -> None:
    used = 0
    for name, row in ROWS:
        degrees = row.space["tp"] * row.space["pp"]
        if gpus % degrees:
            with pytest.raises(UserInputError, match=rf"^gpus={gpus}: .*={name} .*Allowed: multiples of {degrees}$"):
                layout_on(gpus, name, row)
            continue
        values = layout_on(gpus, name, row)
        length = values.pop("sequence_length")
        job = Job(load_model(row.model), Layout(**values), length)
        assert job.layout.gpus == gpus and find_violation(job, cluster(gpus)) is None
        used += 1
    assert used > 0


def test_the_layouts_on_eight_gpus_are_those_that_were_compared_by_hand() -> None:
    row = Strategy("nvidia", "llama3_8b", {"tp": 4, "pp": 1, "micro_batch": 1, "global_batch": "multiple(gpus, 128)"})
    assert layout_on(8, "balanced", row) == {"tp": 4, "pp": 1, "micro_batch": 1, "global_batch": 128, "dp_shard": 2}
    assert all(layout_on(8, name, row)["global_batch"] == 128 for name, row in ROWS)
