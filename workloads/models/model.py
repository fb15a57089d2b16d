"""Models: their sizes, parameters and GEMMs, and the table of models by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from workloads.tables import read_csv

# The models in the table that this project's workloads train. All workloads train dense models; `workload=parallel`
# also trains models with experts, and so does offloading if every block has only routed experts.
ModelName = Literal["llama_tiny", "llama3_1b", "llama3_8b", "llama3_70b", "qwen2_5_7b", "qwen2_5_14b", "qwen2_5_32b"]
EXPERT_MODELS = (
    *("experts_tiny", "olmoe_1b_7b", "qwen1_5_moe_a2_7b", "qwen3_30b_a3b", "mixtral_8x7b", "qwen3_moe_tiny"),
    *("gpt_oss_20b", "gpt_oss_120b"),
)
Activation = Literal["swiglu", "gelu", "gelu_gated", "squared_relu"]
Positions = Literal["rope", "learned", "alibi", "none"]
QkNorm = Literal["", "head", "all", "unweighted"]
RouterScores = Literal["softmax", "sigmoid"]
LayerName = Literal["qkv", "output", "gate_up", "down", "lm_head"]
PassName = Literal["forward", "input_gradient", "weight_gradient"]
Mixer = Literal["attention", "linear", "none"]
# Has experts, attends to all tokens, mixer, has an MLP, an indexer, tokens per compressed key
LayerKind = tuple[bool, bool, Mixer, bool, bool, int]


class Matrix(NamedTuple):
    """A linear layer of a block, and the dimension that tensor parallelism divides: inputs, outputs or tokens."""

    name: str
    inputs: int
    outputs: int
    divided: Literal["inputs", "outputs", "tokens"]
    number: int = 1  # of such layers, which read the same inputs or each a part of them

    @property
    def weights(self) -> int:
        return self.number * self.inputs * self.outputs


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder, dense or with a mixture of experts. Models with the same sizes compare equal."""

    layers: int  # number of blocks
    hidden_size: int  # features of the residual stream
    # heads, kv_heads, head_size: attention heads for queries, heads for keys and values (fewer with grouped-query
    # attention), and the features of one head.
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int  # features inside a dense MLP; 0 if every block has experts
    vocabulary: int  # number of tokens
    # The MLP's activation. Gated MLPs (`swiglu`, `gelu_gated`) have three matrices, other MLPs two.
    activation: Activation = "swiglu"
    tied: bool = False  # the head shares the embedding's weights
    # qkv_bias, mlp_bias: whether the query, key and value projections, or the MLP, have biases.
    qkv_bias: bool = False
    mlp_bias: bool = False
    positions: Positions = "rope"  # the position encoding; learned positions have weights
    max_positions: int = 0  # number of learned positions; 0 without them
    # window, full_layers: the tokens in a layer's attention window (0 without windows), and the layers that attend to
    # the whole sequence while the others have a window. A chunked window starts over after every `window` tokens.
    window: int = 0
    full_layers: tuple[int, ...] = ()
    chunked_window: bool = False
    # Multi-head latent attention (arXiv 2405.04434); 0 without it. kv_rank, query_rank: features of latent keys and
    # values, and of latent queries (0 if queries are projected directly). rope_size: features of a key that all heads
    # share. value_size: features of a head's value; 0 if equal to the key's.
    kv_rank: int = 0
    query_rank: int = 0
    rope_size: int = 0
    value_size: int = 0
    # Sparse attention (DeepSeek-V3.2): an indexer selects the `window` tokens with the highest scores. index_heads,
    # index_size: heads and features per head of the indexer's queries; 0 without an indexer. unindexed_layers: layers
    # that use the previous layer's tokens, or whose compressed keys are not selected.
    index_heads: int = 0
    index_size: int = 0
    unindexed_layers: tuple[int, ...] = ()
    # Compressed attention (DeepSeek-V4): a query attends to the tokens in its window and to compressed keys, which are
    # also the values of all heads. compression: the tokens per compressed key in each layer, 0 for a window alone.
    # selected_keys: how many compressed keys an indexer selects; layers without one attend to all of them.
    # output_groups, output_rank: groups of heads, and the features to which a group's output is projected first.
    compression: tuple[int, ...] = ()
    selected_keys: int = 0
    output_groups: int = 0
    output_rank: int = 0
    # Parallel residual streams, which a hyper-connection mixes around attention and around the MLP; 0 without them.
    streams: int = 0
    attention_gate: bool = False  # a projection of the queries' width gates the output of attention
    # linear_layers: blocks whose mixer has a state instead of scores: Mamba-2, or a gated delta rule. linear_in,
    # linear_out: output and input features of its two projections. linear_state: elements of the state of all heads.
    linear_layers: tuple[int, ...] = ()
    linear_in: int = 0
    linear_out: int = 0
    linear_state: int = 0
    split_blocks: bool = False  # a block is only a mixer, or only an MLP if it is in `mlp_only_layers`
    mlp_only_layers: tuple[int, ...] = ()
    prediction_layers: int = 0  # blocks of multi-token prediction, each followed by the head; not counted in `layers`
    # experts, experts_per_token: the routed experts in a block, and the number that a token goes through; 0 if dense.
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0  # features inside one routed expert
    shared_expert_intermediate_size: int = 0  # features inside the shared expert; 0 without one
    expert_hidden_size: int = (
        0  # input and output features of routed experts, between two projections; 0 for hidden_size
    )
    shared_expert_gate: bool = False  # a matrix with one output gates the shared expert
    dense_layers: tuple[int, ...] = ()  # blocks with a dense MLP in a model with experts
    # Vectors, which cost almost nothing. norms, norm_vectors: the norms in a block, and the vectors in each: a scale,
    # and possibly a bias. qk_norm: RMS norms of queries and keys, over each head's features or all heads' features.
    # other_vectors: all other elements in an attention block, such as other biases and sinks. linear_vectors: the
    # elements in a linear layer's convolution, decay and norm.
    norms: int = field(default=2, compare=False)
    norm_vectors: int = field(default=1, compare=False)
    qk_norm: QkNorm = field(default="", compare=False)
    other_vectors: int = field(default=0, compare=False)
    linear_vectors: int = field(default=0, compare=False)
    remark: str = field(default="", compare=False)  # parts that the model omits from its file
    # The router. router_scores: the function for experts' scores. renormalized: the scores
    # of a token's experts are divided by their sum; then they are multiplied by router_scale. expert_groups,
    # groups_per_token: a token's experts are in the groups with the largest sum of two scores (arXiv 2412.19437).
    router_scores: RouterScores = field(default="softmax", compare=False)
    renormalized: bool = field(default=False, compare=False)
    router_scale: float = field(default=1.0, compare=False)
    expert_groups: int = field(default=1, compare=False)
    groups_per_token: int = field(default=1, compare=False)
    # rope_theta, rotary_share: the base of rotary frequencies, and the share of a head's features that are rotated.
    # norm_eps: the epsilon of norms.
    rope_theta: float = field(default=500_000.0, compare=False)
    rotary_share: float = field(default=1.0, compare=False)
    norm_eps: float = field(default=1e-5, compare=False)
    # A gpt-oss block (arXiv 2508.10925): attention sinks, biases in the attention's output, routers and experts, a
    # clamped SwiGLU, and rotary embeddings with YaRN.
    gpt_oss: bool = field(default=False, compare=False)
    # The factor by which Llama 3.1 scales low rotary frequencies; None without scaling.
    rope_factor: float | None = field(default=None, compare=False)

    @property
    def rope_scaling(self) -> dict[str, Any] | None:
        """The `rope_scaling` in a Hugging Face config, which scales low frequencies for longer sequences."""
        if self.gpt_oss:
            rotations = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            return {"rope_type": "yarn", "factor": 32.0, **rotations, "original_max_position_embeddings": 4096}
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
    def mlp_matrices(self) -> int:
        return 3 if self.activation in ("swiglu", "gelu_gated") else 2

    def mixer(self, layer: int) -> Mixer:
        if layer in self.mlp_only_layers:
            return "none"
        return "linear" if layer in self.linear_layers else "attention"

    def has_mlp(self, layer: int) -> bool:
        return not self.split_blocks or layer in self.mlp_only_layers

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers and self.has_mlp(layer)

    def attends_to_all(self, layer: int) -> bool:
        return not self.window or layer in self.full_layers

    def attended_tokens(self, layer: int, sequence_length: float) -> float:
        """Return the number of earlier tokens that a token attends to, averaged over a sequence."""
        if self.attends_to_all(layer):
            return sequence_length / 2
        if self.chunked_window:
            window = min(self.window, sequence_length)
            rest = sequence_length % window
            return (window * (sequence_length - rest) + rest * rest) / (2 * sequence_length)
        rate, limit = self.compression_rate(layer), self.selected_keys if self.index_features(layer) else math.inf
        compressed = _mean_seen(sequence_length / rate, limit) if rate else 0.0
        return _mean_seen(sequence_length, self.window) + compressed

    def compression_rate(self, layer: int) -> int:
        return self.compression[layer] if self.compression else 0

    def compressor_features(self, layer: int) -> int:
        """Return the features of keys and gates that a layer compresses; an indexer's layer compresses tokens twice."""
        copies = 2 if self.index_features(layer) else 1
        return 2 * copies * self.head_size if self.compression_rate(layer) else 0

    def layer_kind(self, layer: int) -> LayerKind:
        kind = self.has_experts(layer), self.attends_to_all(layer), self.mixer(layer), self.has_mlp(layer)
        return *kind, self.index_features(layer) > 0, self.compression_rate(layer)

    def index_features(self, layer: int) -> float:
        """Return an indexer's multiplications per pair of tokens (scores and their sum); 0 without an indexer."""
        features = 0 if layer in self.unindexed_layers else self.index_heads * (self.index_size + 1)
        return features / (self.compression_rate(layer) or 1)

    @cached_property
    def layer_kinds(self) -> dict[LayerKind, int]:
        return {self.layer_kind(layer): layer for layer in range(self.layers)}

    def linear(self, layer: LayerName) -> tuple[int, int]:
        """Return (in_features, out_features) of a linear layer. Layers that read the same input share one matrix."""
        attention = self.heads * self.head_size
        return {
            "qkv": (self.hidden_size, attention + 2 * self.kv_heads * self.head_size),
            "output": (attention, self.hidden_size),
            "gate_up": (self.hidden_size, (self.mlp_matrices - 1) * self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
            "lm_head": (self.hidden_size, self.vocabulary),
        }[layer]

    # "Weights" are those of matrices and norms. Estimates omit biases. "Parameters" include everything.

    @property
    def value_features(self) -> int:
        """Return the number of features in a head's value."""
        return self.value_size or self.head_size

    @property
    def kv_features(self) -> int:
        """Return the number of features in the keys and values of all heads. Compressed keys are also the values."""
        return self.kv_heads * (self.head_size + (0 if self.compression else self.value_features))

    @property
    def residual_features(self) -> int:
        """Return the number of features that a block passes to the next block."""
        return self.hidden_size * (self.streams or 1)

    def mixer_matrices(self, layer: int) -> tuple[Matrix, ...]:
        """Return the linear layers of a block's attention, or of its replacement."""
        hidden, queries, values = self.hidden_size, self.heads * self.head_size, self.heads * self.value_features
        match self.mixer(layer):
            case "none":
                return ()
            case "linear":
                given = Matrix("linear_in", hidden, self.linear_in, "outputs")
                return given, Matrix("linear_out", self.linear_out, hidden, "inputs")
        output: tuple[Matrix, ...] = (Matrix("output", values, hidden, "inputs"),)
        if not self.kv_rank and not self.compression:
            gate = queries if self.attention_gate else 0
            return Matrix("qkv", hidden, queries + self.kv_features + gate, "outputs"), *output
        # The matrices of an indexer. The matrix for the indexer's single key also produces the weights of its heads. A
        # compressed key has two features of keys and two of gates for each of its own.
        index_query = Matrix("index_query", self.query_rank, self.index_heads * self.index_size, "tokens")
        key_size = self.index_size * (4 if self.compression else 1)
        index_key = Matrix("index_key", hidden, key_size + self.index_heads, "tokens")
        down = (Matrix("query_down", hidden, self.query_rank, "tokens"),) if self.query_rank else ()
        keys: tuple[Matrix, ...] = (
            Matrix("kv_down", hidden, self.kv_rank + self.rope_size, "tokens"),
            Matrix("kv", self.kv_rank, self.kv_features - self.kv_heads * self.rope_size, "outputs"),
        )
        if self.compression:
            keys = (Matrix("kv", hidden, self.kv_features + self.compressor_features(layer), "tokens"),)
            groups, rank = self.output_groups, self.output_rank
            grouped = Matrix("output_down", values // groups, rank, "outputs", groups)
            output = grouped, Matrix("output", groups * rank, hidden, "inputs")
        return (
            *down,
            Matrix("query", self.query_rank or hidden, queries, "outputs"),
            *keys,
            *output,
            *((index_query, index_key) if self.index_features(layer) else ()),
        )

    def mixer_weights(self, layer: int) -> int:
        """Return the weights of a block's attention or its replacement, and of the two hyper-connections of a block."""
        streams = 2 * self.residual_features * self.streams * (self.streams + 2)
        return streams + sum(matrix.weights for matrix in self.mixer_matrices(layer))

    def active_mlp_weights(self, layer: int) -> int:
        """Return the number of weights in a block's MLP, or in the router and the experts that a token goes through."""
        routed = self.experts_per_token * self.weights_of_an_expert
        return self.shared_mlp_weights(layer) + (routed if self.has_experts(layer) else 0)

    def shared_mlp_matrices(self, layer: int) -> tuple[Matrix, ...]:
        """Return the linear layers of a block's MLP that every token goes through."""
        hidden, latent, has_experts = self.hidden_size, self.expert_hidden_size, self.has_experts(layer)
        width = self.shared_expert_intermediate_size if has_experts else self.intermediate_size
        up = Matrix("up", hidden, width, "outputs", self.mlp_matrices - 1)
        matrices = (up, Matrix("down", width, hidden, "inputs")) if width and self.has_mlp(layer) else ()
        if not has_experts:
            return matrices
        around = Matrix("expert_in", hidden, latent, "tokens"), Matrix("expert_out", latent, hidden, "tokens")
        return *matrices, Matrix("router", hidden, self.router_outputs, "tokens"), *(around if latent else ())

    def shared_mlp_weights(self, layer: int) -> int:
        return sum(matrix.weights for matrix in self.shared_mlp_matrices(layer))

    @property
    def weights_of_an_expert(self) -> int:
        return self.mlp_matrices * (self.expert_hidden_size or self.hidden_size) * self.expert_intermediate_size

    @property
    def router_outputs(self) -> int:
        return self.experts + self.shared_expert_gate

    def expert_weights(self, layer: int) -> int:
        return self.experts * self.weights_of_an_expert if self.has_experts(layer) else 0

    def shared_weights(self, layer: int) -> int:
        """Return the number of weights in a block outside the routed experts."""
        return self.mixer_weights(layer) + self.shared_mlp_weights(layer) + self.norms * self.norm_weights

    @cached_property
    def layer_weights(self) -> list[tuple[int, ...]]:
        """The weights of each block: outside the routed experts, of these the MLP's, and those of all experts."""
        ways = self.shared_weights, self.shared_mlp_weights, self.expert_weights
        return [tuple(count(layer) for count in ways) for layer in range(self.layers)]

    @property
    def norm_weights(self) -> int:
        return self.norm_vectors * self.hidden_size

    @property
    def embedding_weights(self) -> int:
        return (self.vocabulary + self.max_positions) * self.hidden_size

    @property
    def head_weights(self) -> int:
        """Return the number of weights in the output layer, even if it shares them with the embedding."""
        return self.vocabulary * self.hidden_size

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Return the sizes of the query norm and the key norm, in features; zeros if the model has no such norms."""
        heads, kv_heads = {"head": (1, 1), "all": (self.heads, self.kv_heads)}.get(self.qk_norm, (0, 0))
        return heads * self.head_size, kv_heads * self.head_size

    def block_parameters(self, layer: int) -> int:
        qkv = self.linear("qkv")[1] if self.qkv_bias else 0
        has_bias = self.mlp_bias and not self.has_experts(layer) and self.has_mlp(layer)
        mlp = self.linear("gate_up")[1] + self.hidden_size if has_bias else 0
        attention = qkv + sum(self.qk_norm_sizes) + self.other_vectors
        # The norm of the indexer's key or, with compressed keys, of both; and each token's bias of its gate.
        rate = self.compression_rate(layer)
        attention += (2 * rate + 1 if rate else 2) * self.index_size if self.index_features(layer) else 0
        attention += rate * self.compressor_features(layer) // 2 + self.head_size if rate else 0
        mixer = {"attention": attention, "linear": self.linear_vectors, "none": 0}[self.mixer(layer)]
        return self.shared_weights(layer) + self.expert_weights(layer) + mlp + mixer

    @property
    def embedding_and_head_parameters(self) -> int:
        """Return the number of parameters outside the blocks: embedding, last norm, output layer, and its streams."""
        streams = self.streams * self.residual_features + self.streams + 1 if self.streams else 0
        return self.embedding_weights + self.norm_weights + (0 if self.tied else self.head_weights) + streams

    @cached_property
    def parameters(self) -> int:
        """Return the total number of parameters: 8,030,261,248 for Llama 3 8B."""
        return sum(map(self.block_parameters, range(self.layers))) + self.embedding_and_head_parameters

    @property
    def active_parameters(self) -> int:
        """Return the number of parameters that each token is multiplied by. The embedding, a lookup, does not count."""
        blocks = (self.mixer_weights(layer) + self.active_mlp_weights(layer) for layer in range(self.layers))
        return sum(blocks) + self.head_weights + self.streams * self.residual_features


def _mean_seen(length: float, limit: float) -> float:
    """Return how many of a sequence's earlier keys a query sees, averaged over the sequence, if it sees `limit`."""
    seen = min(limit, length)
    return seen - seen * seen / (2 * length)


SIZES = tuple(item.name for item in fields(Model) if item.compare)


def _read_table() -> dict[str, Model]:
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "bool": "true".__eq__, "float": float, "float | None": float}
    kinds["tuple[int, ...]"] = lambda text: tuple(map(int, text.split()))
    convert = {item.name: kinds.get(str(item.type), str) for item in fields(Model)}
    return {
        row["name"]: Model(**{name: convert[name](text) for name, text in row.items() if text and name in convert})
        for row in read_csv(__file__, "models.csv")
    }


MODELS = _read_table()
TRAINED_MODELS = {n: MODELS[n] for n in (*get_args(ModelName), "llama3_405b", "ml_dataflow_15b", *EXPERT_MODELS)}


def find_trained_name(model: Model) -> str | None:
    """Return the name of the trained model with these sizes, or None if this project's workloads train none."""
    return next((name for name, trained in TRAINED_MODELS.items() if trained == model), None)


@dataclass(frozen=True)
class GemmShape:
    """C[m, n] = A[m, k] · B[k, n]."""

    m: int
    n: int
    k: int
    layout: str  # BLAS letters for A and B: n if the matrix is in memory as written here, t if it is transposed


def gemm_shape(model: str, layer: LayerName, which: PassName, tokens: int) -> GemmShape:
    """Return one of the three GEMMs that train y[tokens, out] = x[tokens, in] · W[out, in]ᵀ. Raises KeyError."""
    in_features, out_features = MODELS[model].linear(layer)
    return {
        "forward": GemmShape(tokens, out_features, in_features, "nt"),  # y = x · Wᵀ
        "input_gradient": GemmShape(tokens, in_features, out_features, "nn"),  # dx = dy · W
        "weight_gradient": GemmShape(out_features, in_features, tokens, "tn"),  # dW = dyᵀ · x
    }[which]
