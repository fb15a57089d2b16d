"""Read and write Hugging Face checkpoints of the trained model families: safetensors files and a config.json."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from workloads.models.families import FAMILIES
from workloads.models.hugging_face import UnsupportedModel, read_config
from workloads.models.model import Model
from workloads.models.trained import read_trained
from workloads.tables import read_toml

SHARD_BYTES = 4 * 10**9
STACKED = (".experts.gate_up", ".experts.down")  # one matrix per expert
Weights = Iterable[tuple[str, Tensor]]  # pairs of a parameter's name, such as `blocks.0.…`, and a tensor

NAMES: dict[str, dict[str, list[str]]] = read_toml(__file__, "checkpoint.toml")


def find_family(shape: Model) -> str:
    """Return the Hugging Face `model_type` that computes this model. Raises ValueError if there is none."""
    if shape.experts:
        families = {"": "mixtral", "all": "olmoe", "head": "qwen3_moe"}
        family = "qwen2_moe" if shape.shared_expert_gate else families[shape.qk_norm]
        family = "glm4_moe" if shape.router_scores == "sigmoid" else "gpt_oss" if shape.gpt_oss else family
    else:
        family = "qwen3" if shape.qk_norm else "qwen2" if shape.qkv_bias else "llama"
    if differing := _differing_fields(read_trained(build_config(shape, family)), shape):
        raise ValueError(f"no checkpoint of {family} has this model's {differing[0]}={getattr(shape, differing[0])}")
    return family


def _differing_fields(model: Model, other: Model) -> list[str]:
    names = [item.name for item in fields(Model) if item.name != "remark"]
    return [name for name in names if getattr(model, name) != getattr(other, name)]


def hf_names(name: str, shape: Model) -> list[str]:
    """Return the names of a parameter's parts in a Hugging Face checkpoint."""
    if name in NAMES["ends"]:
        return NAMES["ends"][name]
    _, number, inner_name = name.split(".", 2)
    hf_block_names = _block_names(find_family(shape), shape.experts)
    return [f"model.layers.{number}.{hf_name}" for hf_name in hf_block_names[inner_name]]


@cache
def _block_names(family: str, count: int) -> dict[str, list[str]]:
    mlp, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if family == "mixtral":
        mlp, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    experts, shared = [f"{mlp}.experts.{expert}" for expert in range(count)], f"{mlp}.shared_expert"
    shared += "s" if family == "glm4_moe" else ""
    if family == "gpt_oss":
        return NAMES["block"] | NAMES["gpt_oss"]
    return NAMES["block"] | {
        "experts.router.weight": [f"{mlp}.gate.weight"],
        "experts.bias": [f"{mlp}.gate.e_score_correction_bias"],
        "experts.gate_up": [f"{expert}.{part}.weight" for expert in experts for part in (gate, up)],
        "experts.down": [f"{expert}.{down}.weight" for expert in experts],
        "experts.shared_gate_up.weight": [f"{shared}.{part}.weight" for part in (gate, up)],
        "experts.shared_down.weight": [f"{shared}.{down}.weight"],
        "experts.shared_gate.weight": [f"{mlp}.shared_expert_gate.weight"],
    }


def open_reader(folder: Path, shape: Model) -> Callable[[str], Tensor]:
    """Return a function that reads a parameter from the checkpoint by its name, such as `blocks.0.…`.

    Each call of this function reads one tensor to the CPU in the checkpoint's data type, and raises ValueError if the
    checkpoint lacks the tensor. Raises ValueError if the folder has no checkpoint of this shape in any family.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files or not (folder / "config.json").exists():
        raise ValueError(
            f"checkpoint={folder} has no *.safetensors files with a config.json; "
            "set it to a folder that `save_pretrained` of transformers has written"
        )
    # The multi-token prediction layers follow the blocks and are not read.
    config = {**read_config(str(folder / "config.json")), "num_nextn_predict_layers": 0}
    try:
        actual = read_trained(config)
    except UnsupportedModel as error:
        raise ValueError(f"checkpoint={folder}: {error}") from error
    differences = [
        f"{name} is {getattr(actual, name)}, the model's is {getattr(shape, name)}"
        for name in _differing_fields(actual, shape)
    ]
    if differences:
        raise ValueError(f"checkpoint={folder} does not fit the model: {'; '.join(differences)}")
    file_of = {name: file for file in files for name in list(safe_open(file, "pt").keys())}

    def read(name: str) -> Tensor:
        parts = hf_names(name, shape)
        if missing := [part for part in parts if part not in file_of]:
            raise ValueError(f"checkpoint={folder} has no tensor {missing[0]}")
        whole = torch.cat([safe_open(file_of[part], "pt").get_tensor(part) for part in parts])
        if shape.gpt_oss and ".experts." in name and ".router." not in name:
            whole = whole.mT if name.endswith(STACKED) else whole
            return whole.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if "gate_up" in name else whole
        return whole.unflatten(0, (shape.experts, -1)) if name.endswith(STACKED) else whole

    return read


def save(folder: Path, shape: Model, weights: Weights) -> None:
    """Write a checkpoint that `transformers` can read, in files of about 4 GB. A file is written once it is full.

    `weights` may be in any order. The data type of the first weight is written to config.json. Raises ValueError if no
    family supports the model or its router biases.
    """
    config = build_config(shape, find_family(shape))
    folder.mkdir(parents=True, exist_ok=True)
    qkv_rows = [heads * shape.head_size for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    shard, written, dtype = dict[str, Tensor](), list[list[str]](), ""  # `written` lists the names in each file
    written_bytes = total_bytes = 0

    def write() -> None:
        save_file(shard, folder / f"{len(written)}.part", metadata={"format": "pt"})
        written.append([*shard])
        shard.clear()

    for name, weight in _with_router_biases(weights, shape, config["model_type"]):
        if shape.gpt_oss and ".experts." in name and ".router." not in name:  # gate and up alternate, inputs are first
            weight = weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if "gate_up" in name else weight
            rows = weight.mT if name.endswith(STACKED) else weight
        else:
            rows = weight.flatten(0, -2) if weight.dim() > 1 else weight
        names = hf_names(name, shape)
        parts = rows.split(qkv_rows) if ".qkv." in name else rows.chunk(len(names))
        for hf_name, part in zip(names, parts, strict=True):
            if shard and total_bytes - written_bytes + part.nbytes > SHARD_BYTES:
                write()
                written_bytes = total_bytes
            shard[hf_name] = part.contiguous()
            total_bytes += part.nbytes
        dtype = dtype or str(weight.dtype).removeprefix("torch.")
    write()
    files = {f"model-{n:05d}-of-{len(written):05d}.safetensors": names for n, names in enumerate(written, 1)}
    for number, file in enumerate(files):
        (folder / f"{number}.part").rename(folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=1))


def _with_router_biases(weights: Weights, shape: Model, family: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights. If the family has no `experts.bias`, drop the router biases, which must then be zero."""
    biases = [f"blocks.{layer}.experts.bias" for layer in range(shape.layers) if shape.has_experts(layer)]
    given = set[str]()
    for name, weight in weights:
        given.add(name)
        if family == "glm4_moe" or name not in biases:
            yield name, weight
        elif weight.any():
            raise ValueError(f"{name} is not 0, and a checkpoint of {family} has no biases of routers")
    if family == "glm4_moe" and (missing := [name for name in biases if name not in given]):
        raise ValueError(f"no {missing[0]}: a checkpoint of {family} has the biases of its routers")


def build_config(shape: Model, family: str) -> dict[str, Any]:
    """Return the keys of Hugging Face's config.json that determine what the model computes."""
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [family.title().replace("_", "") + "ForCausalLM"],
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "rms_norm_eps": shape.norm_eps,
        "hidden_act": "silu",
    }
    if shape.intermediate_size:
        config["intermediate_size"] = shape.intermediate_size
    if not shape.experts:
        return config
    sizes = {name: keys[0] for name, keys in FAMILIES[family].size_names.items() if "expert" in name}
    sizes |= {"experts": "num_local_experts"} if family in ("mixtral", "gpt_oss") else {}
    sizes |= {"experts": "n_routed_experts"} if family == "glm4_moe" else {}
    config |= {key: getattr(shape, name) for name, key in sizes.items()}
    if isinstance(FAMILIES[family].renormalized, str):
        config["norm_topk_prob"] = shape.renormalized
    if family.startswith("qwen"):
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": list(shape.dense_layers)}
    if family == "glm4_moe":
        config |= {"n_group": shape.expert_groups, "topk_group": shape.groups_per_token}
        config |= {"routed_scaling_factor": shape.router_scale, "partial_rotary_factor": shape.rotary_share}
        config |= {"attention_bias": shape.qkv_bias, "use_qk_norm": bool(shape.qk_norm)}
        config |= {"first_k_dense_replace": len(shape.dense_layers)}
        config["n_shared_experts"] = shape.shared_expert_intermediate_size // shape.expert_intermediate_size
    if family == "gpt_oss":
        kinds = [f"{'full' if shape.attends_to_all(layer) else 'sliding'}_attention" for layer in range(shape.layers)]
        config |= {"attention_bias": shape.qkv_bias, "sliding_window": shape.window, "layer_types": kinds}
    return config | ({"qkv_bias": shape.qkv_bias} if family == "qwen2_moe" else {})
