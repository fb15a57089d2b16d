"""Compare the first training steps of a model in fp8 with those in bf16.

    python benchmarks/fp8_losses.py [--model llama3_8b] [--length 8192] [--steps 12] [--device cuda]

For each of torchao's recipes it prints the cosine similarity of the first step's gradients with those of bf16, then the
loss of each step, first on one sequence that is repeated, then on a new sequence each step. All recipes start from the
same random weights and train on the same tokens with AdamW.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.instruments import device as devices
from workloads.llama.attention import AttentionShape
from workloads.llama.data import synthetic_tokens
from workloads.llama.model import Llama, rope_table
from workloads.llama.pytorch_attention import fused_attention
from workloads.models.model import MODELS
from workloads.precision.layers import FLOAT8_RECIPES, apply_recipe


def build_model(name: str, recipe: str, length: int, device: torch.device) -> Llama:
    torch.compiler.reset()
    devices.release_memory(device)  # compiled blocks are reference cycles: those of the model before are freed only now
    with device:
        model = Llama(MODELS[name]).bfloat16()
    model.initialize(torch.Generator(device).manual_seed(0))
    apply_recipe(model.blocks, recipe, devices.architecture(device), length)
    if device.type != "cpu":
        for block in model.blocks:
            block.compile(dynamic=False)
    return model


def first_gradients(model: Llama, tokens: Tensor, rope: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the embedding, the output layer, and the matrices of the first and the last block."""
    model(tokens[:, :-1], tokens[:, 1:], rope).backward()
    inner = tuple(f"blocks.{n}." for n in range(1, len(model.blocks) - 1))
    named = ((name, p.grad) for name, p in model.named_parameters() if p.dim() > 1 and not name.startswith(inner))
    return {name: gradient for name, gradient in named if gradient is not None}


def train(model: Llama, tokens: Tensor, rope: Tensor, steps: int, *, new_tokens: bool) -> list[float]:
    """Return the loss of each step, on a new sequence each step or always on the first one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        sequence = tokens[step if new_tokens else 0][None]
        loss = model(sequence[:, :-1], sequence[:, 1:], rope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device, shape = torch.device(args.device), MODELS[args.model]
    rope = rope_table(shape, args.length, device)
    tokens = synthetic_tokens(shape.vocabulary, args.steps, args.length + 1, 0).to(device)
    with fused_attention(AttentionShape.of_model(shape, args.length, torch.bfloat16), device):
        expected = first_gradients(build_model(args.model, "bf16", args.length, device), tokens[:1], rope)
        for recipe in FLOAT8_RECIPES:
            actual = first_gradients(build_model(args.model, recipe, args.length, device), tokens[:1], rope)
            cosines = {
                name: float(cosine_similarity(actual[name].float().flatten(), gradient.float().flatten(), dim=0))
                for name, gradient in expected.items()
            }
            print(
                f"{recipe}: cosines with bf16:",
                ", ".join(f"{name} {cosine:.3f}" for name, cosine in cosines.items()),
                flush=True,
            )
        del expected, actual
        for recipe in ("bf16", *FLOAT8_RECIPES):
            for new_tokens in (False, True):
                losses = train(
                    build_model(args.model, recipe, args.length, device),
                    tokens,
                    rope,
                    args.steps,
                    new_tokens=new_tokens,
                )
                print(
                    f"{recipe}, {'new' if new_tokens else 'same'} tokens:",
                    *(f"{loss:.3f}" for loss in losses),
                    flush=True,
                )


if __name__ == "__main__":
    main()
