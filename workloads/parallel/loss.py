"""The next-token loss where the head's rows are divided over ranks, in chunks, so that the full logits never exist."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.estimator.own_memory import LOSS_CHUNK_TOKENS


def vocab_parallel_loss(hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean cross entropy, the same on all ranks.

    hidden: [tokens, hidden_size], the same on all ranks; its gradient is this rank's part of a sum
    weight: [rows, hidden_size], this rank's rows of the head
    """
    loss: Tensor = _VocabParallelLoss.apply(hidden, weight, targets, group)
    return loss


class _VocabParallelLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, as `workloads.llama.model.loss_and_gradients` does."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ranks, first_row = dist.get_world_size(group), dist.get_rank(group) * len(weight)
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        chunks = (tensor.split(LOSS_CHUNK_TOKENS) for tensor in (hidden, targets, d_hidden))
        for h, t, d_h in zip(*chunks, strict=True):
            logits = (h @ weight.t()).float()
            log_sums = [torch.empty(len(h), device=h.device) for _ in range(ranks)]
            dist.all_gather(log_sums, torch.logsumexp(logits, dim=-1), group=group)
            log_sum = torch.logsumexp(torch.stack(log_sums), dim=0)
            is_local = (t >= first_row) & (t < first_row + len(weight))
            row = (t - first_row).clamp(0, len(weight) - 1)[:, None]
            target_logits = torch.where(is_local, logits.gather(1, row)[:, 0], 0.0)
            dist.all_reduce(target_logits, group=group)
            loss += (log_sum - target_logits).sum() / len(targets)
            d_logits = torch.exp(logits - log_sum[:, None])
            d_logits.scatter_add_(1, row, -is_local.float()[:, None])
            d_logits = (d_logits / len(targets)).to(h.dtype)
            torch.mm(d_logits, weight, out=d_h)
            d_weight.addmm_(d_logits.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, d_loss: Tensor):  # type: ignore[no-untyped-def]
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None
