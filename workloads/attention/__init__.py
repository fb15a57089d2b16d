"""`workload=attention`: the rate of one attention kernel for softmax(Q·Kᵀ)·V, in the forward or backward pass."""

from dataclasses import dataclass, field
from typing import Literal

from workloads.api import recipes
from workloads.api.contract import Workload
from workloads.attention import rules

Mode = Literal["forward", "backward"]


@dataclass(frozen=True)
class AttentionParameters:
    """Parameters of an attention pass over sequences of equal length.

    Attributes:
        sequence_length: the number of queries and of keys in a sequence.
        batch: the number of sequences.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; query heads share them equally (grouped-query attention).
        head_size: the number of features per head.
        causal: a query attends only to its own key and to earlier keys.
        mode: the timed pass: forward, which saves tensors for the backward pass as in training, or backward.
        dtype: data type of queries, keys and values.
        kernel: `flash` (FlashAttention 2), `cudnn`, `efficient` (CUTLASS) and `math` (unfused, stores all scores) are
            back ends of PyTorch's scaled_dot_product_attention; `flash4` is FlashAttention 4, which replaces PyTorch's
            flash kernel. On AMD GPUs, `aotriton`, `ck` and `aotriton_efficient` are PyTorch's back ends, and `aiter`
            and `flash_attn` are packages. A CPU supports `flash` and `math`.
        statistic: median of the repeats, with the last-level cache flushed before each repeat (cold) or not (warm).
        warmup: the number of untimed calls.
        repeats: the number of timed readings, each of one call, or of several if calls are short and the cache is warm.
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
        """Return the pass's floating-point operations, counted as in FlashAttention's papers.

        The forward pass has two GEMMs over query-key pairs, and the backward pass has five. One of the five
        recomputes the scores, because a fused kernel does not store them.
        """
        length = self.sequence_length
        pairs = length * (length + 1) / 2 if self.causal else length * length
        products = 2 if self.mode == "forward" else 5
        return 2.0 * products * self.batch * self.heads * pairs * self.head_size


class Attention(Workload):
    """One attention pass by one kernel, whose result is checked."""

    name = "attention"
    Parameters = AttentionParameters
    measures = "flops_per_step sustained_step_times_s energy relative_error"
    benchmark_version = "attention/1"
    work = ("mode", "causal", "dtype", "statistic")
    ways = ("kernel", "warmup", "repeats", "sustained_s", "seed")
    max_world_size = None  # each rank measures its own device; all ranks measure at the same time
    finalists = 0  # each point is a result in itself
