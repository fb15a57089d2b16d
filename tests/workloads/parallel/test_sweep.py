"""A sweep over layouts from the command line."""

import json

import pytest

from tests.conftest import Workspace


@pytest.mark.soak  # `make test` runs such trials in test_run.py, and a sweep with estimates in test_command.py
def test_a_sweep_over_layouts_reports_how_well_they_were_predicted(workspace: Workspace) -> None:
    """The same two workers run all trials, each in a new process group."""
    fixed = ["space.micro_batch=4", "space.checkpointing=none", "space.cp=1", "space.pp=1"]
    fixed += ["space.dp_replicate=1", "space.steps=3"]
    result = workspace.run(
        "workload=parallel", "gpus=2", "finals.top=0", "search=grid", "space.reshard_after_forward=true", *fixed
    )
    assert result.code == 0, result.err
    runs = workspace.runs("trial")
    assert sorted((run.data.params["dp_shard"], run.data.params["tp"]) for run in runs) == [("1", "2"), ("2", "1")]
    for run in runs:
        metrics = run.data.metrics
        assert metrics["predicted_tokens_per_s"] > 0 and metrics["tokens_per_s_per_gpu"] > 0
        assert metrics["loss"] == pytest.approx(runs[0].data.metrics["loss"], abs=1e-4)
        assert sum(value for name, value in metrics.items() if name.startswith("calls_")) > 0
        assert run.data.tags["attention"] == "scaled_dot_product_attention"
    assert "model    estimates are" in result.out
    (parent,) = workspace.runs("sweep")
    assert parent.data.metrics["predicted_error"] > 0
    projected = json.loads(parent.data.tags["projected_tokens_per_s"])
    assert list(projected) == ["2", "4", "8", "16"] and projected["4"] > 1.5 * projected["2"] > 0
    assert projected["2"] == pytest.approx(max(run.data.metrics["tokens_per_s"] for run in runs))
    assert "the batch grows with the replicas" in parent.data.tags["projection_assumes"]
