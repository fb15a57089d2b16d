"""The engine trains a model as plain PyTorch does, wherever the plan stores its tensors."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import examples
from tests.support.matrix import covering
from tests.support.parallel_ranks import build_llama
from workloads.api.contract import Infeasible, OutOfMemory, Rank
from workloads.api.trial import run_trial
from workloads.llama.attention_kernels import KERNELS
from workloads.llama.block import BlockMath
from workloads.llama.experts import Experts
from workloads.llama.fp8_block import FP8_RECIPES
from workloads.llama.model import Block, rope_table
from workloads.models.flops import hardware_flops_per_token
from workloads.models.model import MODELS, Model
from workloads.models.routing import NATURAL, Routing
from workloads.offload import run
from workloads.offload.device_rates import select_attention_kernel
from workloads.offload.engine import Engine
from workloads.offload.host_memory import Arena
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.plan import (
    RECOMPUTED_UNDER,
    SAVED_ACTIVATIONS,
    SAVED_TENSORS,
    ActivationPlan,
    LayerPlan,
    Location,
    Plan,
    SavedActivations,
    count_saved_bytes_per_token,
    list_saved_tensors,
)

CPU = torch.device("cpu")
FP32 = Precision(torch.float32)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPE = replace(MODELS["llama_tiny"], layers=4, hidden_size=64, intermediate_size=128, vocabulary=128)
# Their emulation takes three times as long.
FP8_SHAPES = {"": replace(MODELS["llama_tiny"], layers=3), "experts": MODELS["qwen3_moe_tiny"]}
FP8_CASES = [*(("", recipe) for recipe in FP8_RECIPES), ("experts", "fp8_tensorwise")]
EXPERTS = replace(
    MODELS["qwen3_moe_tiny"], hidden_size=32, head_size=8, vocabulary=SHAPE.vocabulary, expert_intermediate_size=16
)
OLMOE = replace(EXPERTS, kv_heads=4, qk_norm="all", renormalized=False, rope_theta=10_000.0)
# With the usual epsilon of 1e-8 an update depends on little but the sign of a gradient, and the sign of one that is
# almost 0 is rounding.
OPTIMIZER = AdamW(learning_rate=1e-3, epsilon=1e-4)
# The second step starts from the weights and states that the first one wrote.
LENGTH, SEQUENCES, CHUNKS, ROUNDS, STEPS = 16, 2, 3, 2, 2
FP8_LENGTH = 64  # chunks of 128 tokens, which products with scales of blocks need on a GPU
LOCATIONS: list[Location] = ["device", "host"]


def draw_tokens(rounds: int, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (rounds, CHUNKS, SEQUENCES, length + 1)
    return [torch.randint(0, SHAPE.vocabulary, size, generator=generator) for _ in range(STEPS)]


def place(
    weights: Location = "device",
    gradients: Location = "device",
    optimizer_states: Location = "device",
    saved: SavedActivations = "full",
    saved_on: Location = "device",
) -> LayerPlan:
    """Return the plan of a layer that saves every chunk alike."""
    return LayerPlan(weights, gradients, optimizer_states, (ActivationPlan(saved, saved_on),))


def build_plan(
    layers: Sequence[LayerPlan], states: Location, rounds: int, segments: int = 1, keys_values_on: Location = "device"
) -> Plan:
    return Plan(
        tuple(layers),
        embedding_and_head_states=states,
        sequence_length=LENGTH,
        sequences_per_chunk=SEQUENCES,
        chunks_per_round=CHUNKS * segments,
        accumulation_rounds=rounds,
        segments_per_sequence=segments,
        keys_values_on=keys_values_on,
    )


@cache
def train_with_pytorch(
    shape: Model, rounds: int, routing: Routing = NATURAL
) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Train with PyTorch's autograd and AdamW. Return the weights before, the losses and the weights after."""
    model = build_llama(shape)
    for experts in model.modules():
        if isinstance(experts, Experts):
            experts.start(routing, SEQUENCES * LENGTH, CPU)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.learning_rate,
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
        weight_decay=OPTIMIZER.weight_decay,
    )
    rope, losses = rope_table(shape, LENGTH, CPU), []
    for batch in draw_tokens(rounds):
        chunks = batch.flatten(0, 1)
        chunk_losses = [model(chunk[:, :-1], chunk[:, 1:], rope, 1 / len(chunks)) for chunk in chunks]
        for chunk_loss in chunk_losses:
            chunk_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(float(chunk_loss.detach()) for chunk_loss in chunk_losses))
    return before, losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_training(plan: Plan, device_type: str = "cpu", shape: Model = SHAPE, routing: Routing = NATURAL) -> Engine:
    """Train under the plan, compare losses and weights with PyTorch's, and return the engine."""
    before, losses, after = train_with_pytorch(shape, plan.accumulation_rounds, routing)
    device = torch.device(device_type)
    kernel = select_attention_kernel(shape, LENGTH, device, torch.float32)
    with Arena(32 * 2**20, device) as arena:
        engine = Engine(shape, plan, arena, device, kernel, precision=FP32, optimizer=OPTIMIZER, routing=routing)
        engine.load(before.__getitem__)
        engine_losses = [float(engine.step(batch)) for batch in draw_tokens(plan.accumulation_rounds)]
        weights, imbalance = dict(engine.copy_weights()), engine.imbalance
        engine.rehearse(draw_tokens(1)[0][0])
        assert engine.imbalance == imbalance
    assert engine_losses == pytest.approx(losses, abs=1e-5)
    assert weights.keys() == after.keys()
    for name, weight in after.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    return engine


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "layer", covering(LOCATIONS, LOCATIONS, LOCATIONS, SAVED_ACTIVATIONS, LOCATIONS, strength=3, build=place)
)
def test_every_placement_trains_like_plain_pytorch(layer: LayerPlan, device: str) -> None:
    engine = check_training(build_plan([layer] * SHAPE.layers, layer.optimizer_states, ROUNDS), device)
    locations = (layer.weights, layer.gradients, layer.optimizer_states, layer.activations[0].location)
    all_on_device = "host" not in locations
    assert (engine.copy_streams.copied_bytes == 0) == all_on_device


@pytest.mark.parametrize(
    ("name", "imbalance", "location", "saved"),
    covering(["qwen3_moe", "olmoe"], [None, 2.0], LOCATIONS, SAVED_ACTIVATIONS, strength=2),
)
def test_experts_train_like_plain_pytorch(
    name: str, imbalance: float | None, location: Location, saved: SavedActivations
) -> None:
    """Each token has its own experts or forced ones; gradients of the router include those of the weights it gives."""
    shape = {"qwen3_moe": EXPERTS, "olmoe": OLMOE}[name]
    plan = build_plan([place(location, location, location, saved, location)] * shape.layers, location, ROUNDS)
    engine = check_training(plan, shape=shape, routing=Routing(imbalance))
    assert engine.imbalance is not None and (imbalance is None or engine.imbalance == pytest.approx(imbalance, abs=0.1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("segments", "saved", "saved_on", "keys_values_on"),
    covering([2, 4], SAVED_ACTIVATIONS, LOCATIONS, LOCATIONS, strength=2),
)
def test_sequences_in_segments_train_like_whole_ones(
    segments: int, saved: SavedActivations, saved_on: Location, keys_values_on: Location, device: str
) -> None:
    layer = place("host", "host", "device", saved, saved_on)
    check_training(build_plan([layer] * SHAPE.layers, "device", 2, segments, keys_values_on), device)


@examples(6)
@given(st.integers(0, 2**32), st.sampled_from(LOCATIONS), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
def test_any_mixture_of_placements_trains_like_plain_pytorch(
    seed: int, states: Location, rounds: int, segments: int
) -> None:
    draw = random.Random(seed)
    layers = []
    for _ in range(SHAPE.layers):
        weights, gradients, optimizer_states = (draw.choice(LOCATIONS) for _ in range(3))
        activations = tuple(
            ActivationPlan(draw.choice(SAVED_ACTIVATIONS), draw.choice(LOCATIONS)) for _ in range(CHUNKS * segments)
        )
        layers.append(LayerPlan(weights, gradients, optimizer_states, activations))
    check_training(build_plan(layers, states, rounds, segments, draw.choice(LOCATIONS)))


def train_in_fp8(
    kind: str, recipe: str, layer: LayerPlan, device: torch.device, segments: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train in fp8 with all layers placed alike. Return the losses and the weights."""
    shape, routing = FP8_SHAPES[kind], Routing(1.0) if kind else NATURAL
    plan = build_plan([layer] * shape.layers, layer.optimizer_states, ROUNDS, segments)
    kernel = select_attention_kernel(shape, FP8_LENGTH, device, torch.bfloat16)
    options = {"precision": Precision(torch.bfloat16, recipe=recipe), "optimizer": OPTIMIZER, "routing": routing}
    with Arena(32 * 2**20, device) as arena:
        engine = Engine(shape, replace(plan, sequence_length=FP8_LENGTH), arena, device, kernel, **options)
        engine.initialize(0)
        losses = [float(engine.step(batch)) for batch in draw_tokens(ROUNDS, FP8_LENGTH)]
        assert engine.matrix_dtype == engine.describe_types()["type_of_block_products"] == recipe
        return losses, dict(engine.copy_weights())


@cache
def train_in_fp8_in_memory(kind: str, recipe: str, device: torch.device) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train_in_fp8(kind, recipe, place(), device)


FP8_PLACEMENTS = [
    place("host", "host", "host", "full", "host"),
    place("host", "device", "host", "projections", "device"),
    place("device", "host", "device", "attention", "host"),
    place("host", "host", "device", "input", "host"),
    place("device", "device", "host", "gate", "host"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "recipe"), FP8_CASES)
@pytest.mark.parametrize("layer", FP8_PLACEMENTS, ids=lambda layer: layer.activations[0].saved)
def test_placements_in_fp8_train_like_everything_on_the_device(
    layer: LayerPlan, device: str, kind: str, recipe: str
) -> None:
    """Recomputed and moved activations have the same scales, so that losses and weights are the same to the last bit.
    On a GPU, whose attention adds up gradients in any order, weights differ by a few updates of single numbers."""
    losses, weights = train_in_fp8(kind, recipe, layer, torch.device(device))
    expected_losses, expected_weights = train_in_fp8_in_memory(kind, recipe, torch.device(device))
    if device == "cpu":
        assert losses == expected_losses
        assert all(torch.equal(weights[name], weight) for name, weight in expected_weights.items())
        return
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0.01, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("recipe", FP8_RECIPES)
def test_segments_in_fp8_train_nearly_like_whole_sequences(recipe: str) -> None:
    """Each segment has its own scales, so that single numbers round differently."""
    expected_losses, expected_weights = train_in_fp8_in_memory("", recipe, CPU)
    losses, weights = train_in_fp8("", recipe, place("host", "host", "device", "attention", "host"), CPU, segments=2)
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    before = initial_weights(Precision(torch.bfloat16), FP8_SHAPES[""])
    for name, weight in expected_weights.items():
        if weight.dim() > 1:
            way = (weight.float() - before[name].float()).norm()
            assert (weights[name].float() - weight.float()).norm() < 0.3 * way, name


def initial_weights(precision: Precision, shape: Model = SHAPE) -> dict[str, torch.Tensor]:
    with Arena(32 * 2**20, CPU) as arena:
        plan = build_plan([place()] * shape.layers, "device", 1)
        engine = Engine(shape, plan, arena, CPU, KERNELS["cpu"], precision=precision)
        engine.initialize(0)
        return dict(engine.copy_weights())


@pytest.mark.parametrize("location", LOCATIONS)
def test_drawn_master_weights_are_those_that_the_first_gradients_belong_to(location: Location) -> None:
    with Arena(32 * 2**20, CPU) as arena:
        plan = build_plan([place(location, location, location)] * SHAPE.layers, location, 1)
        engine = Engine(SHAPE, plan, arena, CPU, KERNELS["cpu"], precision=Precision(torch.bfloat16, True))
        engine.initialize(0)
        for layer in engine._layers:
            assert torch.equal(layer.optimizer_states[2].tensor.bfloat16(), layer.weights.tensor)
        weights = dict(engine.copy_weights())
    # The weights do not depend on whether there are master weights.
    for name, weight in initial_weights(Precision(torch.bfloat16)).items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("segments", [1, 4])
def test_a_block_in_bf16_is_as_accurate_as_plain_pytorchs(segments: int) -> None:
    """The error of the output and of every gradient against fp64 is at most 1.5 times that of autograd in bf16."""
    exact = differentiate_with_autograd(torch.float64)
    autograd = differentiate_with_autograd(torch.bfloat16)
    block_math = differentiate_with_block_math(segments)
    for name, value in exact.items():
        error, autograd_error = (
            (results[name].double() - value).norm() / value.norm() for results in (block_math, autograd)
        )
        assert error < 1.5 * autograd_error < 0.05, name


def draw_block() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return the weights of a block, an input and the gradient of an output, in bf16."""
    generator = torch.Generator().manual_seed(2)
    weights = {
        name: torch.randn(parameter.shape, generator=generator).mul(0.05).bfloat16()
        for name, parameter in Block(SHAPE).named_parameters()
    }
    x, d_out = (torch.randn(1, 64, SHAPE.hidden_size, generator=generator).bfloat16() for _ in range(2))
    return weights, x, d_out


def differentiate_with_autograd(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the block's output and the gradients of its input and weights."""
    weights, x, d_out = draw_block()
    block = Block(SHAPE).to(dtype)
    block.load_state_dict(weights)
    x = x.to(dtype).requires_grad_()
    out = block(x, rope_table(SHAPE, 64, CPU))
    out.backward(d_out.to(dtype))
    assert x.grad is not None
    gradients = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    return {"out": out.detach(), "x": x.grad} | gradients


def differentiate_with_block_math(segments: int) -> dict[str, torch.Tensor]:
    """Return the same as `differentiate_with_autograd`, computed one segment of the sequence after another."""
    weights, x, d_out = draw_block()
    block_math, length = BlockMath(SHAPE, KERNELS["cpu"], compiled=False), 64 // segments
    ropes = rope_table(SHAPE, 64, CPU).split(length, dim=1)
    kv = torch.zeros(1, 64, 2 * SHAPE.kv_heads, SHAPE.head_size, dtype=torch.bfloat16)
    outs, saved = [], []
    for n, segment in enumerate(x[0].split(length)):
        out, activations = block_math.forward(weights, segment, ropes[n], kv[:, : n * length] if n else None)
        kv[:, n * length : (n + 1) * length] = activations["kv"]
        outs.append(out)
        saved.append(activations)
    gradients = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    d_kv, d_x = torch.zeros_like(kv, dtype=torch.float32), []
    for n in reversed(range(segments)):
        d_keys_values = d_kv[:, n * length : (n + 1) * length], d_kv[:, : n * length]
        earlier = kv[:, : n * length] if n else None
        d_segment = d_out[0].split(length)[n]
        d_x.insert(0, block_math.backward(weights, gradients, saved[n], ropes[n], d_segment, earlier, d_keys_values))
    return {"out": torch.cat(outs)[None], "x": torch.cat(d_x)[None]} | gradients


@pytest.mark.parametrize("segments", [1, 4])
@pytest.mark.parametrize("saved_activations", SAVED_ACTIVATIONS)
def test_saved_activations_have_the_bytes_that_are_planned_for(
    saved_activations: SavedActivations, segments: int
) -> None:
    block_math, length = BlockMath(SHAPE, KERNELS["cpu"], compiled=False), 64 // segments
    weights = {name: torch.zeros(parameter.shape) for name, parameter in Block(SHAPE).named_parameters()}
    x, rope = torch.zeros(length, SHAPE.hidden_size), rope_table(SHAPE, length, CPU)
    _, activations = block_math.forward(weights, x, rope, None)
    names = list_saved_tensors(saved_activations, segments)
    saved_bytes = sum(activations[name].nbytes for name in names)
    assert saved_bytes == length * count_saved_bytes_per_token(SHAPE, saved_activations, 4, segments)
    assert ("kv" in names) == (segments == 1 and "kv" in SAVED_TENSORS[saved_activations])


def test_activations_that_are_not_saved_are_counted_as_recomputed() -> None:
    results = {"qkv": "q", "attention": "attn_out", "output": "residual", "gate": "gate", "up": "up"}
    not_saved_under = {
        op: tuple(choice for choice, names in SAVED_TENSORS.items() if result not in names)
        for op, result in results.items()
    }
    assert not_saved_under == RECOMPUTED_UNDER
    sizes = {name: parameter.numel() for name, parameter in Block(SHAPE).named_parameters() if parameter.dim() > 1}
    forward = 2 * (sum(sizes.values()) - sizes["down.weight"]) + 2 * LENGTH * SHAPE.heads * SHAPE.head_size
    nothing = hardware_flops_per_token(SHAPE, LENGTH, {})
    assert hardware_flops_per_token(SHAPE, LENGTH, dict.fromkeys(RECOMPUTED_UNDER, 3)) - nothing == 3 * forward
    # Two operations for each of half the weights.
    assert hardware_flops_per_token(SHAPE, LENGTH, {"up": 1}) - nothing == sizes["gate_up.weight"]


def test_a_tied_lm_head_and_biased_queries_train_like_plain_pytorch() -> None:
    shape = replace(SHAPE, tied=True, qkv_bias=True, layers=2)
    check_training(build_plan([place("host", "host", "host", "input", "host")] * 2, "host", 2), shape=shape)


@cache
def train_slowly(precision: Precision, location: Location) -> torch.Tensor:
    """Train one layer for 20 steps at a rate below half of a bf16 weight's last bit. Return its largest weight."""
    shape = replace(SHAPE, layers=1)
    plan = build_plan([place(location, location, location)] * shape.layers, location, 1)
    with Arena(32 * 2**20, CPU) as arena:
        optimizer = AdamW(learning_rate=1e-5)
        engine = Engine(shape, plan, arena, CPU, KERNELS["cpu"], precision=precision, optimizer=optimizer)
        engine.load(train_with_pytorch(shape, 1)[0].__getitem__)
        for n in range(20):
            engine.step(draw_tokens(1)[n % STEPS])
        return dict(engine.copy_weights())["blocks.0.gate_up.weight"].float()


@pytest.mark.parametrize("location", LOCATIONS)
def test_master_weights_keep_updates_that_bf16_rounds_away(location: Location) -> None:
    """Measured is the distance to the weights of fp32 training, as a share of the way that those go."""
    before = train_with_pytorch(replace(SHAPE, layers=1), 1)[0]["blocks.0.gate_up.weight"]
    fp32_weights = train_slowly(FP32, "device")
    missed, missed_with_master_weights = (
        float((weights - fp32_weights).norm() / (fp32_weights - before).norm())
        for weights in (
            train_slowly(Precision(torch.bfloat16), "device"),
            train_slowly(Precision(torch.bfloat16, master_weights=True), location),
        )
    )
    assert missed_with_master_weights < 0.4 and missed > 2 * missed_with_master_weights


def test_with_one_round_gradients_take_no_host_memory() -> None:
    """With one round in a step the gradients never leave the device."""
    layers = [place("host", "host", "host", "input")] * SHAPE.layers
    one, two = (check_training(build_plan(layers, "device", rounds)) for rounds in (1, 2))
    weights = train_with_pytorch(SHAPE, 1)[0]
    layer_bytes = 4 * sum(weight.numel() for name, weight in weights.items() if name.startswith("blocks.0."))
    difference = two._arena.used_bytes - one._arena.used_bytes
    assert SHAPE.layers * layer_bytes <= difference < SHAPE.layers * (layer_bytes + 512)


def test_host_memory_past_the_budget_is_out_of_memory() -> None:
    plan = build_plan([place("host", "host", "host", "input")] * SHAPE.layers, "host", ROUNDS)
    with pytest.raises(OutOfMemory, match=r"the host arena of 0.00 GiB is [0-9]+ bytes too small"):
        Engine(SHAPE, plan, Arena(2**20, CPU), CPU, KERNELS["cpu"], precision=FP32)


def test_an_arena_larger_than_the_hosts_memory_is_out_of_memory() -> None:
    with pytest.raises(OutOfMemory, match=r"GiB of host memory, .* are available"):
        Arena(2**50, CPU)


def test_a_model_larger_than_a_cpus_memory_is_infeasible_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "available_memory_bytes", lambda: 8 * 2**30)
    message = r"119.7 GiB, this machine has no GPU and 8.0 GiB available. Use workload=llama_tiny"
    with pytest.raises(Infeasible, match=message):
        run_trial("offload", {"model": "llama3_8b", "dtype": "fp32", "device_gib": 78.0, "host_gib": 75.0}, Rank())


def test_tokens_of_another_shape_than_the_plans_are_refused() -> None:
    engine = check_training(build_plan([place()] * SHAPE.layers, "device", 1))
    with pytest.raises(ValueError, match=r"tokens have shape \(1, 1, 1, 5\), the plan needs \(1, 3, 2, 17\)"):
        engine.step(torch.zeros(1, 1, 1, 5, dtype=torch.long))
