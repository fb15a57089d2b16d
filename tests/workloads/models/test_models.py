"""Models of the table and of Hugging Face's files."""

import json
from pathlib import Path
from typing import get_args

import pytest

from workloads.models.flops import model_flops_per_token
from workloads.models.hugging_face import UnsupportedModel, load_model, read_hugging_face
from workloads.models.model import MODELS, TRAINED_MODELS, find_trained_name
from workloads.offload import OffloadModelName

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("model", "billions"),
    [("llama3_8b", 8.03), ("llama3_70b", 70.6), ("mpt_30b", 29.96), ("qwen3_30b_a3b", 30.5), ("grok1_314b", 315.7)],
)
def test_parameters(model: str, billions: float) -> None:
    assert load_model(model).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_flops_by_the_causal_convention() -> None:
    assert model_flops_per_token(load_model("llama3_8b"), 8192) / 1e9 == pytest.approx(51.47, abs=0.01)
    assert model_flops_per_token(load_model("llama3_70b"), 8192) / 1e9 == pytest.approx(449.22, abs=0.01)


def test_a_hugging_face_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert load_model(str(path)) == MODELS["llama3_8b"]


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
GPT_NEOX = LLAMA_8B | {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "vocab_size": 50432,
}
MPT = {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432, "expansion_ratio": 4}
MINITRON = LLAMA_8B | {
    "model_type": "nemotron",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_attention_heads": 24,
    "head_dim": 128,
    "vocab_size": 256000,
}
MIXTRAL = LLAMA_8B | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE = {
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 151936,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "use_sliding_window": False,
    "sliding_window": 32768,
}
DEEPSEEK_MOE = QWEN_MOE | {
    "model_type": "deepseek",
    "intermediate_size": 10944,
    "num_hidden_layers": 28,
    "vocab_size": 102400,
    "num_experts": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "shared_expert_intermediate_size": None,
    "first_k_dense_replace": 1,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GPT2, 0.124),
        (GPT_NEOX, 20.55),
        (MPT, 6.65),
        (MINITRON, 4.19),
        (MIXTRAL, 46.7),
        (QWEN_MOE, 14.3),
        (DEEPSEEK_MOE, 16.4),
        (GPT_OSS, 20.9),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_parameters_of_hugging_face_files(config: dict[str, object], billions: float) -> None:
    assert read_hugging_face(config).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_by_name_has_the_parameters_of_its_file() -> None:
    assert MODELS["gpt_oss_20b"].parameters == read_hugging_face(GPT_OSS | {"attention_bias": True}).parameters


def test_layers_with_experts_follow_from_the_first_and_the_frequency() -> None:
    model = read_hugging_face(DEEPSEEK_MOE | {"num_hidden_layers": 9, "first_k_dense_replace": 3, "moe_layer_freq": 2})
    assert [layer for layer in range(9) if model.has_experts(layer)] == [4, 6, 8]


def test_windows_of_hugging_face_files() -> None:
    every_other = read_hugging_face(GPT_OSS)
    assert [every_other.attended_tokens(layer, 8192) for layer in (0, 1)] == [pytest.approx(127), 4096]
    always = read_hugging_face(LLAMA_8B | {"model_type": "mistral", "sliding_window": 4096})
    assert always.attended_tokens(0, 32768) == pytest.approx(4096, rel=0.07)
    unused = read_hugging_face(LLAMA_8B | {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert unused.window == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "kimi_linear"}, "linear attention"),
        ({"model_type": "bamba"}, "Mamba-2"),
        ({"model_type": "other"}, "Available: .*llama"),
        ({"model_type": "lama"}, "model_type 'lama' is not modelled. Did you mean llama. Available: "),
        ({"model_type": None}, "no model_type. Available: .*llama"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"num_attention_heads": None}, "no num_attention_heads. Required: num_hidden_layers, hidden_size"),
        ({"num_attention_heads": 33}, "num_key_value_heads 8 does not divide num_attention_heads 33"),
        ({"num_attention_heads": 24}, "heads 24 does not divide hidden_size 4096, and there is no head_dim"),
        ({"num_key_value_heads": 64}, "num_key_value_heads 64 does not divide num_attention_heads 32"),
        ({"hidden_size": 0}, "hidden_size is 0: must be a whole number from 1"),
        ({"hidden_size": 4096.5}, "hidden_size is 4096.5: must be a whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1: must be a whole number from 1 to 10,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: must be a whole number from 1 to 10,000"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32': must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True: must be a whole number"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1: must be a whole number from 0"),
        ({"layer_types": "full"}, "layer_types is 'full': must be a list"),
        ({"model_type": "mpt", "attn_config": "x"}, "attn_config is 'x': must be a mapping"),
        ({"attention_bias": "false"}, "attention_bias is 'false': must be true or false"),
        ({"model_type": "qwen2", "max_window_layers": "4"}, "max_window_layers is '4': must be a whole number"),
        ({"kv_lora_rank": 512}, "kv_lora_rank may change shapes, and is not known of model_type llama"),
        ({"model_type": "qwen2", "max_window_layer": 3}, "max_window_layer may .* Did you mean max_window_layers"),
        ({"model_type": "mixtral", "moe_layer_freq": 2}, "moe_layer_freq may change shapes"),
        ({"sliding_window": 4096}, "sliding_window may change shapes"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention"]},
            "layer_types is .* the kind of each of 32 layers",
        ),
        (
            {"model_type": "qwen3_moe", "decoder_sparse_step": 0},
            "decoder_sparse_step is 0: must be a whole number from 1",
        ),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3: must be a list"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3: must be a mapping"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers has 2 layers, num_hidden_layers is 32"),
        (
            {"model_type": "mixtral", "num_local_experts": 8},
            "no num_experts_per_tok. Required: num_experts, num_experts_per_tok",
        ),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_hugging_face(LLAMA_8B | changes)


V4 = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "compress_ratios": [0] * 32}
CSA = "compressed_sparse_attention"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("deepseek_v3", {"num_attention_heads": None}, "no num_attention_heads"),
        ("deepseek_v3", {"qk_nope_head_dim": None}, "qk_nope_head_dim is null: must be a whole number of at least 1"),
        ("deepseek_v3", {"qk_nope_head_dim": "128"}, "qk_nope_head_dim is '128': must be a whole number from 1"),
        ("deepseek_v3", {"qk_nope_head_dim": -64}, "qk_nope_head_dim is -64: must be"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank is 0: must be"),
        ("deepseek_v3", {"v_head_dim": None}, "v_head_dim is null: must be"),
        ("deepseek_v4", V4 | {"compress_ratios": [0, 8]}, "compress_ratios is .0, 8.: must be a list of 0, 4, 128"),
        ("deepseek_v4", V4 | {"compress_ratios": [0, 4]}, "compress_ratios is .0, 4.: must be of 32 layers"),
        ("deepseek_v4", V4 | {"layer_types": [["a"]] * 32}, "layers of kind ..a.. are not modelled in deepseek_v4"),
        (
            "deepseek_v4",
            V4 | {"compress_rates": {CSA: 0}},
            "compressed_sparse_attention is 0: must be a whole number f",
        ),
        (
            "deepseek_v4",
            V4 | {"layer_types": ["full_attention"] * 32},
            "layers of kind full_attention are not modelled",
        ),
        ("deepseek_v4", V4 | {"sliding_window": None}, "sliding_window"),
        ("deepseek_v4", V4 | {"o_groups": 5}, "o_groups 5 does not divide the features of 32 heads"),
        ("deepseek_v4", V4 | {"compress_rate_csa": 8}, "compress_rate_csa may change shapes"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types is .*: must be of 32 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": 5}, "mlp_layer_types is 5: must be a list of dense, sparse"),
        ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval is 0: must be"),
        ("qwen3_next", {"linear_num_key_heads": None}, "linear_num_key_heads is null: must be"),
        ("nemotron_h", {"mamba_num_heads": None}, "mamba_num_heads is null: must be"),
        ("nemotron_h", {"hybrid_override_pattern": 5}, "hybrid_override_pattern is 5: must be text"),
        ("nemotron_h", {"layers_block_type": "M"}, "layers_block_type is 'M': must be a list of linear_attention, moe"),
        ("llama4_text", {"moe_layers": [100], "num_local_experts": 8}, "moe_layers is .100.: must be of 32 layers"),
        ("llama", {"rope_scaling": "yarn"}, "rope_scaling is 'yarn': must be a mapping"),
        ("llama", {"rope_parameters": [1]}, "rope_parameters is .1.: must be a mapping"),
        ("llama", {"rope_scaling": {"full_attention": 3}}, "full_attention is 3: must be a mapping"),
        ("llama", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers may change shapes"),
    ],
)
def test_a_broken_file_is_refused_by_its_key(family: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_hugging_face(LLAMA_8B | {"model_type": family} | changes)


def test_the_file_of_glm_has_the_sizes_of_its_named_model() -> None:
    sizes = {"hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "num_attention_heads": 96}
    experts = {"n_routed_experts": 160, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    others = {"head_dim": 128, "vocab_size": 151552, "attention_bias": True, "use_qk_norm": True}
    layers = {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    model = read_hugging_face({"model_type": "glm4_moe"} | sizes | experts | others | layers)
    assert (model, model.qk_norm, model.prediction_layers) == (MODELS["glm4_5"], MODELS["glm4_5"].qk_norm, 1)


def test_the_published_files_of_deepseek_v4_have_the_sizes_of_their_named_models() -> None:
    """Totals are those of transformers' modules on the meta device; the cards say 284B and 1.6T, 13B and 49B active."""
    shared = {"head_dim": 512, "vocab_size": 129280, "num_experts_per_tok": 6, "num_nextn_predict_layers": 1}
    shared |= {
        "num_key_value_heads": 1,
        "num_hash_layers": 3,
        "hc_mult": 4,
        "expert_dtype": "fp4",
        "n_shared_experts": 1,
    }
    flash = {"hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "n_routed_experts": 256}
    flash |= {"moe_intermediate_size": 2048, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}
    pro = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "n_routed_experts": 384}
    pro |= {"moe_intermediate_size": 3072, "q_lora_rank": 1536, "o_groups": 16, "index_topk": 1024}
    pro |= {"compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
    for name, file, total, active in (
        ("deepseek_v4_flash", flash, 284_332_230_231, 13_268_221_952),
        ("deepseek_v4_pro", pro, 1_572_997_179_491, 48_849_141_760),
    ):
        model = read_hugging_face({"model_type": "deepseek_v4"} | shared | file)
        assert (model, model.parameters, MODELS[name].parameters) == (MODELS[name], total, total)
        assert (model.active_parameters, model.prediction_layers) == (active, 1)


def test_an_unknown_name_has_a_suggestion() -> None:
    with pytest.raises(UnsupportedModel, match="Did you mean llama3_70b"):
        load_model("llama3-70b")


def test_a_model_that_this_project_trains_is_found_by_its_sizes() -> None:
    assert [find_trained_name(MODELS[name]) for name in TRAINED_MODELS] == list(TRAINED_MODELS)
    assert set(get_args(OffloadModelName)) <= set(TRAINED_MODELS)  # else every trial of the others is refused
    assert find_trained_name(MODELS["gpt3_175b"]) is None


def test_the_table_has_what_the_trainer_needs() -> None:
    model = MODELS["qwen2_5_7b"]
    assert (model.rope_theta, model.norm_eps, model.rope_factor, model.qkv_bias) == (1e6, 1e-6, None, True)
    assert (MODELS["llama3_1b"].rope_theta, MODELS["llama3_1b"].rope_factor) == (500_000.0, 32.0)
