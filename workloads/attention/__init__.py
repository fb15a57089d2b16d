"""`workload=attention`: the rate of one attention kernel for softmax(Q·Kᵀ)·V, forward or backward."""

from dataclasses import dataclass, field
from typing import Literal

from workloads.api import recipes
from workloads.api.contract import Workload
from workloads.attention import rules

Mode = Literal["forward", "backward"]


@dataclass(frozen=True)
class AttentionParameters:
    """Parameters of one attention over sequences of equal length.

    Attributes:
        sequence_length: the number of queries, and of keys, in a sequence.
        batch: the number of sequences.
        heads: the number of query heads.
        kv_heads: heads of keys and values, each shared by the same number of query heads (grouped-query attention).
        head_size: the number of features of a head.
        causal: a query attends only to its own key and earlier ones.
        mode: the timed pass: forward as in training, which keeps what the backward pass needs, or backward.
        dtype: data type of queries, keys and values.
        kernel: `flash` (FlashAttention 2), `cudnn`, `efficient` (CUTLASS) and `math` (not fused: it stores all scores)
            are the back ends of PyTorch's scaled_dot_product_attention; `flash4` is FlashAttention 4, which replaces
            PyTorch's flash kernel. On AMD GPUs, `aotriton`, `ck` and `aotriton_efficient` are PyTorch's back ends, and
            `aiter` and `flash_attn` are packages. On a CPU, there are `flash` and `math`.
        statistic: median of the repeats, each with the last-level cache flushed before it (cold) or not (warm).
        warmup: calls that are not timed.
        repeats: timed readings, each of one call, or of several calls if they are short and the cache is warm.
        sustained_s: if above 0, the pass also runs back to back for this many seconds once the clocks have settled.
        seed: seed of the random inputs.
    """

    sequence_length: int = field(default=8192, metadata={"min": 1})
    batch: int = field(default=1, metadata={"min": 1})
    heads: int = field(default=32, metadata={"min": 1})
    kv_heads: int = field(default=8, metadata={"min": 1})
    head_size: int = field(default=128, metadata={"min": 1})
    causal: bool = True
    mode: Mode = "forward"
    dtype: Literal["fp32", "fp16", "bf16"] = field(
        default="bf16", metadata={"unsupported_reason": recipes.unsupported_rate_reason}
    )
    kernel: rules.KernelName = field(default="flash", metadata={"unsupported_reason": rules.unsupported_kernel_reason})
    statistic: Literal["median_cold", "median_warm"] = "median_cold"
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    sustained_s: float = field(default=0.0, metadata={"min": 0, "max": 3600})
    seed: int = 0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}")

    @property
    def flops(self) -> float:
        """Return the floating-point operations of the pass, as FlashAttention's papers count them.

        The forward pass has two products over the pairs of queries and keys, the backward pass five: one of them is
        that of the scores, which a kernel that does not store them computes again.
        """
        length = self.sequence_length
        pairs = length * (length + 1) / 2 if self.causal else length * length
        products = 2 if self.mode == "forward" else 5
        return 2.0 * products * self.batch * self.heads * pairs * self.head_size


class Attention(Workload):
    """One pass of attention by one kernel, with its result checked."""

    name = "attention"
    Parameters = AttentionParameters
    benchmark_version = "attention/1"
    work = ("mode", "causal", "dtype", "statistic")
    ways = ("kernel", "warmup", "repeats", "sustained_s", "seed")
    max_world_size = None  # each rank measures its own device, all at the same time
    finalists = 0  # each point is a result
