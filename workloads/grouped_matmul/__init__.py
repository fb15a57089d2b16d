"""`workload=grouped_matmul`: the GEMMs of a mixture of experts, each expert's weights times the tokens routed to it.

One call multiplies rows sorted by expert: y[rows of e] = x[rows of e] · W[e]ᵀ for every expert e.
"""

from dataclasses import dataclass, field
from typing import Literal

from workloads.api import recipes
from workloads.api.contract import Workload
from workloads.grouped_matmul import rules
from workloads.models.model import MODELS, PassName
from workloads.models.routing import tokens_of_experts

ExpertModelName = Literal[
    "qwen3_30b_a3b",
    "qwen3_235b_a22b",
    "gpt_oss_20b",
    "gpt_oss_120b",
    "mixtral_8x7b",
    "mixtral_8x22b",
    "olmoe_1b_7b",
    "grok1_314b",
]


@dataclass(frozen=True)
class GroupedMatmulParameters:
    """Parameters of a grouped GEMM, given by a model or by four sizes.

    Attributes:
        model: a model with experts, which gives the sizes.
        hidden_size: the number of features per token, if no model is given.
        expert_size: the number of features inside an expert (of a gate or an up projection), if no model is given.
        experts: the number of routed experts in a block, if no model is given.
        experts_per_token: the number of experts per token, if no model is given.
        expert_parallel: the number of ranks that share the experts; the GEMM covers one rank's experts. Tokens come
            from all `expert_parallel` ranks, so the number of rows stays tokens · experts_per_token.
        layer: the gate and up projections as one GEMM, or the down projection.
        product: the layer's forward GEMM or one of its two gradient GEMMs.
        tokens: the number of tokens on one rank, before they are copied for their experts.
        imbalance: the busiest expert's rows divided by the mean; 1 is forced balance. Loads follow Zipf's law.
        dtype: number format of the operands, including scales.
        backend: `torch` is torch.nn.functional.grouped_mm, or scaled_grouped_mm in fp8; `quack` is the package
            quack-kernels, tuned for the GEMM before timing.
        statistic: median of the repeats, with the last-level cache flushed before each repeat (cold) or not (warm).
        warmup: the number of untimed calls.
        repeats: the number of timed readings, each of one call, or of several if calls are short and the cache is warm.
        sustained_s: if above 0, the GEMM also runs back to back for this many seconds once the clocks have settled.
        seed: seed of the random operands and of the order of busy and idle experts.
    """

    model: ExpertModelName | None = None
    hidden_size: int | None = field(default=None, metadata={"min": 1})
    expert_size: int | None = field(default=None, metadata={"min": 1})
    experts: int | None = field(default=None, metadata={"min": 1})
    experts_per_token: int | None = field(default=None, metadata={"min": 1})
    expert_parallel: int = field(default=1, metadata={"min": 1})
    layer: Literal["gate_up", "down"] = "gate_up"
    product: PassName = "forward"
    tokens: int = field(default=8192, metadata={"min": 1})
    imbalance: float = field(default=1.0, metadata={"min": 1})
    dtype: Literal["fp32", "fp16", "bf16", "fp8_rowwise"] = field(
        default="bf16", metadata={"unsupported_reason": recipes.unsupported_rate_reason}
    )
    backend: Literal["torch", "quack"] = field(
        default="torch", metadata={"unsupported_reason": rules.unsupported_backend_reason}
    )
    statistic: Literal["median_cold", "median_warm"] = "median_cold"
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    sustained_s: float = field(default=0.0, metadata={"min": 0, "max": 3600})
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "expert_size", "experts", "experts_per_token")
        given = [name for name in sizes if getattr(self, name) is not None]
        if self.model is None and len(given) < len(sizes):
            raise ValueError(f"{', '.join(sizes[:-1])} and {sizes[-1]} have to be given, or a model")
        if self.model is not None and given:
            raise ValueError(f"{given[0]} and model: the model defines the sizes; set {given[0]}=null")
        experts = self.sizes()[2]
        if experts % self.expert_parallel:
            raise ValueError(f"expert_parallel={self.expert_parallel} does not divide experts={experts}")
        if self.imbalance > self.local_experts:
            raise ValueError(
                f"imbalance={self.imbalance:g}: of {self.local_experts} experts the busiest has at most "
                f"{self.local_experts} times the mean"
            )
        rows = self.tokens * self.sizes()[3]
        if rows % self._row_unit:
            raise ValueError(
                f"tokens={self.tokens}: dtype={self.dtype} needs rows in multiples of {self._row_unit}, not {rows}"
            )

    def sizes(self) -> tuple[int, int, int, int]:
        """Return the hidden size, the expert size, the number of experts, and the number of experts per token."""
        if self.model is not None:
            model = MODELS[self.model]
            return model.hidden_size, model.expert_intermediate_size, model.experts, model.experts_per_token
        assert self.hidden_size and self.expert_size and self.experts and self.experts_per_token
        return self.hidden_size, self.expert_size, self.experts, self.experts_per_token

    @property
    def local_experts(self) -> int:
        return self.sizes()[2] // self.expert_parallel

    @property
    def features(self) -> tuple[int, int]:
        """Return (in_features, out_features) of one expert's layer."""
        hidden, width, _, _ = self.sizes()
        return (hidden, 2 * width) if self.layer == "gate_up" else (width, hidden)

    @property
    def _row_unit(self) -> int:
        return 16 if self.dtype == "fp8_rowwise" else 1

    def rows(self) -> list[int]:
        """Return each expert's row count on this rank; multiples of 16 in fp8, because matrix units load 16 bytes."""
        rows, unit = self.tokens * self.sizes()[3], self._row_unit
        loads = tokens_of_experts(rows // unit, self.local_experts, self.imbalance, self.seed)
        return [load * unit for load in loads]


class GroupedMatmul(Workload):
    """A grouped GEMM whose result is checked."""

    name = "grouped_matmul"
    Parameters = GroupedMatmulParameters
    measures = "flops_per_step sustained_step_times_s energy relative_error"
    benchmark_version = "grouped/1"
    work = ("model", "layer", "product", "imbalance", "dtype", "statistic")
    ways = ("backend", "warmup", "repeats", "sustained_s", "seed")
    max_world_size = None  # each rank measures its own device; all ranks measure at the same time
    finalists = 0  # each point is a result in itself
