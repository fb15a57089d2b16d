"""Clusters of nodes with their own addresses, on this machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.virtual_cluster import Cluster, NodeWorkspace
from tests.support.virtual_network import missing_reason


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip a test on a machine without such nodes."""
    if reason := missing_reason():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def two_workers(namespaces: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A head, and the nodes `first` and `second` with two devices each."""
    with Cluster(tmp_path_factory.mktemp("cluster"), ["first", "second"], others=["store"]) as cluster:
        yield cluster


@pytest.fixture
def head(two_workers: Cluster, request: pytest.FixtureRequest, empty_store: Path) -> NodeWorkspace:
    """A folder that all nodes share, with commands that run on the head."""
    path = two_workers.folder / request.node.name.replace("[", "-").rstrip("]")
    path.mkdir()
    shutil.copy(empty_store, path)
    return NodeWorkspace(path, two_workers)
