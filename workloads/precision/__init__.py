"""Low-precision arithmetic: three workloads that measure the speed and error of torchao's formats and training recipes.

    precision            GEMMs: rate, speed-up over bf16, and error
    precision_casts      casts from bf16 to each format, with scales along rows, columns or both
    precision_linear     linear layers forward and backward, casts included, against a roofline from measured rates

`workload=parallel` trains models in these recipes. A format that the device's matrix units do not support is emulated:
its error is measured, but not its speed.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from workloads.api.contract import Machine, Workload
from workloads.api.recipes import Support, support, unsupported_rate_reason
from workloads.models.model import LayerName, ModelName, PassName

Recipe = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
Format = Literal["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
TrainingRecipe = Literal["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8"]

NOT_EMULATED = ("fp8_blockwise", "nvfp4")  # torchao has no emulation of these layers
# torchao 0.18's layer casts along columns with a CUDA kernel, and orders scales for NVIDIA's units.
NVIDIA_LAYER = "mxfp8"

# Texts below the formats in a plan.
OF_PRODUCTS = "the error of an emulated one is measured, its speed is not"
OF_LAYERS = f"{OF_PRODUCTS}; an unsupported one is refused"
OF_CASTS = "a cast is timed on any device: this is about the products that take its result"


@dataclass(frozen=True)
class GemmParameters:
    """One GEMM of a model's linear layer, timed alternately with the same GEMM in bf16.

    Both operands are contiguous along k (layout nt), the only layout that matrix units support for formats of 8 bits or
    fewer. The bf16 GEMM has the same layout.

    Attributes:
        recipe: the format and its scales, see `workloads.api.recipes`.
        model: the model whose layers give the shapes.
        layer: the linear layer.
        product: the pass that the GEMM belongs to.
        tokens: rows of the layer's input.
        warmup: calls that are not timed.
        repeats: timed calls.
        seed: seed of the random operands.
    """

    recipe: Recipe
    model: ModelName = "llama3_8b"
    layer: LayerName = "qkv"
    product: PassName = "forward"
    tokens: int = field(default=8192, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 0})
    repeats: int = field(default=20, metadata={"min": 1})
    seed: int = 0


@dataclass(frozen=True)
class CastParameters:
    """A cast of a bf16 matrix [rows, columns] to a given format.

    Attributes:
        format: the format that the matrix is cast to.
        direction: whether scales span rows, columns, or both, with one cast each.
        implementation: torchao's eager function, the same function compiled, or torchao's own kernel.
        rows, columns: size of the matrix.
        warmup: calls that are not timed.
        repeats: timed calls.
        seed: seed of the random matrix.
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
    """Compiled linear layers of a model, forward and backward, timed alternately with the same layers in bf16.

    Attributes:
        recipe: torchao's training recipe. In fp8_rowwise_gw_hp, weight gradients are in bf16.
        part: attention's projection to queries, keys and values, or the MLP.
        model: the model whose layers are measured.
        tokens: rows of the layers' input.
        warmup: steps that are not timed.
        repeats: timed steps.
        seed: seed of the random weights and inputs.
    """

    recipe: TrainingRecipe
    part: Literal["qkv", "mlp"] = "qkv"
    model: ModelName = "llama3_8b"
    tokens: int = field(default=8192, metadata={"min": 1})
    warmup: int = field(default=3, metadata={"min": 1})
    repeats: int = field(default=20, metadata={"min": 1})
    seed: int = 0


def gemm_format(recipe: str) -> str:
    """Return the number format of a training recipe's low-precision GEMMs."""
    return recipe.removesuffix("_gw_hp")  # weight gradients in bf16


def unsupported_layer_reason(recipe: str, architecture: str) -> str:
    """Return why torchao has no layer for a recipe that the device's units support; empty if it has one."""
    if recipe == NVIDIA_LAYER and architecture.startswith("gfx") and support(recipe, architecture)[0] is Support.NATIVE:
        return f"torchao's {recipe} layer is for NVIDIA GPUs: its casts are CUDA kernels"
    return ""


def unsupported_layer_rate_reason(recipe: str, architecture: str) -> str:
    """Return why a layer's rate cannot be measured; empty if the device's units and torchao support the recipe."""
    if reason := unsupported_rate_reason(recipe, architecture):
        return reason
    reason = unsupported_layer_reason(recipe, architecture)
    return f"unsupported on this device: {reason}" if reason else ""


class PrecisionWorkload(Workload):
    """The base class of the three workloads. A plan shows the support for each of the `recipes`, then `note`."""

    recipes: ClassVar[Any]
    note: ClassVar[str]
    finalists = 0  # each point is a result

    def preview(self, parameters: Any, machine: Machine) -> str:
        """Return a line per recipe: whether it is native, emulated or unsupported on this device, and why."""
        recipes, architecture = get_args(self.recipes), machine.architecture
        if not architecture:
            return "the architecture of the device is unknown, and so is what it multiplies natively"
        width = max(map(len, recipes))
        lines = [f"on {architecture.split()[0]}, the matrix units take:"]
        for recipe in recipes:
            level, reason = support(gemm_format(recipe), architecture)
            if self.note == OF_LAYERS and recipe in NOT_EMULATED and level is Support.EMULATED:
                level, reason = Support.UNSUPPORTED, f"{reason}, and torchao has no emulation of its layer"
            if self.note == OF_LAYERS and (unsupported := unsupported_layer_reason(recipe, architecture)):
                level, reason = Support.UNSUPPORTED, unsupported
            lines.append(f"  {recipe:{width}}  {level.value}{': ' if reason else ''}{reason}")
        return "\n".join([*lines, self.note])


class Gemm(PrecisionWorkload):
    """Time a GEMM in a low-precision recipe against bf16 and measure its error (`workload=precision`)."""

    name = "precision"
    Parameters = GemmParameters
    work = ("recipe", "model")
    ways = ("warmup", "repeats", "seed")
    measures = "flops_per_step baseline_step_times_s energy sqnr_db"
    # The recipe and bf16 are interleaved, with a cold cache and operands that were converted beforehand. The cost of
    # events is subtracted, and the flush reads and writes (new in 2, here and below).
    benchmark_version = "gemm/2"
    recipes, note, module = Recipe, OF_PRODUCTS, "gemm"


class Casts(PrecisionWorkload):
    """Time the casts from bf16 to a low-precision format (`workload=precision_casts`)."""

    name = "precision_casts"
    Parameters = CastParameters
    work = ("format", "direction")
    ways = ("implementation", "warmup", "repeats", "seed")
    measures = "bytes_per_step"
    benchmark_version = "cast/2"
    recipes, note, module = Format, OF_CASTS, "casts"


class Linear(PrecisionWorkload):
    """Time linear layers in a training recipe against bf16 and measure their errors (`workload=precision_linear`)."""

    name = "precision_linear"
    Parameters = LinearParameters
    work = ("recipe", "model", "part")
    ways = ("warmup", "repeats", "seed")
    measures = "flops_per_step baseline_step_times_s energy sqnr_db sqnr_input_gradient_db sqnr_weight_gradient_db"
    benchmark_version = "linear/2"
    recipes, note, module = TrainingRecipe, OF_LAYERS, "layers"
