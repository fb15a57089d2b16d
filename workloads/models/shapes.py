"""The shapes of the models and the GEMMs of training them. Imports no torch, because the driver imports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from workloads.layouts.job import Model

ModelName = Literal["llama_tiny", "llama3_1b", "llama3_8b", "llama3_70b", "qwen2_5_7b", "qwen2_5_14b"]
LayerName = Literal["qkv", "output", "gate_up", "down", "lm_head"]
PassName = Literal["forward", "input_gradient", "weight_gradient"]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a decoder. `hidden_size` and `intermediate_size` are those of Hugging Face's config.

    Attributes:
        layers: number of transformer blocks.
        hidden_size: features of the residual stream.
        heads: attention heads of the queries.
        kv_heads: attention heads of the keys and values; fewer than `heads` for grouped-query attention.
        head_size: features of one attention head.
        intermediate_size: features inside the MLP.
        vocabulary: number of tokens.
        tied: the output layer shares the embedding's weights.
        qkv_bias: the projections to queries, keys and values have a bias.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        rope_factor: the factor by which Llama 3.1 scales low rotary frequencies; None without scaling.
    """

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
        """Return `rope_scaling` of Hugging Face's config, or None.

        A model trained further on longer sequences scales its low rotary frequencies (Llama 3.1).
        """
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
    def planner_model(self) -> Model:
        """Return the same sizes as the planner's models have them."""
        names = ("layers", "hidden_size", "heads", "kv_heads", "head_size", "intermediate_size", "vocabulary", "tied")
        return Model(**{name: getattr(self, name) for name in names}, qkv_bias=self.qkv_bias)

    @property
    def parameters(self) -> int:
        """Return the number of all parameters, 8,030,261,248 for Llama 3 8B."""
        linear = sum(math.prod(self.linear(layer)) for layer in ("qkv", "output", "gate_up", "down"))
        bias = self.linear("qkv")[1] if self.qkv_bias else 0
        embeddings = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return self.layers * (linear + bias + 2 * self.hidden_size) + self.hidden_size + embeddings

    @property
    def embedding_and_head_parameters(self) -> int:
        """Return the number of parameters outside the blocks: embedding, last norm and output layer."""
        return replace(self, layers=0).parameters

    @property
    def layer_parameters(self) -> int:
        """Return the number of parameters of one block."""
        return replace(self, layers=1).parameters - self.embedding_and_head_parameters

    def linear(self, layer: LayerName) -> tuple[int, int]:
        """Return (in_features, out_features) of a linear layer. Layers that read the same input are one matrix."""
        attention = self.heads * self.head_size
        return {
            "qkv": (self.hidden_size, attention + 2 * self.kv_heads * self.head_size),
            "output": (attention, self.hidden_size),
            "gate_up": (self.hidden_size, 2 * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "lm_head": (self.hidden_size, self.vocabulary),
        }[layer]


# Dubey et al. 2024, table 3 (Llama 3); Meta's model card (Llama 3.2 1B); Qwen team 2024, table 1 (Qwen2.5);
# vocabularies as in their checkpoints. llama_tiny is for tests on a CPU.
MODELS: dict[str, LlamaShape] = {
    "llama_tiny": LlamaShape(2, 128, 4, 2, 32, 384, 512),
    "llama3_1b": LlamaShape(16, 2048, 32, 8, 64, 8192, 128256, tied=True, rope_factor=32.0),
    "llama3_8b": LlamaShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama3_70b": LlamaShape(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen2_5_7b": LlamaShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True, rope_theta=1e6, norm_eps=1e-6),
    "qwen2_5_14b": LlamaShape(48, 5120, 40, 8, 128, 13824, 152064, qkv_bias=True, rope_theta=1e6, norm_eps=1e-5),
}


@dataclass(frozen=True)
class GemmShape:
    """C[m, n] = A[m, k] · B[k, n].

    Attributes:
        layout: BLAS letters for A and B: n if the matrix lies in memory as written here, t if transposed.
    """

    m: int
    n: int
    k: int
    layout: str


def gemm_shape(model: str, layer: LayerName, which: PassName, tokens: int) -> GemmShape:
    """Return one of the three GEMMs that training does for a linear layer y[tokens, out] = x[tokens, in] · W[out, in]ᵀ.

    Raises:
        KeyError: for a model that is not in `MODELS`, or an unknown layer or pass.
    """
    in_features, out_features = MODELS[model].linear(layer)
    return {
        "forward": GemmShape(tokens, out_features, in_features, "nt"),  # y = x · Wᵀ
        "input_gradient": GemmShape(tokens, in_features, out_features, "nn"),  # dx = dy · W
        "weight_gradient": GemmShape(out_features, in_features, tokens, "tn"),  # dW = dyᵀ · x
    }[which]
