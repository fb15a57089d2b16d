"""The shapes of the models, and the matrix products that training one of them consists of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ModelName = Literal["llama3_8b", "llama3_70b", "qwen2_5_7b"]
LayerName = Literal["qkv", "output", "gate_up", "down", "head"]
PassName = Literal["forward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class LlamaShape:
    """width: of the residual stream; head_size: of one attention head; feed_forward: width inside the MLP."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int

    def linear(self, layer: LayerName) -> tuple[int, int]:
        """Inputs and outputs of a linear layer; those that read the same input are one."""
        attention = self.heads * self.head_size
        return {
            "qkv": (self.width, attention + 2 * self.kv_heads * self.head_size),
            "output": (attention, self.width),
            "gate_up": (self.width, 2 * self.feed_forward),
            "down": (self.feed_forward, self.width),
            "head": (self.width, self.vocabulary),
        }[layer]


# Dubey et al. 2024, table 3 (Llama 3); Qwen team 2024, table 1 (Qwen2.5); vocabularies as in their checkpoints.
MODELS: dict[str, LlamaShape] = {
    "llama3_8b": LlamaShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3_70b": LlamaShape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen2_5_7b": LlamaShape(28, 3584, 28, 4, 128, 18944, 152064),
}


@dataclass(frozen=True)
class Product:
    """C[m, n] = A[m, k] · B[k, n]. layout: whether A and B lie in memory as written here (n) or transposed (t)."""

    m: int
    n: int
    k: int
    layout: str


def product(model: str, layer: LayerName, which: PassName, tokens: int) -> Product:
    """One of the three products of a linear layer y[tokens, out] = x[tokens, in] · W[out, in]ᵀ, as training has it."""
    inputs, outputs = MODELS[model].linear(layer)
    return {
        "forward": Product(tokens, outputs, inputs, "nt"),  # y = x · Wᵀ
        "input_gradient": Product(tokens, inputs, outputs, "nn"),  # dx = dy · W
        "weight_gradient": Product(outputs, inputs, tokens, "tn"),  # dW = dyᵀ · x
    }[which]
