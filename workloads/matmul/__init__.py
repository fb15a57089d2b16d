"""`workload=matmul`: the rate of one matrix product, C[m, n] = A[m, k] · B[k, n].

The search over m, n and k finds the highest rate that this device's library reaches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.contract import Measurement, Rank


@dataclass(frozen=True)
class MatmulParameters:
    """m, n: rows and columns of the result; k: the dimension that is summed over. Elements, not bytes.

    cache: whether the last-level cache is flushed before each repeat; training finds it cold.
    sustained_s: if above 0, the product also runs back to back for that long, after the clocks have settled.
    """

    m: int = field(metadata={"min": 1})
    n: int = field(metadata={"min": 1})
    k: int = field(metadata={"min": 1})
    dtype: Literal["fp32", "fp16", "bf16"] = "bf16"
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    cache: Literal["cold", "warm"] = "cold"
    sustained_s: float = field(default=0.0, metadata={"min": 0, "max": 3600})
    seed: int = 0


class Matmul:
    """One plain `torch.mm` with its result checked."""

    Parameters = MatmulParameters
    method = "burst/1"  # each repeat timed by itself on the same random inputs, output rewritten, GPU as found
    max_world_size = 1

    def run(self, parameters: MatmulParameters, rank: Rank) -> Measurement:
        from workloads.matmul.product import measure

        return measure(parameters, rank)
