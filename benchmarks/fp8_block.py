"""Time one block with its GEMMs and casts in bf16 and in fp8 on a GPU, and compare the gradients.

    python benchmarks/fp8_block.py [--model llama3_8b] [--tokens 16384] [--repeats 9]

Input and weights are random normal; a chunk has sequences of 8192 tokens. After 3 s of load, cases are interleaved, and
times are medians. The rate of a cast counts inputs and outputs once, even if they are read twice.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

sys.path.insert(0, str(Path(__file__).parents[1]))
from workloads.instruments.timing import time_in_turns
from workloads.llama.fp8_block import FP8_RECIPES, GRANULARITIES, build_block_math
from workloads.llama.fp8_launch import TritonCasts
from workloads.llama.fp8_quantize import multiply
from workloads.llama.model import Block, rope_table
from workloads.models.model import MODELS, Model, ModelName
from workloads.offload.device_rates import select_attention_kernel

LENGTH = 8192
LOAD_S = 3.0
CASTS = {recipe: TritonCasts(granularity) for recipe, granularity in GRANULARITIES.items()}
Calls = dict[str, Callable[[], Any]]


def draw(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def build_passes(shape: Model, tokens: int) -> tuple[Calls, dict[str, dict[str, Tensor]]]:
    """Return the forward and backward pass for each recipe, and the block's output and gradients by recipe."""
    device = torch.device("cuda", 0)
    kernel = select_attention_kernel(shape, LENGTH, device, torch.bfloat16)
    with torch.device("meta"):
        sizes = {name: parameter.shape for name, parameter in Block(shape).named_parameters()}
    weights = {name: draw(*size).mul_(0.02).add_(len(size) == 1) for name, size in sizes.items()}
    x, d_out, rope = draw(tokens, shape.hidden_size), draw(tokens, shape.hidden_size), rope_table(shape, LENGTH, device)
    calls, results = Calls(), dict[str, dict[str, Tensor]]()
    for recipe in ("", *FP8_RECIPES):
        block = build_block_math(shape, kernel, recipe, compiled=True)
        operands = block.cast_weights(weights)
        out, activations = block.forward(operands, x, rope, None)
        gradients: dict[str, Tensor] = {}
        results[recipe] = gradients | {"out": out}
        results[recipe]["x"] = block.backward(operands, gradients, dict(activations), rope, d_out)
        results[recipe] |= {name: gradient.clone() for name, gradient in gradients.items()}
        calls[f"{recipe or 'bf16'}: forward"] = lambda b=block, o=operands: b.forward(o, x, rope, None)
        calls[f"{recipe or 'bf16'}: backward"] = lambda b=block, o=operands, g=gradients, a=activations: b.backward(
            o, g, dict(a), rope, d_out
        )
        if recipe:
            calls[f"{recipe}: cast of the weights for one pass"] = lambda b=block: b.cast_weights(
                weights, backward=False
            )
    return calls, results


def build_products(shape: Model, tokens: int) -> Calls:
    """Return the twelve GEMMs of a block in each recipe, each as one call."""
    features = {
        "qkv": ((shape.heads + 2 * shape.kv_heads) * shape.head_size, shape.hidden_size),
        "output": (shape.hidden_size, shape.heads * shape.head_size),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }
    calls = Calls()
    for outputs, inputs in features.values():
        weight, x, d = draw(outputs, inputs), draw(tokens, inputs), draw(tokens, outputs)
        for recipe, casts in CASTS.items():
            rows, columns = casts.cast_weight(weight, rows=True, columns=True)
            (x_rows, x_columns), (d_rows, d_columns) = (casts.cast(y, rows=True, columns=True) for y in (x, d))
            pairs = {"forward": (x_rows, rows), "input gradient": (d_rows, columns)}
            pairs["weight gradient"] = (d_columns, x_columns)
            for name, pair in pairs.items():
                call = partial(multiply, *pair, fast=name == "forward")
                _append(calls, f"{recipe}: products, {name}", call)
        for name, pair in {
            "forward": (x, weight.t()),
            "input gradient": (d, weight),
            "weight gradient": (d.t(), x),
        }.items():
            _append(calls, f"bf16: products, {name}", lambda p=pair: torch.mm(*p))
    return calls


def _append(calls: Calls, name: str, call: Callable[[], Any]) -> None:
    """Append a call to the calls of the same name."""
    earlier = calls.get(name)

    def run_both() -> None:
        if earlier:
            earlier()
        call()

    calls[name] = run_both


def build_casts(shape: Model, tokens: int) -> tuple[Calls, dict[str, int]]:
    """Return every cast of each recipe, and the bytes of the cast's inputs and outputs."""
    x, addend, d_out, later = (draw(tokens, shape.hidden_size) for _ in range(4))
    gate, up, d_hidden = (draw(tokens, shape.intermediate_size) for _ in range(3))
    weight, eps = draw(shape.hidden_size), shape.norm_eps
    calls, moved_bytes = Calls(), {}
    for recipe, casts in CASTS.items():
        scale = casts.norm_scale(weight)
        norm = (weight, eps, scale)
        named: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
            "cast_rows": (partial(casts.cast, rows=True), (gate,)),
            "cast_columns": (partial(casts.cast, columns=True), (gate,)),
            "cast_both": (partial(casts.cast, rows=True, columns=True), (gate,)),
            "norm_rows": (lambda *values, c=casts: c.add_and_norm(*values)[1], (x, None, *norm)),
            "add_and_norm_rows": (casts.add_and_norm, (x, addend, *norm)),
            "norm_backward": (casts.norm_backward, (x, weight, d_out, later, eps, scale)),
            "swiglu_rows": (casts.swiglu, (gate, up)),
            "swiglu_backward": (casts.swiglu_backward, (gate, up, d_hidden)),
        }
        for name, (cast, values) in named.items():
            calls[f"{recipe}: {name}"] = partial(cast, *values)
            moved_bytes[f"{recipe}: {name}"] = _count_bytes(values) + _count_bytes(cast(*values))
    calls["copy"] = gate.clone
    return calls, moved_bytes | {"copy": 2 * gate.nbytes}


def _count_bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.nbytes
    return sum(_count_bytes(value) for value in values) if isinstance(values, (tuple, list)) else 0


def measure_medians_s(calls: Calls, repeats: int) -> dict[str, float]:
    device, started = torch.device("cuda", 0), time.perf_counter()
    while time.perf_counter() - started < LOAD_S:
        for call in calls.values():
            call()
        torch.cuda.synchronize()
    times_s = time_in_turns(list(calls.values()), device, warmup=1, repeats=repeats, cold_cache=False)
    return {name: statistics.median(readings) for name, readings in zip(calls, times_s, strict=True)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", choices=get_args(ModelName))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    shape = MODELS[args.model]
    torch.manual_seed(0)
    print(
        f"# One block of {args.model}, {args.tokens} tokens: {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    calls, results = build_passes(shape, args.tokens)
    for name, seconds in measure_medians_s(calls, args.repeats).items():
        print(f"{name}: {seconds * 1e3:.2f} ms")
    for recipe in FP8_RECIPES:
        cosines = {
            name: float(cosine_similarity(value.float().flatten(), results[""][name].float().flatten(), dim=0))
            for name, value in results[recipe].items()
        }
        print(f"{recipe}: cosines with bf16:", ", ".join(f"{name} {cosine:.4f}" for name, cosine in cosines.items()))
    del calls, results
    for name, seconds in measure_medians_s(build_products(shape, args.tokens), args.repeats).items():
        print(f"{name}: {seconds * 1e3:.2f} ms")
    calls, moved_bytes = build_casts(shape, args.tokens)
    for name, seconds in measure_medians_s(calls, args.repeats).items():
        print(f"{name}: {seconds * 1e6:.0f} us, {moved_bytes[name] / seconds / 1e9:,.0f} GB/s")


if __name__ == "__main__":
    main()
