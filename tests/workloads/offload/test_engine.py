"""Training whose parts come and go computes what plain PyTorch computes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workloads.api.contract import Infeasible, OutOfMemory, Rank
from workloads.api.trial import run_trial
from workloads.llama.attention import KERNELS
from workloads.llama.block import BlockMath
from workloads.llama.flops import hardware_flops_per_token
from workloads.llama.model import Block, Llama, rope_table
from workloads.llama.shapes import MODELS, LlamaShape
from workloads.offload import run
from workloads.offload.device_rates import kernel_of
from workloads.offload.engine import Engine
from workloads.offload.memory import Arena
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import AGAIN, KEPT, Keeps, LayerPlan, Plan, kept_bytes, kept_names

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = replace(MODELS["llama_tiny"], layers=5)
# With the usual epsilon a gradient's sign is nearly all that counts, and one that is almost 0 tells nothing.
OPTIMIZER = AdamW(learning_rate=1e-3, epsilon=1e-4)
LENGTH, SEQUENCES, CHUNKS, ROUNDS, STEPS = 16, 2, 3, 2, 3
PLACES = ["device", "host"]
KEEPS = ["full", "gate", "projections", "attention", "input"]


def tokens(rounds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (rounds, CHUNKS, SEQUENCES, LENGTH + 1)
    return [torch.randint(0, SHAPE.vocabulary, size, generator=generator) for _ in range(STEPS)]


@cache
def plain(shape: LlamaShape, rounds: int) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """What PyTorch's autograd and AdamW make of it: weights before, losses, weights after."""
    model = Llama(shape)
    model.initialize(torch.Generator().manual_seed(0))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )
    rope, losses = rope_table(shape, LENGTH, CPU), []
    for batch in tokens(rounds):
        chunks = batch.flatten(0, 1)
        parts = [model(chunk[:, :-1], chunk[:, 1:], rope) / len(chunks) for chunk in chunks]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(part.detach()) for part in parts))
    return before, losses, {name: p.detach() for name, p in model.named_parameters()}


def check(
    layers: Sequence[LayerPlan], ends: str, rounds: int, device: str = "cpu", shape: LlamaShape = SHAPE, pieces: int = 1
) -> Engine:
    before, losses, after = plain(shape, rounds)
    plan = Plan(tuple(layers), ends, LENGTH, SEQUENCES, CHUNKS * pieces, rounds, pieces)  # type: ignore[arg-type]
    where = torch.device(device)
    kernel = kernel_of(shape, LENGTH, where, torch.float32)
    with Arena(64 * 2**20, where) as arena:
        engine = Engine(shape, plan, arena, where, kernel, dtype=torch.float32, optimizer=OPTIMIZER)
        engine.load(before.__getitem__)
        found = [float(engine.step(batch)) for batch in tokens(rounds)]
        weights = engine.weights()
    assert found == pytest.approx(losses, abs=1e-5)
    assert weights.keys() == after.keys()
    for name, weight in after.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    return engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layer", [LayerPlan(*k) for k in product(PLACES, PLACES, PLACES, KEEPS, PLACES)])  # type: ignore[arg-type]
def test_every_placement_trains_like_plain_pytorch(layer: LayerPlan, device: str) -> None:
    engine = check([layer] * SHAPE.layers, layer.states, ROUNDS, device)
    stays = "host" not in (layer.weights, layer.gradients, layer.states, layer.kept_on)
    assert (engine.queues.copied_bytes == 0) == stays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kept_on", PLACES)
@pytest.mark.parametrize("keeps", KEEPS)
@pytest.mark.parametrize("pieces", [2, 4])
def test_sequences_in_pieces_train_like_whole_ones(pieces: int, keeps: str, kept_on: str, device: str) -> None:
    check([LayerPlan("host", "host", "device", keeps, kept_on)] * SHAPE.layers, "device", 2, device, pieces=pieces)  # type: ignore[arg-type]


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(PLACES), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_any_mixture_of_placements_trains_like_plain_pytorch(seed: int, ends: str, rounds: int, pieces: int) -> None:
    draw = random.Random(seed)
    layers = [
        LayerPlan(*(draw.choice(PLACES) for _ in range(3)), draw.choice(KEEPS), draw.choice(PLACES))  # type: ignore[call-arg]
        for _ in range(SHAPE.layers)
    ]
    check(layers, ends, rounds, pieces=pieces)


@pytest.mark.parametrize("pieces", [1, 4])
def test_one_block_in_bf16_is_as_near_to_the_truth_as_plain_pytorchs(pieces: int) -> None:
    """Output and every gradient, against the same in fp64: rounding, and no more of it than autograd has."""
    truth, plain16, ours = (block_gradients(kind, pieces) for kind in ("fp64", "bf16", "ours"))
    for name, exact in truth.items():
        error, allowed = ((found[name].double() - exact).norm() / exact.norm() for found in (ours, plain16))
        assert error < 1.5 * allowed < 0.05, name


def block_gradients(kind: str, pieces: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    block = Block(SHAPE)
    weights = {
        name: torch.randn(p.shape, generator=generator).mul(0.05).bfloat16() for name, p in block.named_parameters()
    }
    x, d_out = (torch.randn(1, 64, SHAPE.hidden_size, generator=generator).bfloat16() for _ in "xd")
    rope = rope_table(SHAPE, 64, CPU)
    if kind != "ours":
        dtype = torch.float64 if kind == "fp64" else torch.bfloat16
        block = block.to(dtype)
        block.load_state_dict(weights)
        x = x.to(dtype).requires_grad_()
        out = block(x, rope)
        out.backward(d_out.to(dtype))
        assert x.grad is not None
        return {"out": out.detach(), "x": x.grad} | {
            n: p.grad for n, p in block.named_parameters() if p.grad is not None
        }
    maths, length = BlockMath(SHAPE, KERNELS["cpu"], compiled=False), 64 // pieces
    gradients = {name: torch.zeros_like(w) for name, w in weights.items()}
    ropes, outs, made = rope.split(length, dim=1), [], []
    kv = torch.zeros(1, 64, 2 * SHAPE.kv_heads, SHAPE.head_size, dtype=torch.bfloat16)
    for n, piece in enumerate(x[0].split(length)):
        out, found = maths.forward(weights, piece, ropes[n], kv[:, : n * length] if n else None)
        kv[:, n * length : (n + 1) * length] = found["kv"]
        outs.append(out)
        made.append(found)
    d_kv, d_x = torch.zeros_like(kv, dtype=torch.float32), []
    for n in reversed(range(pieces)):
        mine, d_piece = slice(n * length, (n + 1) * length), d_out[0].split(length)[n]
        d_keys_values = (d_kv[:, mine], d_kv[:, : n * length])
        earlier = kv[:, : n * length] if n else None
        d_x.insert(0, maths.backward(weights, gradients, made[n], ropes[n], d_piece, earlier, d_keys_values))
    return {"out": torch.cat(outs)[None], "x": torch.cat(d_x)[None]} | gradients


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("keeps", KEEPS)
def test_what_a_layer_keeps_has_the_bytes_that_are_planned_for(keeps: Keeps, pieces: int) -> None:
    maths, length = BlockMath(SHAPE, KERNELS["cpu"], compiled=False), 64 // pieces
    weights = {name: torch.zeros(p.shape) for name, p in Block(SHAPE).named_parameters()}
    _, made = maths.forward(weights, torch.zeros(length, SHAPE.hidden_size), rope_table(SHAPE, length, CPU), None)
    kept = sum(made[name].nbytes for name in kept_names(keeps, pieces))
    assert kept == length * kept_bytes(SHAPE, keeps, 4, pieces)
    assert ("kv" in kept_names(keeps, pieces)) == (pieces == 1 and "kv" in KEPT[keeps])


def test_what_is_not_kept_is_counted_as_computed_again() -> None:
    makes = {"qkv": "q", "attention": "attn_out", "output": "residual", "gate": "gate", "up": "up"}
    assert {layer: tuple(k for k, names in KEPT.items() if made not in names) for layer, made in makes.items()} == AGAIN
    sizes = {name: p.numel() for name, p in Block(SHAPE).named_parameters() if p.dim() > 1}
    forward = 2 * (sum(sizes.values()) - sizes["down.weight"]) + 2 * LENGTH * SHAPE.heads * SHAPE.head_size
    twice = hardware_flops_per_token(SHAPE, LENGTH, dict.fromkeys(AGAIN, 3)) - hardware_flops_per_token(
        SHAPE, LENGTH, {}
    )
    assert twice == 3 * forward
    half = hardware_flops_per_token(SHAPE, LENGTH, {"up": 1}) - hardware_flops_per_token(SHAPE, LENGTH, {})
    assert half == sizes["gate_up.weight"]  # two operations for each of half the weights


def test_a_tied_head_and_biased_queries_train_too() -> None:
    shape = replace(SHAPE, tied=True, qkv_bias=True, layers=2)
    check([LayerPlan("host", "host", "host", "input", "host")] * 2, "host", 2, shape=shape)


@pytest.mark.parametrize("place", PLACES)
def test_weights_in_fp32_keep_what_bf16_swallows(place: str) -> None:
    """Twenty steps at a rate below half of a weight's last bit: how much of the way that fp32 weights go is missed."""
    before = plain(SHAPE, 1)[0]
    layers = [LayerPlan(place, place, place)] * SHAPE.layers  # type: ignore[arg-type]

    def trained(dtype: torch.dtype, *, master_weights: bool = False) -> torch.Tensor:
        with Arena(64 * 2**20, CPU) as arena:
            engine = Engine(
                *(SHAPE, Plan(tuple(layers), place, LENGTH, SEQUENCES, CHUNKS, 1), arena, CPU, KERNELS["cpu"]),  # type: ignore[arg-type]
                dtype=dtype,
                master_weights=master_weights,
                optimizer=AdamW(learning_rate=1e-5),
            )
            engine.load(before.__getitem__)
            for n in range(20):
                engine.step(tokens(1)[n % STEPS])
            return engine.weights()["blocks.0.gate_up.weight"].float()

    start, exact = before["blocks.0.gate_up.weight"], trained(torch.float32)
    way = (exact - start).norm()
    missed = {
        kept: float((trained(torch.bfloat16, master_weights=kept) - exact).norm() / way) for kept in (False, True)
    }
    assert missed[True] < 0.4 and missed[False] > 2 * missed[True]


def test_a_layer_that_waits_for_no_other_round_needs_no_room_for_its_gradients() -> None:
    """With one round a step the gradients never leave the device, and nothing of them is kept on the host."""
    streamed = [LayerPlan("host", "host", "host", "input")] * SHAPE.layers
    one, two = check(streamed, "device", 1), check(streamed, "device", 2)
    layer_bytes = 4 * sum(p.numel() for name, p in plain(SHAPE, 1)[0].items() if name.startswith("blocks.0."))
    spared = two._arena.used - one._arena.used
    assert SHAPE.layers * layer_bytes <= spared < SHAPE.layers * (layer_bytes + 512)


def test_host_memory_past_the_budget_is_out_of_memory() -> None:
    plan = Plan((LayerPlan("host", "host", "host", "input"),) * SHAPE.layers, "host", LENGTH, SEQUENCES, CHUNKS, ROUNDS)
    with pytest.raises(OutOfMemory, match="the host's arena"):
        Engine(SHAPE, plan, Arena(2**20, CPU), CPU, KERNELS["cpu"], dtype=torch.float32)


def test_an_arena_that_the_machine_does_not_have_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"GiB, .* are available"):
        Arena(2**50, CPU)


def test_a_model_that_no_cpu_trains_is_infeasible_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_memory_bytes", lambda: 8 * 2**30)
    with pytest.raises(Infeasible, match=r"119.7 GiB, this machine has 8.0 left, and no GPU: workload=llama_tiny"):
        run_trial("offload", {"model": "llama3_8b", "dtype": "fp32", "device_gib": 78.0, "host_gib": 75.0}, Rank())


def test_tokens_of_another_shape_than_the_plans_are_refused() -> None:
    engine = check([LayerPlan()] * SHAPE.layers, "device", 1)
    with pytest.raises(ValueError, match="the plan has"):
        engine.step(torch.zeros(1, 1, 1, 5, dtype=torch.long))
