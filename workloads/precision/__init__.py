"""What fewer bits really gain: four tables, each a workload. Formats, casts and training recipes are torchao's.

    precision            products: rate, speed-up over bf16, and the error beside it
    precision_casts      bf16 to each format, along rows, columns or both
    precision_linear     linear layers forward and backward, casts included, against a roofline from measured rates
    precision_training   a Llama block, or a whole model for some steps: tokens/s and the loss

A format that the device has no units for is imitated: its error is real, and it has no speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from workloads.api.contract import Measurement, Rank, Workload
from workloads.llama import shapes

Recipe = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
Format = Literal["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
TrainingRecipe = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8"]


@dataclass(frozen=True)
class GemmParameters:
    """A product of a model's linear layer over so many tokens, in a recipe; timed in turns with bf16.

    Both operands lie with what is summed over next to each other (layout nt), the only way that the units take formats
    of 8 bits or fewer; so does the bf16 product that it is compared with.
    """

    recipe: Recipe
    model: shapes.ModelName = "llama3_8b"
    layer: shapes.LayerName = "qkv"
    product: shapes.PassName = "forward"
    tokens: int = field(default=8192, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    seed: int = 0


@dataclass(frozen=True)
class CastParameters:
    """bf16 [rows, columns] to a format with scales along rows, columns or both.

    implementation: torchao's eager function, the same compiled, or torchao's own kernel
    """

    format: Format
    direction: Literal["rows", "columns", "both"] = "rows"
    implementation: Literal["eager", "compiled", "kernel"] = "compiled"
    rows: int = field(default=16384, metadata={"min": 1})
    columns: int = field(default=4096, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    seed: int = 0


@dataclass(frozen=True)
class LinearParameters:
    """The attention's input layer or the MLP of a model, forward and backward over so many tokens, compiled; timed in
    turns with the same in bf16."""

    recipe: TrainingRecipe
    part: Literal["qkv", "mlp"] = "qkv"
    model: shapes.ModelName = "llama3_8b"
    tokens: int = field(default=8192, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})
    seed: int = 0


@dataclass(frozen=True)
class TrainingParameters:
    """Steps of training: one block forward and backward, or the whole model with AdamW, on made-up text.

    layers: fewer than the model has, for a device that it does not fit
    """

    recipe: TrainingRecipe
    scope: Literal["block", "model"] = "block"
    model: shapes.ModelName = "llama3_8b"
    layers: int | None = field(default=None, metadata={"min": 1})
    sequence_length: int = field(default=8192, metadata={"min": 1})
    batch: int = field(default=1, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    steps: int = field(default=20, metadata={"min": 1})
    learning_rate: float = field(default=1e-4, metadata={"min": 0})
    seed: int = 0


class Gemm(Workload):
    """`workload=precision`."""

    name = "precision"
    Parameters = GemmParameters
    benchmark_version = "gemm/1"  # recipe and bf16 in turns, cold cache, operands already converted

    def run(self, parameters: GemmParameters, rank: Rank) -> Measurement:
        from workloads.precision.gemm import measure

        return measure(parameters, rank)


class Casts(Workload):
    """`workload=precision_casts`."""

    name = "precision_casts"
    Parameters = CastParameters
    benchmark_version = "cast/1"

    def run(self, parameters: CastParameters, rank: Rank) -> Measurement:
        from workloads.precision.casts import measure

        return measure(parameters, rank)


class Linear(Workload):
    """`workload=precision_linear`."""

    name = "precision_linear"
    Parameters = LinearParameters
    benchmark_version = "linear/1"

    def run(self, parameters: LinearParameters, rank: Rank) -> Measurement:
        from workloads.precision.linear import measure

        return measure(parameters, rank)


class Training(Workload):
    """`workload=precision_training`."""

    name = "precision_training"
    Parameters = TrainingParameters
    benchmark_version = "training/2"

    def run(self, parameters: TrainingParameters, rank: Rank) -> Measurement:
        from workloads.precision.training import measure

        return measure(parameters, rank)
