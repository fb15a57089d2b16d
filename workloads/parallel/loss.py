"""The next-token loss where the head's rows are divided over ranks, in chunks, so that no full logits exist."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.parallel.layout import LOSS_TOKENS


def sharded_loss(hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Mean cross entropy of hidden[tokens, width], the same on all ranks, with weight[rows, width], this rank's rows of
    the head. The gradient of hidden is this rank's part of a sum."""
    loss: Tensor = _ShardedLoss.apply(hidden, weight, targets, group)
    return loss


class _ShardedLoss(torch.autograd.Function):
    """The gradients are taken in the forward pass, as `workloads.llama.model.loss_and_gradients` does."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[no-untyped-def]
        ranks, first = dist.get_world_size(group), dist.get_rank(group) * len(weight)
        loss = torch.zeros((), device=hidden.device, dtype=torch.float32)
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for h, t, d_h in zip(
            hidden.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), d_hidden.split(LOSS_TOKENS), strict=True
        ):
            logits = (h @ weight.t()).float()
            sums = [torch.empty(len(h), device=h.device) for _ in range(ranks)]
            dist.all_gather(sums, torch.logsumexp(logits, dim=-1), group=group)
            log_sum = torch.logsumexp(torch.stack(sums), dim=0)
            mine = (t >= first) & (t < first + len(weight))
            row = (t - first).clamp(0, len(weight) - 1)[:, None]
            wanted = torch.where(mine, logits.gather(1, row)[:, 0], 0.0)
            dist.all_reduce(wanted, group=group)
            loss += (log_sum - wanted).sum() / len(targets)
            d_logits = torch.exp(logits - log_sum[:, None])
            d_logits.scatter_add_(1, row, -mine.float()[:, None])
            d_logits = (d_logits / len(targets)).to(h.dtype)
            torch.mm(d_logits, weight, out=d_h)
            d_weight.addmm_(d_logits.t(), h)
        ctx.save_for_backward(d_hidden, d_weight)
        return loss

    @staticmethod
    def backward(ctx, d_loss: Tensor):  # type: ignore[no-untyped-def]
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * d_loss, d_weight * d_loss, None, None
