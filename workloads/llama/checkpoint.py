"""Weights from and to a Hugging Face checkpoint of the Llama or Qwen2 kind: safetensors and a config.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workloads.llama.shapes import LlamaShape

SHARD_BYTES = 4 * 10**9

# Our name of a block's parameter, and theirs; several are one after the other along the first dimension.
BLOCK = {
    "attention_norm.weight": ["input_layernorm.weight"],
    "qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "output.weight": ["self_attn.o_proj.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}
ENDS = {
    "embedding.weight": ["model.embed_tokens.weight"],
    "norm.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}


def their_names(name: str) -> list[str]:
    """What a parameter of ours consists of in a checkpoint."""
    if name in ENDS:
        return ENDS[name]
    _, number, inner = name.split(".", 2)
    return [f"model.layers.{number}.{theirs}" for theirs in BLOCK[inner]]


def reader(folder: Path, shape: LlamaShape) -> Callable[[str], torch.Tensor]:
    """A function from our names to the checkpoint's tensors, each read when it is asked for.

    Raises ValueError where the checkpoint is none, or one of another shape, with what differs.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ValueError(f"checkpoint={folder}: there are no *.safetensors with a config.json")
    said = _said(folder)
    differing = {key: (said[key], ours) for key, ours in config(shape).items() if said.get(key, ours) != ours}
    if differing:
        words = [f"{key} is {theirs}, the model's is {ours}" for key, (theirs, ours) in differing.items()]
        raise ValueError(f"checkpoint={folder}: {'; '.join(words)}")
    where = {name: file for file in files for name in list(safe_open(file, "pt").keys())}

    def read(name: str) -> torch.Tensor:
        parts = their_names(name)
        if missing := [part for part in parts if part not in where]:
            raise ValueError(f"checkpoint={folder}: {missing[0]} is not in it")
        return torch.cat([safe_open(where[part], "pt").get_tensor(part) for part in parts])

    return read


def _said(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json; transformers 5 has what concerns rotations in one place, 4 in two."""
    said: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if rope := dict(said.get("rope_parameters") or {}):
        said["rope_theta"] = rope.pop("rope_theta", said.get("rope_theta"))
        said["rope_scaling"] = None if rope.get("rope_type") == "default" else rope
    return said


def save(folder: Path, shape: LlamaShape, weights: Mapping[str, torch.Tensor]) -> None:
    """Write weights by our names as a checkpoint that `transformers` reads, in shards of about 4 GB."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = _rows(shape)
    theirs: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        names = their_names(name)
        inner = name.split(".", 2)[2] if name.startswith("blocks.") else name
        pieces = tensor.split(sizes[inner.split(".")[0]]) if len(names) > 1 else [tensor]
        theirs |= {n: piece.contiguous() for n, piece in zip(names, pieces, strict=True)}
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in theirs.items():
        if sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
        shards[-1][name] = tensor
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in theirs.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)
    dtype = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config(shape) | {"torch_dtype": dtype}, indent=1))


def _rows(shape: LlamaShape) -> dict[str, list[int]]:
    kv = shape.kv_heads * shape.head_size
    return {"qkv": [shape.heads * shape.head_size, kv, kv], "gate_up": [shape.intermediate_size] * 2}


def config(shape: LlamaShape) -> dict[str, Any]:
    """The keys of a config.json that decide what is computed."""
    kind = "qwen2" if shape.qkv_bias else "llama"
    return {
        "model_type": kind,
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
