"""`workload=matmul`: the rate of one matrix product (GEMM), C[m, n] = A[m, k] · B[k, n].

The search over m, n and k finds the highest rate that this device's library achieves. The GEMMs of a model
(`space=llama3_8b`) show how close training can come to this rate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from workloads.api import recipes
from workloads.api.contract import Scalar, Workload
from workloads.matmul import rules
from workloads.models.model import GemmShape, LayerName, ModelName, PassName, gemm_shape


@dataclass(frozen=True)
class MatmulParameters:
    """Parameters of one matrix product, given by m, n and k or by a model's linear layer.

    Attributes:
        m: rows of A and C.
        n: columns of B and C.
        k: columns of A and rows of B, the dimension that is summed over.
        model: a model whose linear layers give the shape, instead of m, n and k.
        layer: the model's linear layer.
        product: the layer's forward product or one of its two gradients.
        tokens: number of tokens that the layer is applied to.
        dtype: number format of A and B, including scales.
        layout: whether A and B are stored as mxk and kxn (n) or transposed (t). `auto` is the training layout (nt; nn
            and tn for a model's gradients), or nt for formats of 8 bits or fewer, which support no other layout.
        output_dtype: data type of C. `auto` is the type of A and B, or bf16 for formats of 8 bits or fewer.
        accumulation: fp32 or reduced. `reduced` may round partial sums (PyTorch's default for bf16 and fp16 on NVIDIA
            GPUs; the fast accumulators of fp8). `auto` is reduced if the device and the backend support it, else fp32.
        backend: `torch` is torch.mm with its default library; `cublas` and `cublaslt` select the vendor's library (on
            ROCm hipBLAS and hipBLASLt); `ck` is AMD's Composable Kernel; `tunable` is PyTorch's search over the kernels
            of hipBLASLt and rocBLAS, done before the first call; `triton` is Inductor's kernel tuned for the shape. On
            ROCm, `torch` uses hipBLAS for an fp32 result of 16-bit operands.
        statistic: statistic of the repeats. The last-level cache is flushed before each repeat (cold) or not (warm).
        warmup: calls that are not timed.
        warmup_s: seconds of load before a worker's first trial.
        repeats: timed readings, each of one call, or of several calls if they are short and the cache is warm.
        sustained_s: if above 0, the product also runs back to back for this many seconds once the clocks have settled.
        seed: seed of the random operands.
    """

    m: int | None = field(default=None, metadata={"min": 1})
    n: int | None = field(default=None, metadata={"min": 1})
    k: int | None = field(default=None, metadata={"min": 1})
    model: ModelName | None = None
    layer: LayerName = "qkv"
    product: PassName = "forward"
    tokens: int = field(default=8192, metadata={"min": 1})
    dtype: Literal[
        "fp32", "tf32", "fp16", "bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"
    ] = field(default="bf16", metadata={"unsupported_reason": recipes.unsupported_rate_reason})
    layout: Literal["auto", "nn", "nt", "tn", "tt"] = "auto"
    output_dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    accumulation: Literal["auto", "reduced", "fp32"] = field(
        default="auto", metadata={"unsupported_reason": rules.unsupported_accumulation_reason}
    )
    backend: Literal["torch", "cublas", "cublaslt", "ck", "tunable", "triton"] = field(
        default="torch", metadata={"unsupported_reason": rules.unsupported_backend_reason}
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
            raise ValueError(f"{given[0]} and model: the model defines the shape; set {given[0]}=null")

    def shape(self) -> GemmShape:
        """Return the product's shape, with `auto` resolved to a layout."""
        if self.model is not None:
            shape = gemm_shape(self.model, self.layer, self.product, self.tokens)
        else:
            assert self.m and self.n and self.k
            shape = GemmShape(self.m, self.n, self.k, "nt")
        layout: str = self.layout
        if layout == "auto":
            layout = "nt" if recipes.RECIPES[self.dtype].is_scaled else shape.layout
        return replace(shape, layout=layout)


class Matmul(Workload):
    """A GEMM whose result is checked."""

    name = "matmul"
    Parameters = MatmulParameters
    # Each repeat is timed separately on the same random inputs and rewrites the output. GPU settings stay the same. On
    # a CPU, repeats disturbed by other processes are repeated (new in 4). On a GPU, the cost of events is subtracted,
    # many short warm calls are timed together, and the flush reads and writes (new in 5).
    measures = "flops_per_step sustained_step_times_s energy relative_error"
    benchmark_version = "burst/5"
    work = ("model", "dtype", "output_dtype", "accumulation", "statistic")
    ways = ("layout", "backend", "warmup", "warmup_s", "repeats", "sustained_s", "seed")
    is_matmul_ceiling = True
    max_world_size = None  # each rank measures its own device, all at the same time
    module = "gemm"

    def recorded_parameters(self, parameters: MatmulParameters) -> Mapping[str, Scalar]:
        """Return the parameters without the unused shape parameters: either m, n and k, or the model's layer."""
        unused = ("model", "layer", "product", "tokens") if parameters.model is None else ("m", "n", "k")
        values = super().recorded_parameters(parameters)
        return {name: value for name, value in values.items() if name not in unused}
