"""The shapes of the models, and the matrix products that training one of them consists of. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

ModelName = Literal["llama_tiny", "llama3_1b", "llama3_8b", "llama3_70b", "qwen2_5_7b"]
LayerName = Literal["qkv", "output", "gate_up", "down", "lm_head"]
PassName = Literal["forward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class LlamaShape:
    """width: of the residual stream; head_size: of one attention head; feed_forward: width inside the MLP; tied: the
    output layer is the embedding; qkv_bias: queries, keys and values have one."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    vocabulary: int
    tied: bool = False
    qkv_bias: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    rope_factor: float | None = None

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """How a model for longer texts than it was first trained on stretches its slow rotations (Llama 3.1)."""
        if self.rope_factor is None:
            return None
        return {
            "rope_type": "llama3",
            "factor": self.rope_factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    @property
    def parameters(self) -> int:
        """How many there are, all of them: 8,030,261,248 of Llama 3 8B."""
        linear = sum(math.prod(self.linear(layer)) for layer in ("qkv", "output", "gate_up", "down"))
        bias = self.linear("qkv")[1] if self.qkv_bias else 0
        embeddings = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return self.layers * (linear + bias + 2 * self.hidden_size) + self.hidden_size + embeddings

    @property
    def ends_parameters(self) -> int:
        """Of embedding, last norm and head."""
        return replace(self, layers=0).parameters

    @property
    def layer_parameters(self) -> int:
        """Of one block."""
        return replace(self, layers=1).parameters - self.ends_parameters

    def linear(self, layer: LayerName) -> tuple[int, int]:
        """Inputs and outputs of a linear layer; those that read the same input are one."""
        attention = self.heads * self.head_size
        return {
            "qkv": (self.hidden_size, attention + 2 * self.kv_heads * self.head_size),
            "output": (attention, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "lm_head": (self.hidden_size, self.vocabulary),
        }[layer]


# Dubey et al. 2024, table 3 (Llama 3); Meta's model card (Llama 3.2 1B); Qwen team 2024, table 1 (Qwen2.5);
# vocabularies as in their checkpoints. The tiny one is for tests on a CPU.
MODELS: dict[str, LlamaShape] = {
    "llama_tiny": LlamaShape(2, 128, 4, 2, 32, 384, 512),
    "llama3_1b": LlamaShape(16, 2048, 32, 8, 64, 8192, 128256, tied=True, rope_factor=32.0),
    "llama3_8b": LlamaShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3_70b": LlamaShape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen2_5_7b": LlamaShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
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
