"""Training steps of a Llama block or a whole model in a recipe."""

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from workloads.api.contract import Measurement, Rank
from workloads.instruments import device as devices
from workloads.instruments.telemetry import monitor_gpu
from workloads.llama.attention import AttentionShape
from workloads.llama.data import synthetic_tokens
from workloads.llama.model import Block, Llama, rope_table
from workloads.llama.pytorch_attention import fused_attention
from workloads.models.flops import model_flops_per_token
from workloads.models.model import MODELS
from workloads.precision import TrainingParameters, formats, layers

# What runs a step and returns the loss, or a number of the gradient for a block; the module that is trained, not
# compiled; and why its speed is not ranked, if its layers are emulated.
_Training = tuple[Callable[[], torch.Tensor], nn.Module, str]


def measure(parameters: TrainingParameters, rank: Rank) -> Measurement:
    """Time the training steps after the first `warmup` ones, which train the model too.

    All that the recipe does not convert is in bf16. The loss is the last step's, on tokens that no earlier step has
    trained on.

    Raises Infeasible if torchao is not installed, or has no such layers for this device or these sizes, or no fused
    attention supports them; ArithmeticError if the loss, or the block's gradient, became NaN.
    """
    formats.require_torchao()
    device = devices.device_of(rank)
    torch.compiler.reset()
    devices.release_memory(device)
    shape, length, is_model = MODELS[parameters.model], parameters.sequence_length, parameters.scope == "model"
    build = _build_model_training if is_model else _build_block_training
    times_s, losses = [], []
    with fused_attention(AttentionShape.of_model(shape, length, torch.bfloat16), device) as kernel:
        step, module, unranked = build(parameters, device)
        with monitor_gpu(device) as watch:
            for number in range(parameters.warmup + parameters.steps):
                if number == parameters.warmup:
                    watch.begin_steps()
                started = time.perf_counter()
                losses.append(float(step()))  # waits for the device
                times_s.append(time.perf_counter() - started)
    if nan_steps := [number for number, loss in enumerate(losses) if math.isnan(loss)]:
        raise ArithmeticError(f"the loss became NaN after {nan_steps[0]} steps")
    trained_layers = (parameters.layers or shape.layers) if is_model else 1
    counted = replace(shape, layers=trained_layers, vocabulary=shape.vocabulary if is_model else 0)
    metrics = watch.metrics()
    if device.type == "cuda":
        metrics["peak_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    if is_model:
        metrics |= {"loss": losses[-1], "first_loss": losses[0]}
    tokens = parameters.batch * length
    return Measurement(
        executed=vars(parameters) | {"steps": len(times_s) - parameters.warmup},
        step_times_s=() if unranked else tuple(times_s[parameters.warmup :]),
        unranked=unranked,
        flops_per_step=model_flops_per_token(counted, length) * tokens,
        tokens_per_step=tokens,
        # Attention and lm_head stay in bf16, so a step has no common peak to compute an MFU from.
        matrix_dtype=parameters.recipe,
        energy=None if unranked else watch.energy(parameters.steps),
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | {"layers": ", ".join(sorted({type(module).__name__ for module in module.modules()}))}
        | ({"attention": f"scaled_dot_product_attention ({kernel})"} if kernel else {}),
    )


def _build_block_training(parameters: TrainingParameters, device: torch.device) -> _Training:
    shape, length = MODELS[parameters.model], parameters.sequence_length
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    rope = rope_table(shape, length, device)
    with device:
        block = Block(shape).bfloat16()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    size = (parameters.batch, length, shape.hidden_size)
    architecture, tokens = devices.architecture(device), parameters.batch * length
    module, unranked = layers.apply_recipe(block, parameters.recipe, architecture, tokens)
    compiled = torch.compile(module, dynamic=False) if device.type != "cpu" else module
    x = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    d_out = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)

    def step() -> torch.Tensor:
        x.grad = None
        module.zero_grad(set_to_none=True)
        out = compiled(x, rope)
        out.backward(d_out)
        assert x.grad is not None
        return x.grad.flatten()[0]

    return step, module, unranked


def _build_model_training(parameters: TrainingParameters, device: torch.device) -> _Training:
    shape, length = MODELS[parameters.model], parameters.sequence_length
    rope = rope_table(shape, length, device)
    with device:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Llama(shape, layers=parameters.layers)
        finally:
            torch.set_default_dtype(torch.float32)
    model.initialize(torch.Generator(device=device).manual_seed(parameters.seed))
    architecture, tokens = devices.architecture(device), parameters.batch * length
    _, unranked = layers.apply_recipe(model.blocks, parameters.recipe, architecture, tokens)
    if device.type != "cpu":
        for block in model.blocks:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=parameters.learning_rate, fused=device.type != "cpu")
    count = (parameters.warmup + parameters.steps) * parameters.batch
    sequences = synthetic_tokens(model.shape.vocabulary, count, length + 1, parameters.seed)
    batches = iter(sequences.to(device).split(parameters.batch))

    def step() -> torch.Tensor:
        batch = next(batches)
        loss = model(batch[:, :-1], batch[:, 1:], rope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model, unranked
