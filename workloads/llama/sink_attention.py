"""Causal attention with a sink for each head and optional windows, as in gpt-oss (arXiv 2508.10925).

A sink is a score without a token: it takes part in the softmax, and its share of the weights is dropped. Attention with
sinks follows from attention without them and its logsumexp. Backward kernels use the logsumexp that includes the sink.
"""

import math
from typing import Any

import torch
from torch import Tensor

from workloads.api.contract import Infeasible

Results = tuple[Tensor, Tensor]


def find_sink_kernel(device: torch.device) -> str:
    """Return the name of the kernel for attention with sinks on a device. Raises Infeasible if there is none."""
    if device.type == "cpu":
        return "reference"
    try:
        import flash_attn.cute.interface  # noqa: F401
    except (ImportError, OSError) as error:
        raise Infeasible(
            "attention with sinks is FlashAttention 4's, for NVIDIA's GPUs from Hopper on: pip install "
            f"'gpu-sweeper[flash4]' ({str(error).splitlines()[0]})"
        ) from error
    return "flash4"


# This is a single operation because the compiler cannot trace the kernel and selective checkpointing saves its results.
@torch.library.custom_op("gpu_sweeper::attend_with_sinks", mutates_args=())
def attend_with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Results:
    """Return the output, [batch, heads, length, head_size] like q, and the logsumexp of scores and sinks[heads].

    k and v may have fewer heads. A token attends to itself and the `window` - 1 tokens before it; a `window` of 0 means
    all earlier tokens. On a GPU, FlashAttention 4 runs; on a CPU, a reference that holds all scores in memory.
    """
    if q.is_cuda:
        from flash_attn.cute.interface import _flash_attn_fwd

        by_tokens = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out, lse, *_ = _flash_attn_fwd(*by_tokens, **_flash4_mask(window), return_lse=True)
        out = out.transpose(1, 2)
    else:
        scores, lse = _scores(q, k, window)
        out = (scores - lse[..., None]).exp() @ _repeat(v, q)
    total = torch.logaddexp(lse, sinks.float()[:, None])
    return (out * (lse - total).exp()[..., None]).to(q.dtype).contiguous(), total


@torch.library.custom_op("gpu_sweeper::attend_with_sinks_backward", mutates_args=())
def _attend_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lost = (d_out.float() * out.float()).sum(-1)  # subtracted from the gradient of every score
    d_sinks = -((sinks.float()[:, None] - lse).exp() * lost).sum((0, 2)).to(sinks.dtype)
    if q.is_cuda:
        from flash_attn.cute.interface import _flash_attn_bwd

        by_tokens = (tensor.transpose(1, 2) for tensor in (q, k, v, out, d_out))
        gradients = _flash_attn_bwd(*by_tokens, lse, **_flash4_mask(window))[:3]
        dq, dk, dv = (gradient.transpose(1, 2).contiguous() for gradient in gradients)
        return dq, dk, dv, d_sinks
    weights = (_scores(q, k, window)[0] - lse[..., None]).exp()
    d_scores = weights * (d_out.float() @ _repeat(v, q).mT - lost[..., None]) * q.shape[-1] ** -0.5
    groups = (k.shape[1], q.shape[1] // k.shape[1])
    dk, dv = d_scores.mT @ q.float(), weights.mT @ d_out.float()
    d_keys, d_values = (x.unflatten(1, groups).sum(2).to(q.dtype) for x in (dk, dv))
    return (d_scores @ _repeat(k, q)).to(q.dtype), d_keys, d_values, d_sinks


def _flash4_mask(window: int) -> dict[str, Any]:
    return {"causal": True} | ({"window_size_left": window - 1, "window_size_right": 0} if window else {})


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def _scores(q: Tensor, k: Tensor, window: int) -> Results:
    """Return the scores in fp32, and their logsumexp."""
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    is_masked = (distance < 0) | (distance >= (window or len(at)))
    scores = (q.float() @ _repeat(k, q).mT * q.shape[-1] ** -0.5).masked_fill(is_masked, -math.inf)
    return scores, scores.logsumexp(-1)


@attend_with_sinks.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int) -> Results:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@_attend_backward.register_fake
def _(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, out: Tensor, lse: Tensor, window: int
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, sinks))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    *tensors, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_out: Tensor, _: Any) -> tuple[Any, ...]:
    return *_attend_backward(d_out.contiguous(), *ctx.saved_tensors, ctx.window), None


attend_with_sinks.register_autograd(_backward, setup_context=_save_for_backward)
ATTEND_WITH_SINKS = torch.ops.gpu_sweeper.attend_with_sinks.default
