"""A selector of many nodes is short, and matches the nodes of the target alone."""

from typing import Any

import ray

from sweeper.execution.gang_launcher import ACCELERATOR_TYPE, MAX_IDS, NODE_ID, select_nodes


def entry(number: int, kind: str | None = "H100", *, alive: bool = True) -> dict[str, Any]:
    """Return a node's entry in `ray.nodes`."""
    labels = {NODE_ID: f"{number:056x}"} | ({ACCELERATOR_TYPE: kind} if kind else {})
    return {"NodeID": f"{number:056x}", "Alive": alive, "Labels": labels}


def ids(*numbers: int) -> set[str]:
    return {f"{number:056x}" for number in numbers}


CLUSTER = [*map(entry, range(1000)), *(entry(number, "A100") for number in range(1000, 1100)), entry(2000, None)]


def test_a_thousand_nodes_are_selected_by_their_type() -> None:
    assert select_nodes(ids(*range(1000)), CLUSTER) == {ACCELERATOR_TYPE: "H100"}


def test_other_nodes_of_the_type_are_excluded_by_id() -> None:
    """Three are drained or of another model of the same type. By ids it is 56,829 characters."""
    drained = ids(3, 4, 5)
    selector = select_nodes(ids(*range(1000)) - drained, CLUSTER)
    assert selector == {ACCELERATOR_TYPE: "H100", NODE_ID: f"!in({','.join(sorted(drained))})"}
    assert sum(map(len, selector.values())) < 200


def test_ray_accepts_the_selectors() -> None:
    """Labels are alpha in Ray 2.60. test_node_labels.py (-m soak) places gangs by them."""
    from ray._private.label_utils import validate_label_selector

    for selected in (range(MAX_IDS), range(1000), range(3, 1000)):
        selector = select_nodes(ids(*selected), CLUSTER)
        assert validate_label_selector(selector) is None, (
            f"Ray {ray.__version__} refuses {selector}: see the syntax of label selectors in its documentation, adapt"
            " sweeper/execution/gang_launcher.py, and run tests/sweeper/execution/test_node_labels.py (-m soak)"
        )


def test_few_nodes_are_selected_by_id() -> None:
    """A node that joins later is not matched."""
    few = ids(*range(MAX_IDS))
    assert select_nodes(few, CLUSTER) == {NODE_ID: f"in({','.join(sorted(few))})"}
    most = ids(*range(499))  # to exclude 501 would be longer
    assert select_nodes(most, CLUSTER) == {NODE_ID: f"in({','.join(sorted(most))})"}


def test_nodes_that_are_lost_or_have_no_type() -> None:
    lost = [entry(number, alive=number < 900) for number in range(1000)]
    assert select_nodes(ids(*range(1000)), lost) == {ACCELERATOR_TYPE: "H100"}
    assert select_nodes(ids(*range(900)), lost) == {ACCELERATOR_TYPE: "H100"}
    unlabeled = [entry(number, None) for number in range(100)]
    assert list(select_nodes(ids(*range(100)), unlabeled)) == [NODE_ID]
    mixed = [entry(number, "H100" if number % 2 else "H200") for number in range(100)]
    assert list(select_nodes(ids(*range(100)), mixed)) == [NODE_ID]
    assert select_nodes(set(), CLUSTER) == {}
