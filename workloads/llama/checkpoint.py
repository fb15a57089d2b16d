"""Read and write Hugging Face checkpoints of Llama and Qwen2: safetensors files and a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workloads.models.model import Model

SHARD_BYTES = 4 * 10**9

# Hugging Face's names of the parameters of `workloads.llama.model.Llama`. Where there are several, the parameter here
# is their concatenation along the first dimension.
HF_BLOCK_NAMES = {
    "attention_norm.weight": ["input_layernorm.weight"],
    "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "output.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}
HF_EMBEDDING_AND_HEAD_NAMES = {
    "embedding.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}


def hf_names(name: str) -> list[str]:
    """Return the names of a parameter's parts in a Hugging Face checkpoint."""
    if name in HF_EMBEDDING_AND_HEAD_NAMES:
        return HF_EMBEDDING_AND_HEAD_NAMES[name]
    _, number, inner_name = name.split(".", 2)
    return [f"model.layers.{number}.{hf_name}" for hf_name in HF_BLOCK_NAMES[inner_name]]


def open_reader(folder: Path, shape: Model) -> Callable[[str], torch.Tensor]:
    """Return a function from a parameter's name in `workloads.llama.model.Llama` to its tensor in the checkpoint.

    A tensor is read from its file at each call, on the CPU and in the checkpoint's data type. Both raise ValueError:
    for a folder without a checkpoint of this shape, and for a tensor that the checkpoint lacks.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ValueError(
            f"checkpoint={folder} has no *.safetensors files with a config.json; "
            "set it to a folder that `save_pretrained` of transformers has written"
        )
    actual: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if rope := dict(actual.get("rope_parameters") or {}):  # transformers 5; version 4 has the two keys
        actual["rope_theta"] = rope.pop("rope_theta", actual.get("rope_theta"))
        actual["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    differences = [
        f"{key} is {actual[key]}, the model's is {expected}"
        for key, expected in build_config(shape).items()
        if actual.get(key, expected) != expected
    ]
    if differences:
        raise ValueError(f"checkpoint={folder} does not fit the model: {'; '.join(differences)}")
    file_of = {name: file for file in files for name in list(safe_open(file, "pt").keys())}

    def read(name: str) -> torch.Tensor:
        parts = hf_names(name)
        if missing := [part for part in parts if part not in file_of]:
            raise ValueError(f"checkpoint={folder} has no tensor {missing[0]}")
        return torch.cat([safe_open(file_of[part], "pt").get_tensor(part) for part in parts])

    return read


def save(folder: Path, shape: Model, weights: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint that `transformers` reads, in shards of about 4 GB.

    `weights` have their names in `workloads.llama.model.Llama`. The first one's data type goes into config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kv_size = shape.kv_heads * shape.head_size
    part_rows = {"qkv": [shape.heads * shape.head_size, kv_size, kv_size], "gate_up": [shape.intermediate_size] * 2}
    shards: list[dict[str, torch.Tensor]] = [{}]
    shard_bytes = total_bytes = 0
    for name, weight in weights.items():
        parts = [weight]
        if len(names := hf_names(name)) > 1:
            parts = list(weight.split(part_rows[name.split(".")[2]]))
        for hf_name, part in zip(names, parts, strict=True):
            if shard_bytes + part.nbytes > SHARD_BYTES and shards[-1]:
                shards.append({})
                shard_bytes = 0
            shards[-1][hf_name] = part.contiguous()
            shard_bytes += part.nbytes
            total_bytes += part.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(build_config(shape) | {"torch_dtype": dtype}, indent=1))


def build_config(shape: Model) -> dict[str, Any]:
    """Return the keys of Hugging Face's config.json that decide what the model computes."""
    return {
        "model_type": "qwen2" if shape.qkv_bias else "llama",
        "architectures": ["Qwen2ForCausalLM" if shape.qkv_bias else "LlamaForCausalLM"],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
    }
