"""`workload=matmul`: the rate of one matrix product, C[m, n] = A[m, k] · B[k, n].

The search over m, n and k finds the highest rate that this device's library reaches; a model's own products
(`space=llama3_8b`) say how near to it training can come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api import recipes
from workloads.api.contract import Measurement, Rank, Workload
from workloads.llama import shapes


def unsupported_backend_reason(route: str, architecture: str) -> str:
    """Why a device has not this route; empty where it has."""
    return "for GPUs" if architecture.startswith("cpu") and route != "torch" else ""


@dataclass(frozen=True)
class MatmulParameters:
    """Either m, n and k (rows and columns of the result, and what is summed over; elements, not bytes), or a model's
    linear layer with one of its three products over so many tokens.

    dtype: the number format of A and B, with its scales
    layout: whether A and B lie in memory as mxk and kxn (n) or transposed (t); auto: as training has them (nt, for a
        model's gradients nn and tn), and nt for formats of 8 bits or fewer, whose units take nothing else
    output_dtype: of C; auto: that of A and B, and bf16 for formats of 8 bits or fewer
    accumulation: fp32, or reduced: partial sums may be rounded (PyTorch's default for bf16 and fp16; the fast
        accumulators of fp8), which Triton's and tinygrad's kernels never do
    route: torch.mm as it comes, with the vendor's library chosen (on ROCm rocBLAS for cublas, hipBLASLt for cublaslt),
        or a Triton kernel (Inductor's, tuned for the shape), or tinygrad's kernel (likewise; timed with its launch)
    statistic: of the repeats, each with the last-level cache flushed before it (cold) or not (warm)
    warmup, repeats: calls that do not count, and those that do
    warmup_s: seconds of load before a worker's first trial
    sustained_s: if above 0, the product also runs back to back for that long, after the clocks have settled
    """

    m: int | None = field(default=None, metadata={"min": 1})
    n: int | None = field(default=None, metadata={"min": 1})
    k: int | None = field(default=None, metadata={"min": 1})
    model: shapes.ModelName | None = None
    layer: shapes.LayerName = "qkv"
    product: shapes.PassName = "forward"
    tokens: int = field(default=8192, metadata={"min": 1})
    dtype: Literal[
        "fp32",
        "tf32",
        "fp16",
        "bf16",
        "fp8_tensorwise",
        "fp8_rowwise",
        "fp8_blockwise",
        "mxfp8",
        "mxfp4",
        "nvfp4",
    ] = field(default="bf16", metadata={"unsupported_reason": recipes.unsupported_rate_reason})
    layout: Literal["auto", "nn", "nt", "tn", "tt"] = "auto"
    output_dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    accumulation: Literal["reduced", "fp32"] = "reduced"
    route: Literal["torch", "cublas", "cublaslt", "triton", "tinygrad"] = field(
        default="torch", metadata={"unsupported_reason": unsupported_backend_reason}
    )
    statistic: Literal["median_cold", "median_warm", "mean_cold", "fastest_warm"] = "median_cold"
    warmup: int = field(default=3, metadata={"min": 0})
    warmup_s: float = field(default=0.0, metadata={"min": 0, "max": 600})
    repeats: int = field(default=20, metadata={"min": 1})
    sustained_s: float = field(default=0.0, metadata={"min": 0, "max": 3600})
    seed: int = 0

    def __post_init__(self) -> None:
        given = [name for name in ("m", "n", "k") if getattr(self, name) is not None]
        if self.model is None and len(given) < 3:
            raise ValueError("m, n and k have to be given, or a model")
        if self.model is not None and given:
            raise ValueError(f"{given[0]} and model: a model has shapes of its own, say {given[0]}=null")

    def shape(self) -> shapes.GemmShape:
        """The product that is meant, with its layout."""
        if self.model is not None:
            meant = shapes.gemm_shape(self.model, self.layer, self.product, self.tokens)
        else:
            assert self.m and self.n and self.k
            meant = shapes.GemmShape(self.m, self.n, self.k, "nt")
        layout: str = self.layout
        if layout == "auto":
            layout = "nt" if recipes.RECIPES[self.dtype].matrix_dtype in ("fp8", "fp4") else meant.layout
        return shapes.GemmShape(meant.m, meant.n, meant.k, layout)


class Matmul(Workload):
    """One matrix product with its result checked."""

    name = "matmul"
    Parameters = MatmulParameters
    benchmark_version = (
        "burst/3"  # each repeat timed by itself on the same random inputs, output rewritten, GPU as found
    )
    is_matmul_ceiling = True
    max_world_size = None  # each rank measures its own device, all at once

    def run(self, parameters: MatmulParameters, rank: Rank) -> Measurement:
        from workloads.matmul.gemm import measure

        return measure(parameters, rank)
