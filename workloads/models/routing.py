"""How many tokens each expert of a mixture gets. No torch."""

from __future__ import annotations

import random


def tokens_of_experts(tokens: int, experts: int, imbalance: float, seed: int = 0) -> list[int]:
    """Return the tokens of each expert, in random order: the loads follow Zipf's law, rank^-s.

    The exponent s is the one for which the busiest expert has `imbalance` times the mean; 1 gives equal loads, and none
    gives more than `experts`. Loads are whole numbers whose sum is `tokens`.
    """
    low, high = 0.0, 64.0
    for _ in range(60):  # the share of the first grows with s
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
