"""A sweep over environment variables."""

import pytest

from tests.conftest import Workspace


@pytest.mark.soak
def test_a_searched_variable_takes_effect_in_torch(workspace: Workspace) -> None:
    """Tests set OMP_NUM_THREADS=1 in the shell; the space decides over the shell."""
    product = ["space.m=128", "space.n=128", "space.k=128", "space.dtype=fp32", "hardware=cpu"]
    result = workspace.run(*product, "search=grid", "space.env.OMP_NUM_THREADS=1,2", "finals.top=0")
    assert result.code == 0, result.err
    records = [trial.user_attrs["record"] for trial in workspace.trials()]
    threads = {
        record["params"]["env.OMP_NUM_THREADS"]: record["measurements"][0]["machine_info"]["threads"]
        for record in records
    }
    assert threads == {1: 1, 2: 2}
