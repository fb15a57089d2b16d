"""The laws of dominance, and the front and the layers that follow from it."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sweeper.metrics.criteria import dominates, find_layers

Point = tuple[float, ...]
# Few different values: equal losses and equal points are frequent.
losses = st.integers(0, 4).map(float)
points = st.integers(1, 3).flatmap(lambda size: st.lists(st.tuples(*[losses] * size), max_size=30))
triples = st.tuples(*[st.tuples(losses, losses, losses)] * 3)


@given(triples)
def test_dominance_is_a_strict_partial_order(triple: tuple[Point, Point, Point]) -> None:
    a, b, c = triple
    assert not dominates(a, a)
    assert not (dominates(a, b) and dominates(b, a))
    if dominates(a, b) and dominates(b, c):
        assert dominates(a, c)


@given(points)
def test_no_point_dominates_the_front_and_the_front_dominates_all_others(points: Sequence[Point]) -> None:
    front = [position for position, layer in enumerate(find_layers(points)) if layer == 0]
    for position, point in enumerate(points):
        dominators = [other for other in points if dominates(other, point)]
        if position in front:
            assert not dominators
        else:
            assert any(dominates(points[other], point) for other in front)


@given(points)
def test_layers_are_the_fronts_of_what_remains(points: Sequence[Point]) -> None:
    layers, remaining, expected = find_layers(points), list(range(len(points))), [0] * len(points)
    for layer in range(len(points)):
        front = [n for n in remaining if not any(dominates(points[other], points[n]) for other in remaining)]
        for position in front:
            expected[position] = layer
        remaining = [position for position in remaining if position not in front]
    assert layers == expected


@given(points.filter(bool), st.data())
def test_a_dominated_point_changes_no_other_points_place_on_the_front(
    points: Sequence[Point], data: st.DataObject
) -> None:
    worse = tuple(loss + 1 for loss in data.draw(st.sampled_from(points)))
    is_first = [layer == 0 for layer in find_layers([*points, worse])]
    assert is_first == [*(layer == 0 for layer in find_layers(points)), False]


@given(points)
def test_the_order_of_the_points_does_not_matter(points: Sequence[Point]) -> None:
    assert find_layers(points[::-1]) == find_layers(points)[::-1]
