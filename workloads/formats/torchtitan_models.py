"""The models of torchtitan that a configuration selects by name: its tables of flavors at version 0.2.2."""

from __future__ import annotations

from workloads.api.errors import UserInputError
from workloads.models.model import SIZES, Model

# torchtitan 0.2.2: torchtitan/models/llama3/__init__.py and models/qwen3/__init__.py. The MLPs of llama3 are 2/3 of
# four times the width, times `ffn_dim_multiplier`, rounded up to `multiple_of` (models/llama3/model/model.py).
FLAVORS: dict[tuple[str, str], Model] = {
    ("llama3", "debugmodel"): Model(6, 256, 16, 16, 16, 768, 2048),
    ("llama3", "8B"): Model(32, 4096, 32, 8, 128, 14336, 128256),
    ("llama3", "70B"): Model(80, 8192, 64, 8, 128, 28672, 128256),
    ("llama3", "405B"): Model(126, 16384, 128, 8, 128, 53248, 128256),
    ("qwen3", "0.6B"): Model(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    ("qwen3", "1.7B"): Model(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    ("qwen3", "4B"): Model(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    ("qwen3", "8B"): Model(36, 4096, 32, 8, 128, 12288, 151936),
    ("qwen3", "14B"): Model(40, 5120, 40, 8, 128, 17408, 151936),
    ("qwen3", "32B"): Model(64, 5120, 64, 8, 128, 25600, 151936),
    ("qwen3", "30B-A3B"): Model(
        48, 2048, 32, 4, 128, 0, 151936, experts=128, experts_per_token=8, expert_intermediate_size=768
    ),
    ("qwen3", "235B-A22B"): Model(
        94, 4096, 64, 4, 128, 0, 151936, experts=128, experts_per_token=8, expert_intermediate_size=1536
    ),
}
# Folders of the tokenizers, as torchtitan's own configurations name them; `debugmodel` has its test's.
ASSETS = {
    ("llama3", "debugmodel"): "./tests/assets/tokenizer",
    ("llama3", "8B"): "./assets/hf/Llama-3.1-8B",
    ("llama3", "70B"): "./assets/hf/Llama-3.1-70B",
    ("llama3", "405B"): "./assets/hf/Llama-3.1-405B",
}
MASKED_SUFFIXES = ("_flex", "_varlen", "_flex_attn", "_varlen_attn")  # the same sizes; documents are masked


def find_flavor(model: Model) -> tuple[str, str]:
    """Return the name and the flavor of the model with these sizes.

    Raises:
        UserInputError: torchtitan has none; the message names the nearest flavor and in what it differs.
    """
    for names, sizes in FLAVORS.items():
        if sizes == model:
            return names
    nearest = min(FLAVORS, key=lambda names: len(_differences(FLAVORS[names], model)))
    differences = ", ".join(_differences(FLAVORS[nearest], model))
    raise UserInputError(
        f"torchtitan 0.2.2: model has no flavor with these sizes. Nearest: {' '.join(nearest)}, which differs in "
        f"{differences}. Add the flavor to torchtitan's models/{nearest[0]}/__init__.py, or choose another trainer"
    )


def read_flavor(name: str, flavor: str) -> Model | None:
    """Return the model of a flavor; None for one that is not known."""
    for suffix in ("", *MASKED_SUFFIXES):
        if flavor.endswith(suffix) and (name, flavor.removesuffix(suffix)) in FLAVORS:
            return FLAVORS[name, flavor.removesuffix(suffix)]
    return None


def assets_of(name: str, flavor: str) -> str:
    """Return the folder in which torchtitan's download script puts the tokenizer."""
    return ASSETS.get((name, flavor), f"./assets/hf/{name.capitalize()}-{flavor}")


def _differences(flavor: Model, model: Model) -> list[str]:
    pairs = [(name, getattr(flavor, name), getattr(model, name)) for name in SIZES]
    return [f"{name} ({theirs}, not {ours})" for name, theirs, ours in pairs if theirs != ours]
