"""Families of models, compared with the modules that transformers builds and with what these multiply."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from workloads.models.families import FAMILIES, TEXT_PARTS
from workloads.models.flops import model_flops_per_token
from workloads.models.hugging_face import EPSILONS, read_hugging_face

transformers = pytest.importorskip("transformers")
eager_mask = pytest.importorskip("transformers.masking_utils").eager_mask

# The smallest sizes of which none equals another, so that no mistake cancels.
SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 352,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 40}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3}
TAIL_WINDOWS = WINDOW | {"use_sliding_window": True, "max_window_layers": 4}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
UNEVEN = WINDOW | {"layer_types": [*KINDS, "sliding_attention"]}
FALCON = {"num_kv_heads": 4, "num_key_value_heads": None, "intermediate_size": None, "ffn_hidden_size": 200}
CHUNKS = LOCAL_EXPERTS | {"attention_chunk_size": 100, "intermediate_size_mlp": 200, "head_dim": 16}
ROUTED_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56}
LATENT = ROUTED_EXPERTS | {
    **{
        "num_key_value_heads": 12,
        "kv_lora_rank": 44,
        "q_lora_rank": 52,
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 12,
    },
    **{"v_head_dim": 28},
}
INDEX = {"index_n_heads": 6, "index_head_dim": 36, "index_topk": 40}
COMPRESSED = ROUTED_EXPERTS | {
    **{"intermediate_size": None, "num_key_value_heads": None, "head_dim": 28, "q_lora_rank": 52},
    **{"index_n_heads": 6, "index_head_dim": 36, "index_topk": 24, "sliding_window": 40, "qk_rope_head_dim": 12},
    **{"o_groups": 3, "o_lora_rank": 20, "hc_mult": 4, "compress_ratios": [0, 4, 128, 4, 4, 128, 0]},
}
RATES = {"compressed_sparse_attention": 16, "heavily_compressed_attention": 32}
LINEAR = {
    **{"head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
}
NEMOTRON = ROUTED_EXPERTS | {
    **{"num_hidden_layers": None, "head_dim": 16, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 3},
    **{"ssm_state_size": 24, "conv_kernel": 3, "moe_shared_expert_intermediate_size": 72},
}
FILES: dict[str, list[dict[str, Any]]] = {
    "llama": [{}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16}],
    "mistral": [WINDOW | {"use_sliding_window": False}, {"sliding_window": None, "head_dim": 16}],
    "qwen2": [{}, TAIL_WINDOWS, TAIL_WINDOWS | {"max_window_layers": 6}, UNEVEN | {"use_sliding_window": True}],
    "qwen3": [{"head_dim": 16}, {}, TAIL_WINDOWS],
    "gpt_neox": [{"num_key_value_heads": None}, {"num_key_value_heads": None, "attention_bias": False}],
    "gpt2": [
        {"n_embd": 96, "n_layer": 6, "n_head": 12, "n_positions": 256, "num_key_value_heads": None}
        | {"intermediate_size": None}
    ],
    "mpt": [{"d_model": 96, "n_layers": 6, "n_heads": 12, "num_key_value_heads": None, "intermediate_size": None}],
    "nemotron": [{"head_dim": 16}, {"attention_bias": True, "mlp_bias": True}],
    "qwen2_moe": [
        EXPERTS | {"shared_expert_intermediate_size": 72},
        EXPERTS
        | TAIL_WINDOWS
        | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": False}
        | {"shared_expert_intermediate_size": 72},
    ],
    "qwen3_moe": [
        EXPERTS | {"head_dim": 16},
        EXPERTS | TAIL_WINDOWS | {"decoder_sparse_step": 2},
        EXPERTS | {"mlp_only_layers": [0, 3]},
        EXPERTS | {"mlp_only_layers": [0, 1, 2, 3, 4, 5]},
    ],
    "mixtral": [LOCAL_EXPERTS, LOCAL_EXPERTS | WINDOW],
    "gpt_oss": [LOCAL_EXPERTS, LOCAL_EXPERTS | UNEVEN | {"head_dim": 16}],
    "deepseek_v2": [LATENT, LATENT | {"first_k_dense_replace": 2, "n_shared_experts": 1, "attention_bias": True}],
    "deepseek_v3": [
        LATENT | {"n_group": 4, "topk_group": 3},
        LATENT | {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
    ],
    "deepseek_v32": [LATENT | INDEX | {"n_group": 4, "topk_group": 3}],
    "deepseek_v4": [
        COMPRESSED,
        COMPRESSED | {"hc_mult": 3, "compress_ratios": None, "compress_rates": RATES, "layer_types": [*RATES] * 3},
    ],
    "glm_moe_dsa": [
        LATENT | INDEX | {"first_k_dense_replace": 2},
        LATENT
        | INDEX
        | {"index_topk_freq": 3, "index_skip_topk_offset": 1, "mlp_layer_types": ["dense", "sparse"] * 3},
        LATENT | INDEX | {"indexer_types": ["full", "full", "shared"] * 2},
    ],
    "glm4_moe_lite": [LATENT, LATENT | {"mlp_layer_types": ["dense", "sparse"] * 3}],
    "qwen3_next": [
        EXPERTS | LINEAR | {"shared_expert_intermediate_size": 72},
        EXPERTS
        | LINEAR
        | {"shared_expert_intermediate_size": 72, "mlp_only_layers": [1]}
        | {"layer_types": ["full_attention", "linear_attention"] * 3},
    ],
    "nemotron_h": [
        NEMOTRON | {"hybrid_override_pattern": "MEM*E-"},
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention"], "moe_latent_size": 40},
        NEMOTRON | {"hybrid_override_pattern": "M*EE", "moe_latent_size": 40, "use_conv_bias": False},
    ],
    "phi3": [{}, WINDOW | {"tie_word_embeddings": True}],
    "olmo": [{}],
    "olmo2": [{}, {"attention_bias": True}],
    "olmo3": [{}, WINDOW, UNEVEN],
    "olmoe": [{"num_experts": 8, "num_experts_per_tok": 3}],
    "granite": [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    "granitemoe": [LOCAL_EXPERTS],
    "granitemoeshared": [LOCAL_EXPERTS | {"shared_intermediate_size": 72}],
    "smollm3": [{}, WINDOW | {"use_sliding_window": True, "no_rope_layer_interval": 3}],
    "seed_oss": [{"head_dim": 16}, {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}],
    "falcon": [
        FALCON,
        FALCON | {"new_decoder_architecture": True},
        FALCON | {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        FALCON | {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True, "num_kv_heads": None},
    ],
    "starcoder2": [{}, WINDOW | {"use_bias": False, "tie_word_embeddings": False}],
    "cohere": [{}, {"use_qk_norm": True, "attention_bias": True}],
    "cohere2": [WINDOW, WINDOW | {"sliding_window_pattern": 3}, UNEVEN],
    "glm4_moe": [
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56, "use_qk_norm": True},
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 56, "first_k_dense_replace": 2}
        | {"n_shared_experts": 2, "attention_bias": True, "head_dim": 16},
    ],
    "gemma": [{}, {"head_dim": 16}],
    "gemma2": [WINDOW | {"head_dim": 16}, UNEVEN],
    "gemma3_text": [WINDOW | {"head_dim": 16}, WINDOW | {"sliding_window_pattern": 3}, UNEVEN],
    "llama4_text": [
        CHUNKS,
        CHUNKS | {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 1, 1, 0]},
        CHUNKS | {"moe_layers": [0, 4], "layer_types": ["full_attention", "chunked_attention"] * 3},
    ],
}
CASES = [(family, changes) for family, files in FILES.items() for changes in files]
NOT_BUILT = {
    "deepseek",
    "kimi_k2",
    "qwen2_5_vl_text",
}  # the first is not in transformers, the second only within its wrapper
OWN_ATTENTION = {"falcon", "mpt"}  # modules without transformers' interface of attention
SEQUENCE = 256


def file_of(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    given = {"model_type": family, **SIZES, **changes}
    windows = {"sliding_window", "attention_chunk_size"}  # null has a meaning
    return {key: value for key, value in given.items() if value is not None or key in windows}


def build(config: dict[str, Any], attention: str = "eager") -> torch.nn.Module:
    """Return the model that transformers builds of a file."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    built = transformers.AutoConfig.for_model(config["model_type"], **values)
    kind = transformers.AutoModelForCausalLM
    if config["model_type"] in TEXT_PARTS:
        kind = transformers.AutoModelForImageTextToText
    return kind.from_config(built, attn_implementation=attention, experts_implementation="eager")


class AttentionCounter:
    """Attention that counts the pairs of tokens which its mask lets through, times the FLOPs of each."""

    def __init__(self) -> None:
        self.flops = 0

    def __call__(
        self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, indices: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        mask = mask if indices is None else mask.gather(-1, indices.long()[:, None])  # those that an indexer selects
        self.flops += 2 * int(mask.sum()) * query.shape[1] * (query.shape[3] + value.shape[3])
        return query.new_zeros(*query.shape[:3], value.shape[3]).transpose(1, 2), None


def count_flops(config: dict[str, Any]) -> float:
    """Return the FLOPs of a token in the forward pass, counted while the model runs."""
    counter = AttentionCounter()
    transformers.AttentionInterface.register("counter", counter)
    transformers.AttentionMaskInterface.register("counter", eager_mask)
    has_own = config["model_type"] in OWN_ATTENTION
    model = build(config, "eager" if has_own else "counter").eval()
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.randint(SIZES["vocab_size"], (1, SEQUENCE)), use_cache=False)
    ops = counted.get_flop_counts()["Global"]
    products = ops[torch.ops.aten.mm] + ops.get(torch.ops.aten.addmm, 0)
    batched = sum(flops for op, flops in ops.items() if "bmm" in str(op))
    if has_own or "index_topk" in config:
        products += batched / 2  # of the whole square of pairs
    if config["model_type"] == "deepseek_v4":  # groups of heads, and the mixing of streams
        pairs = (flops for name, flops in counted.get_flop_counts().items() if name.endswith("indexer.scorer"))
        products += batched / 2 - sum(some[torch.ops.aten.bmm] for some in pairs) / 2
    if config["model_type"] == "llama4_text":  # all experts take all tokens, of which those not routed to them are 0
        products += batched * config["num_experts_per_tok"] / config["num_local_experts"]
    return (products + counter.flops) / SEQUENCE


def test_every_family_has_a_case() -> None:
    assert set(FILES) == set(FAMILIES) - NOT_BUILT


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_parameters_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    config = file_of(family, changes)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in build(config).parameters())
    assert read_hugging_face(config).parameters == parameters


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_flops_are_those_that_transformers_multiplies(family: str, changes: dict[str, Any]) -> None:
    config = file_of(family, changes)
    model = read_hugging_face(config)
    forward = model_flops_per_token(model, SEQUENCE) / 3
    forward -= 4 * model.linear_state * len(model.linear_layers)  # elementwise operations, which are not counted
    assert forward == pytest.approx(count_flops(config), rel=0.002)


TEXT_SIZES = {"mistral3": {}, "gemma3": {"head_dim": 16}, "qwen2_5_vl": TAIL_WINDOWS, "llama4": CHUNKS}


@pytest.mark.parametrize(
    ("name", "is_tied"),
    [(name, tied) for name in TEXT_PARTS for tied in (True, False) if not (tied and name == "llama4")],
)  # transformers does not tie Llama 4 by the key of the whole model
def test_the_text_part_has_the_parameters_of_transformers(name: str, is_tied: bool) -> None:
    config = {"model_type": name, "text_config": SIZES | TEXT_SIZES[name], "tie_word_embeddings": is_tied}
    with torch.device("meta"):
        model = build(config)
    parameters = sum(
        parameter.numel()
        for key, parameter in model.named_parameters()
        if not {"vision_tower", "vision_model", "visual", "multi_modal_projector"}.intersection(key.split("."))
    )
    read = read_hugging_face(config)
    assert read.parameters == parameters and f"the text part of {name}" in read.remark


@pytest.mark.parametrize("changes", [TAIL_WINDOWS, UNEVEN | {"use_sliding_window": True}])
def test_flops_of_a_text_part_are_those_that_transformers_multiplies(changes: dict[str, Any]) -> None:
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 96}
    rotary = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}  # of half a head's 8 features
    config = {"model_type": "qwen2_5_vl", "text_config": SIZES | rotary | changes, "vision_config": vision}
    forward = model_flops_per_token(read_hugging_face(config), SEQUENCE) / 3
    assert forward == pytest.approx(count_flops(config), rel=0.002)


def test_a_file_of_one_level_has_a_text_part() -> None:
    flat = {"model_type": "qwen2_5_vl", **SIZES, **TAIL_WINDOWS, "vision_config": {"depth": 3}, "vision_token_id": 5}
    assert read_hugging_face(flat) == read_hugging_face(
        {"model_type": "qwen2_5_vl", "text_config": SIZES | TAIL_WINDOWS}
    )


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - NOT_BUILT - {"mpt", "gpt2", "olmo", "nemotron_h"}))
def test_rotary_base_and_epsilon_are_those_of_transformers(family: str) -> None:
    """A file that lacks them has the family's, one that has them its own. Others have none."""
    usual = transformers.AutoConfig.for_model(family)
    rotary = usual.rope_parameters
    rotary = rotary.get("full_attention", rotary.get("main", rotary))
    epsilon = next(value for key, value in usual.to_dict().items() if key in EPSILONS)
    read = read_hugging_face(file_of(family, FILES[family][0]))
    assert (read.rope_theta, read.norm_eps) == (rotary["rope_theta"], epsilon)
    own = {"rope_parameters": {"rope_theta": 7e5, "rope_type": "yarn", "factor": 4.0}, EPSILONS[0]: 1e-4}
    read = read_hugging_face(file_of(family, FILES[family][0] | own))
    assert (read.rope_theta, read.norm_eps, read.rope_factor) == (7e5, 1e-4, None)
    assert "without the yarn scaling of rotary embeddings" in read.remark


def test_the_whole_default_configuration_of_nemotron_h_is_read() -> None:
    model = read_hugging_face(transformers.NemotronHConfig().to_dict())
    assert (model.layers, model.linear_layers, model.mlp_only_layers, model.experts) == (4, (0,), (1, 3), 8)
