"""The best points of another sweep as the first points of this one. Its figures are never read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sweeper.config.space import Parameters, Space, Value
from workloads.api.errors import UserInputError

POINTS = 5  # of many, the first ones gain most: they differ in what matters, and the sampler goes on from the best


@dataclass(frozen=True)
class WarmStart:
    """The points of another sweep."""

    sweep: str  # as the configuration names it
    study: str  # the id of its study
    points: tuple[Mapping[str, Value], ...]  # every parameter of its better trials, the best first

    def legal_points(self, space: Space) -> list[Parameters]:
        """Return the best points that this space has, each with the parameters that vary here.

        What the other sweep does not have is left to the sampler. Where only some combinations are allowed, as with the
        layouts of another number of GPUs, the allowed point that agrees in the most parameters stands for one that is
        not.

        Raises UserInputError if the space has none of them.
        """
        legal: list[Parameters] = []
        for point in self.points:
            varying = {name: point[name] for name in space.dimensions if name in point}
            nearest = _nearest(varying, space)
            if nearest and nearest not in legal:
                legal.append(nearest)
        if not legal:
            raise UserInputError(
                f"search.warm_start={self.sweep}: none of its {len(self.points)} better points is in this space"
            )
        return legal[:POINTS]


def _nearest(point: Parameters, space: Space) -> Parameters | None:
    """Return the point if it is legal, else the allowed one that agrees in the most of its parameters.

    Of those that agree in as many, the most promising one. One that agrees in less than half is another point.
    """
    if space.only is None:
        return point if point in space else None
    if not space.only or not point:
        return None
    agreements = [len(point.items() & allowed.items()) for allowed in space.only]
    most = max(agreements)
    if most == len(point):
        return point
    return dict(space.only[agreements.index(most)]) if 2 * most >= len(point) else None
