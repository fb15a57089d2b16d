"""The number of tokens that each expert of a mixture receives. Does not import torch."""

import random
from dataclasses import dataclass

from workloads.models.model import Model


@dataclass(frozen=True)
class Routing:
    """How tokens are routed to experts, and how the experts' loads are balanced."""

    # The busiest expert's tokens divided by the mean, forced regardless of the scores: 1 is perfect balance; above 1,
    # the loads follow Zipf's law. None for natural routing to each token's highest-scoring experts.
    imbalance: float | None = None
    # The coefficient of the loss that is 1 for equal loads (Fedus et al. 2022, equation 4, for k experts per token).
    auxiliary_loss: float = 0.0
    z_loss: float = 0.0  # coefficient of the mean square of the logits' logsumexp (Zoph et al. 2022, equation 5).
    # After a step, this is added to the bias of each expert with fewer tokens than the mean and subtracted for each
    # with more. Biases change which experts are chosen, not their weights (Wang et al. 2024, arXiv 2408.15664).
    bias_rate: float = 0.0
    seed: int = 0  # for the order of busy and idle experts, and for the tokens that are sent to them


NATURAL = Routing()


def check_imbalance(imbalance: float, shape: Model) -> None:
    """Raise ValueError if the busiest expert cannot have `imbalance` times the mean load."""
    if imbalance * shape.experts_per_token > shape.experts:
        most = shape.experts / shape.experts_per_token
        raise ValueError(f"imbalance={imbalance:g}: no expert has a token twice, so it is at most {most:g}")


def executed_imbalance(requested: float | None, measured: float | None, shape: Model, tokens: int) -> float | None:
    """Return the requested imbalance, or the measured one if they differ by more than a rounding error of one token."""
    if requested is None or measured is None:
        return None
    mean = tokens * shape.experts_per_token / shape.experts
    return requested if abs(measured - requested) * mean <= 1 else measured


def tokens_of_experts(tokens: int, experts: int, imbalance: float, seed: int = 0) -> list[int]:
    """Return the number of tokens for each expert, in random order. The loads follow Zipf's law, rank^-s.

    The exponent s is chosen so that the busiest expert has `imbalance` times the mean load. An imbalance of 1 gives
    equal loads; the maximum is `experts`. Loads are whole numbers whose sum is `tokens`.
    """
    low, high = 0.0, 64.0
    for _ in range(60):  # the share of the first expert grows with s
        middle = (low + high) / 2
        low, high = (middle, high) if _shares(experts, middle)[0] * experts < imbalance else (low, middle)
    exact = [tokens * share for share in _shares(experts, low if imbalance > 1 else 0.0)]
    loads = [int(load) for load in exact]
    for i in sorted(range(experts), key=lambda i: loads[i] - exact[i])[: tokens - sum(loads)]:  # largest remainders
        loads[i] += 1
    random.Random(seed).shuffle(loads)
    return loads


def _shares(experts: int, exponent: float) -> list[float]:
    weights = [(rank + 1) ** -exponent for rank in range(experts)]
    total = sum(weights)
    return [weight / total for weight in weights]
