"""End to end: steps of training a Llama block, or a whole model, in a recipe."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from workloads import device as devices
from workloads.api.contract import Measurement, Rank
from workloads.llama.data import synthetic_tokens
from workloads.llama.flops import model_flops_per_token
from workloads.llama.model import Block, Llama, fastest_attention, rope_table
from workloads.llama.shapes import MODELS
from workloads.precision import TrainingParameters, formats, layers
from workloads.telemetry import watching


def measure(parameters: TrainingParameters, rank: Rank) -> Measurement:
    """Time every step; the first `warmup` do not count as times, and do count as training.

    Everything is bf16 but what the recipe says. The loss is that of the last step, on tokens that no step saw before.
    """
    formats.require_torchao()
    device = devices.of(rank)
    architecture = devices.architecture(device)
    torch.compiler.reset()
    devices.fresh(device)
    shape = MODELS[parameters.model]
    generator = torch.Generator(device=device).manual_seed(parameters.seed)
    tokens = parameters.batch * parameters.sequence_length
    rope = rope_table(shape, parameters.sequence_length, device)
    make = _block_step if parameters.scope == "block" else _model_step
    with fastest_attention(device):
        step, module, emulated = make(parameters, device, generator, architecture, rope, tokens)
        times_s, losses = [], []
        with watching(device) as watch:
            for _ in range(parameters.warmup + parameters.steps):
                started = time.perf_counter()
                losses.append(float(step()))  # waits for the device
                times_s.append(time.perf_counter() - started)
    if not all(loss == loss for loss in losses):
        raise ArithmeticError(f"the loss became NaN after {next(n for n, x in enumerate(losses) if x != x)} steps")
    count = 1 if parameters.scope == "block" else parameters.layers or shape.layers
    flops = model_flops_per_token(shape, parameters.sequence_length, layers=count, lm_head=parameters.scope == "model")
    metrics = watch.metrics() | {"peak_memory_gib": _peak_memory_gib(device)}
    if parameters.scope == "model":
        metrics |= {"loss": losses[-1], "first_loss": losses[0]}
    return Measurement(
        executed={name: getattr(parameters, name) for name in parameters.__dataclass_fields__}
        | {"steps": len(times_s) - parameters.warmup},
        step_times_s=() if emulated else tuple(times_s[parameters.warmup :]),
        unranked=emulated,
        flops_per_step=flops * tokens,
        tokens_per_step=tokens,
        # The head and the attention stay in bf16: of fp8's peak a mixed step has no share that means anything.
        matrix_dtype=parameters.recipe,
        metrics=metrics,
        machine_info=devices.machine_info(device)
        | {"layers": ", ".join(sorted({type(m).__name__ for m in module.modules()}))},
    )


Made = tuple[Callable[[], torch.Tensor], nn.Module, str]


def _block_step(
    parameters: TrainingParameters,
    device: torch.device,
    generator: torch.Generator,
    architecture: str,
    rope: torch.Tensor,
    tokens: int,
) -> Made:
    """One block, forward and backward."""
    shape = MODELS[parameters.model]
    with device:
        block = Block(shape).bfloat16()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02, generator=generator)
    module, emulated = layers.with_recipe(block, parameters.recipe, architecture, tokens)
    compiled = torch.compile(module, dynamic=False) if device.type != "cpu" else module
    size = (parameters.batch, parameters.sequence_length, shape.hidden_size)
    x = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()
    d_out = torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator)

    def step() -> torch.Tensor:
        x.grad = None
        module.zero_grad(set_to_none=True)
        out = compiled(x, rope)
        out.backward(d_out)
        assert x.grad is not None
        return x.grad.flatten()[0]

    return step, module, emulated


def _model_step(
    parameters: TrainingParameters,
    device: torch.device,
    generator: torch.Generator,
    architecture: str,
    rope: torch.Tensor,
    tokens: int,
) -> Made:
    """The whole model with AdamW, every block compiled by itself."""
    with device:
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Llama(MODELS[parameters.model], layers=parameters.layers)
        finally:
            torch.set_default_dtype(torch.float32)
    model.initialize(generator)
    _, emulated = layers.with_recipe(model.blocks, parameters.recipe, architecture, tokens)
    if device.type != "cpu":
        for block in model.blocks:
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=parameters.learning_rate, fused=device.type != "cpu")
    steps = parameters.warmup + parameters.steps
    text = synthetic_tokens(
        model.shape.vocabulary, steps * parameters.batch, parameters.sequence_length + 1, parameters.seed
    )
    batches = iter(text.to(device).split(parameters.batch))

    def step() -> torch.Tensor:
        batch = next(batches)
        loss = model(batch[:, :-1], batch[:, 1:], rope)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, model, emulated


def _peak_memory_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
