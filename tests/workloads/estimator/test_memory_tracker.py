"""PyTorch's own memory tracker never counts more than the planner's bound, for layouts of this project's trainer."""

import pytest

from benchmarks.planner_memory import compare_all


@pytest.mark.soak
def test_no_layout_exceeds_the_bound() -> None:
    found = list(compare_all())
    assert len(found) >= 100
    assert not [each for each in found if each.slack_percent < 0]
