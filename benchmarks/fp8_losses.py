"""How far a model in fp8 is from the same in bf16 in its first steps of training.

    python benchmarks/fp8_losses.py [--model llama3_8b] [--length 8192] [--steps 12] [--device cuda]

For each recipe of torchao's: the cosine of the first step's gradients with those of bf16, then the loss of each step on
one sequence seen over and over, and on a new one each step. Random weights, AdamW, the same weights and tokens for all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads import device as devices
from workloads.llama.data import synthetic_tokens
from workloads.llama.model import Llama, fastest_attention, rope_table
from workloads.llama.shapes import MODELS
from workloads.precision.layers import FLOAT8, with_recipe


def made(name: str, recipe: str, length: int, device: torch.device) -> Llama:
    torch.compiler.reset()
    devices.fresh(device)  # compiled blocks are cycles: what was before them goes only now
    with device:
        model = Llama(MODELS[name]).bfloat16()
    model.initialize(torch.Generator(device).manual_seed(0))
    with_recipe(model.blocks, recipe, devices.architecture(device), length)
    if device.type != "cpu":
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def gradients(model: Llama, tokens: Tensor, rope: Tensor) -> dict[str, Tensor]:
    """Of the embedding, the head, and the first and the last block's matrices."""
    model(tokens[:, :-1], tokens[:, 1:], rope).backward()
    inner = tuple(f"blocks.{n}." for n in range(1, len(model.blocks) - 1))
    named = ((name, p.grad) for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith(inner))
    return {name: gradient for name, gradient in named if gradient is not None}


def losses(model: Llama, tokens: Tensor, rope: Tensor, steps: int, *, new: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seen = []
    for step in range(steps):
        sequence = tokens[step if new else 0][None]
        loss = model(sequence[:, :-1], sequence[:, 1:], rope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append(float(loss.detach()))
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    said = parser.parse_args()
    device, shape = torch.device(said.device), MODELS[said.model]
    rope = rope_table(shape, said.length, device)
    tokens = synthetic_tokens(shape.vocabulary, said.steps, said.length + 1, 0).to(device)
    with fastest_attention(device):
        truth = gradients(made(said.model, "bf16", said.length, device), tokens[:1], rope)
        for recipe in FLOAT8:
            found = gradients(made(said.model, recipe, said.length, device), tokens[:1], rope)
            alike = {n: cosine_similarity(found[n].float().flatten(), truth[n].float().flatten(), dim=0) for n in truth}
            print(
                f"{recipe}: cosines with bf16:", ", ".join(f"{n} {float(c):.3f}" for n, c in alike.items()), flush=True
            )
        del truth, found
        for recipe in ("bf16", *FLOAT8):
            for new in (False, True):
                seen = losses(made(said.model, recipe, said.length, device), tokens, rope, said.steps, new=new)
                print(f"{recipe}, {'new' if new else 'same'} tokens:", *(f"{loss:.3f}" for loss in seen), flush=True)


if __name__ == "__main__":
    main()
