"""The processes of a local Ray."""

from __future__ import annotations

from ray._private.node import Node

from sweeper.execution.local_ray import UNUSED, without_unused_processes


def test_ray_has_the_services_that_a_sweep_leaves_out() -> None:
    """Fails where Ray renames one of these private methods, which then costs its time again."""
    before = [vars(Node)[name] for name in UNUSED]
    with without_unused_processes():
        assert all(vars(Node)[name] is not method for name, method in zip(UNUSED, before, strict=True))
    assert [vars(Node)[name] for name in UNUSED] == before
