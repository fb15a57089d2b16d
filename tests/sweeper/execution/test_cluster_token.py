"""A cluster with a token: clients without the right token are refused, and a clear message says so."""

from collections.abc import Callable

import pytest

from tests.conftest import PROBE, CommandResult, Workspace
from tests.support.amd_head import TokenCluster
from tests.support.stranger import UNAUTHENTICATED, call

pytestmark = pytest.mark.xdist_group("amd_cluster")


def test_another_token_than_the_clusters_is_refused(workspace: Workspace, amd_cluster: TokenCluster) -> None:
    arguments = [*PROBE, f"cluster.address={amd_cluster.address}", "budget.trials=2"]
    other_token = workspace.path / "other"
    other_token.write_text("of-another-cluster" * 3)
    refused = workspace.run(*arguments, RAY_AUTH_TOKEN_PATH=str(other_token), timeout_s=60)
    assert refused.code == 2 and "requires a different token" in refused.err
    assert len(refused.err.splitlines()) == 1


def test_a_call_without_the_token_is_refused_by_the_head(amd_cluster: TokenCluster) -> None:
    host, port = amd_cluster.address.split(":")
    methods = ["NodeInfoGcsService/GetAllNodeInfo", "InternalKVGcsService/InternalKVKeys", "JobInfoGcsService/AddJob"]
    for method in methods:
        refused = call(host, int(port), f"ray.rpc.{method}")
        assert refused == {"status": UNAUTHENTICATED, "bytes": 0}, method
    allowed = call(host, int(port), f"ray.rpc.{methods[0]}", amd_cluster.token.read_text())
    assert allowed["status"] == 0 and allowed["bytes"] > 0


def test_a_local_cluster_without_a_token_is_refused(
    run_cli: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    refused = run_cli(*PROBE, "budget.trials=1")
    assert refused.code == 2 and "RAY_AUTH_MODE=disabled" in refused.err and "cluster.insecure=true" in refused.err


@pytest.mark.soak
def test_a_local_cluster_without_a_token_starts_with_cluster_insecure(workspace: Workspace) -> None:
    result = workspace.run(*PROBE, "budget.trials=1", "cluster.insecure=true", RAY_AUTH_MODE="disabled")
    assert result.code == 0, result.err
