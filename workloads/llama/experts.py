"""A mixture of experts that replaces a block's MLP: a router, routed experts and a shared expert."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from workloads.instruments.torch_internals import gather_rows, scatter_sums
from workloads.llama.grouped import multiply_groups, sum_rows
from workloads.models.model import Model
from workloads.models.routing import NATURAL, Routing, tokens_of_experts


class Choice(NamedTuple):
    """The experts chosen for each token."""

    experts: Tensor  # [tokens, experts_per_token] int64
    weights: Tensor  # of the experts' outputs, [tokens, experts_per_token] fp32
    scores: Tensor  # of all experts, [tokens, experts] fp32


def choose_experts(logits: Tensor, bias: Tensor, shape: Model, forced: Tensor | None = None) -> Choice:
    """Return the experts with the highest scores after adding `bias` [experts], or the forced experts. Weights are the
    fp32 scores of logits[tokens, experts], without the bias."""
    logits = logits.float()
    scores = logits.sigmoid() if shape.router_scores == "sigmoid" else logits.softmax(dim=-1)
    experts = forced
    if experts is None:
        ranked = scores.detach() + bias
        if shape.expert_groups > 1:
            grouped = ranked.unflatten(1, (shape.expert_groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(dim=-1).topk(shape.groups_per_token, dim=-1).indices
            is_excluded = torch.ones_like(grouped[:, :, 0]).scatter(1, best, 0.0).bool()
            ranked = grouped.masked_fill(is_excluded[:, :, None], float("-inf")).flatten(1)
        experts = ranked.topk(shape.experts_per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if shape.renormalized:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return Choice(experts, weights * shape.router_scale, scores)


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1) for clamped gate and up (gpt-oss, arXiv 2508.10925)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Order(NamedTuple):
    """Token rows sorted by expert, one row per expert of each token. Rows after the last expert's rows are empty.

    If an expert's rows are padded, the padding rows have token and place -1.
    """

    ends: Tensor  # [experts] int32, the index after each expert's last row
    counts: Tensor  # [experts] int64, rows of each expert
    tokens: Tensor  # [rows, 1] int64, the token of a row
    rows: Tensor  # [tokens, experts_per_token] int64, the rows of a token; -1 for an expert of another rank
    places: Tensor  # [rows, 1] int64, a row's index among the flattened experts


def sort_by_expert(experts: Tensor, count: int, most_rows: int | None = None, *, multiple: int = 1) -> Order:
    """Return the rows of experts[tokens, experts_per_token] sorted by expert, without synchronizing with the host.

    Expert numbers of `count` and above belong to other ranks and have no rows; the others have at most `most_rows` in
    total. If `multiple` is above 1, each expert's rows are padded to a multiple of it, and to at least one multiple.
    """
    # A radix sort makes one pass per byte of the keys, so the keys are int16.
    keys, places = experts.flatten().to(torch.int16).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(count, dtype=keys.dtype, device=keys.device), right=True)
    counts, at = ends.diff(prepend=ends.new_zeros(1)), torch.arange(len(places), device=places.device)
    if multiple > 1:
        padded = (counts.clamp(min=1) + multiple - 1) // multiple * multiple
        padded_ends = padded.cumsum(0)
        at = at + (padded_ends - padded - ends + counts)[keys.int()]
        ends, empty = padded_ends, places.new_full((len(places) + multiple * count,), -1)
    rows = torch.zeros_like(places).scatter(0, places, at).view(experts.shape)
    if multiple > 1:
        places = empty.scatter(0, at, places)
    if most_rows is not None:
        rows, places = rows.where(experts < count, -1), places[:most_rows]
    tokens = places[:, None] // experts.shape[1]
    return Order(ends.int(), counts, tokens, rows, places[:, None])


def force_experts(tokens: int, shape: Model, imbalance: float, seed: int) -> Tensor:
    """Return each token's experts, [tokens, experts_per_token] int64, with the loads from `tokens_of_experts`. No token
    has the same expert twice, so no expert has more rows than there are tokens."""
    loads = tokens_of_experts(tokens * shape.experts_per_token, shape.experts, imbalance, seed)
    experts = torch.arange(shape.experts).repeat_interleave(torch.tensor(loads)).view(-1, tokens).t()
    return experts[torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))].contiguous()


class _AddLoss(torch.autograd.Function):
    """An identity on x that passes the gradient `share` to a loss that nothing else reads."""

    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor, share: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.share = share
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, d_x: Tensor):  # type: ignore[no-untyped-def]
        (loss,) = ctx.saved_tensors
        return d_x, torch.full_like(loss, ctx.share), None


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's part of a weight. If ranks hold copies, the weight's gradient is a sum over the ranks."""
    if not hasattr(weight, "placements"):
        return weight
    from torch.distributed.tensor import Partial  # takes 0.8 s, which other workloads do not spend

    copied = [Partial() if placement.is_replicate() else placement for placement in weight.placements]
    local: Tensor = weight.to_local(grad_placements=copied)  # type: ignore[attr-defined]
    return local


class Experts(nn.Module):
    """A layer that sums the weighted outputs of a token's routed experts and the output of a shared expert.

    The gate and up projections are one matrix. A row's weight multiplies the input of the down projection, which is
    linear and has a narrower input than output. If the module was built on the meta device, call `start` first.

    After `divide`, each rank holds its share of the experts and runs the tokens of the whole group through them: tokens
    are gathered, and sums of outputs are scattered. If a token has at least as many experts as there are ranks, an
    all-to-all of rows would send just as much, and the host would have to know the number of rows.
    """

    group_name = ""  # the group that divides the experts; empty if each rank holds all
    ranks, rank = 1, 0  # of the group that divides the experts
    most_rows: int | None = None  # the most rows of the group's tokens on this rank

    load: Tensor  # [experts] int64, tokens per expert since the last `balance`
    passes: Tensor  # [3] int64, sums over all passes: tokens of the busiest expert, of all, and of this rank's experts
    bias: Tensor  # [experts] fp32, added to the scores to choose experts

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        experts, size, shared = shape.experts, shape.expert_intermediate_size, shape.shared_expert_intermediate_size
        self.router = nn.Linear(shape.hidden_size, experts, bias=shape.gpt_oss)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * size, shape.hidden_size))
        self.down = nn.Parameter(torch.empty(experts, shape.hidden_size, size))
        if shape.gpt_oss:
            self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * size))
            self.down_bias = nn.Parameter(torch.empty(experts, shape.hidden_size))
        self._has_shared = shared > 0
        if shared:
            self.shared_gate_up = nn.Linear(shape.hidden_size, 2 * shared, bias=False)
            self.shared_down = nn.Linear(shared, shape.hidden_size, bias=False)
        if shape.shared_expert_gate:
            self.shared_gate = nn.Linear(shape.hidden_size, 1, bias=False)
        self.register_buffer("bias", torch.zeros(experts, device=self.down.device))
        self.start(NATURAL, 0, self.down.device)

    def start(self, routing: Routing, tokens: int, device: torch.device, *, loss_share: float = 1.0) -> None:
        """Reset the counters and, if routing is forced, choose the experts for a pass of `tokens`. The gradients of the
        router's losses are scaled by `loss_share`, the share of a micro-batch in a step."""
        self.routing, self.loss_share = routing, loss_share
        self.bias = self.bias.float()  # even if the weights are cast to bf16
        for name, size in {"load": self.shape.experts, "passes": 3}.items():
            self.register_buffer(name, torch.zeros(size, dtype=torch.int64, device=device), persistent=False)
        self.forced: Tensor | None = None
        share = self.shape.experts // self.ranks  # the experts of a rank
        self.most_rows = None
        if self.ranks > 1:
            self.most_rows = self.ranks * tokens * min(self.shape.experts_per_token, share)
        if routing.imbalance is not None:
            forced = force_experts(tokens, self.shape, routing.imbalance, routing.seed)
            self.forced = forced.to(device)
            if self.ranks > 1:  # all ranks of the group have the same loads
                self.most_rows = self.ranks * int((forced // share == self.rank).sum())

    def divide(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's share of the experts. The experts' gradients are sums over the group's tokens."""
        self.group_name, self.ranks, self.rank = group.group_name, group.size(), group.rank()
        share = len(self.down) // self.ranks
        for name in self.stacked:
            setattr(self, name, nn.Parameter(getattr(self, name)[:share].clone()))

    @property
    def stacked(self) -> tuple[str, ...]:
        """The names of the routed experts' weights, in which the experts are the first dimension."""
        return ("gate_up", "down", "gate_up_bias", "down_bias") if self.shape.gpt_oss else ("gate_up", "down")

    @property
    def divided(self) -> tuple[nn.Parameter, ...]:
        """The weights that are divided among ranks."""
        return tuple(getattr(self, name) for name in self.stacked) if self.ranks > 1 else ()

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for x[batch, length, hidden_size]."""
        tokens = x.flatten(0, 1)
        logits = self.router(tokens)
        choice = choose_experts(logits, self.bias, self.shape, self.forced)
        if self.ranks > 1:
            counts = choice.experts.new_zeros(self.shape.experts)
            experts = choice.experts.flatten()
            counts = counts.scatter_add(0, experts, torch.ones_like(experts))
        else:
            order = sort_by_expert(choice.experts, self.shape.experts)
            counts = order.counts
        with torch.no_grad():
            self.load.add_(counts)
            self.passes[:2].add_(torch.stack([counts.max(), counts.sum()]))
        weights = choice.weights
        if self.routing.auxiliary_loss or self.routing.z_loss:
            weights = _AddLoss.apply(weights, self._loss(logits, choice, counts), self.loss_share)
        if self.ranks == 1:
            out = self._run(tokens, weights, order)
            return (out + self._shared(tokens)).view_as(x) if self._has_shared else out.view_as(x)
        # Weights and experts are exchanged at once, since fp32 represents expert numbers exactly.
        both = gather_rows(torch.cat([weights, choice.experts.float()], dim=1), 0, self.group_name)
        weights, experts = both.chunk(2, dim=1)
        # Gathered last, so that the backward pass scatters these gradients first. The gradients of the experts' weights
        # are computed meanwhile.
        gathered = gather_rows(tokens, 0, self.group_name)
        shared = self._shared(tokens) if self._has_shared else None  # overlaps the exchange
        local, share = experts.detach().long() - self.rank * len(self.down), len(self.down)
        order = sort_by_expert(local.where(local >= 0, share), share, self.most_rows)
        self.passes[2].add_(order.ends[-1])
        out = self._run(gathered, weights, order)
        out = scatter_sums(out, "sum", 0, self.group_name)
        return (out if shared is None else out + shared).view_as(x)

    def _run(self, tokens: Tensor, weights: Tensor, order: Order) -> Tensor:
        """Return the weighted sum of this rank's expert outputs for tokens[tokens, hidden_size]."""
        rows = sum_rows(tokens, order.tokens, order.rows)
        gate_up, down = (local_part(weight).to(rows.dtype).mT for weight in (self.gate_up, self.down))
        product = multiply_groups(rows, gate_up, order.ends)
        row_weights = sum_rows(weights.reshape(-1, 1), order.places, order.rows.view(-1, 1))
        if not self.shape.gpt_oss:
            gate, up = product.chunk(2, dim=-1)
            hidden = (functional.silu(gate) * up * row_weights).to(rows.dtype)
            return sum_rows(multiply_groups(hidden, down, order.ends), order.rows, order.tokens)
        # A one-hot GEMM adds the bias of each row's expert, because its gradient needs no atomic additions.
        at = torch.arange(len(rows), device=rows.device, dtype=order.ends.dtype)
        experts = torch.searchsorted(order.ends, at, right=True)[:, None]
        is_expert = (experts == torch.arange(len(order.ends), device=rows.device)).to(rows.dtype)
        product = torch.addmm(product, is_expert, local_part(self.gate_up_bias).to(rows.dtype))
        # Gradients of empty rows may be NaN, and the zeros of `is_expert` would not keep NaN out of the bias.
        gate, up = product.where(experts < len(order.ends), 0).chunk(2, dim=-1)
        hidden = (clamped_swiglu(gate, up) * row_weights).to(rows.dtype)
        out = multiply_groups(hidden, down, order.ends)
        out = torch.addmm(out, (is_expert * row_weights).to(rows.dtype), local_part(self.down_bias).to(rows.dtype))
        return sum_rows(out, order.rows, order.tokens)

    def _shared(self, tokens: Tensor) -> Tensor:
        gate, up = self.shared_gate_up(tokens).chunk(2, dim=-1)
        out: Tensor = self.shared_down(functional.silu(gate) * up)
        return out * self.shared_gate(tokens).sigmoid() if self.shape.shared_expert_gate else out

    def _loss(self, logits: Tensor, choice: Choice, counts: Tensor) -> Tensor:
        probabilities = choice.scores / choice.scores.sum(dim=-1, keepdim=True)
        shares = counts / choice.experts.numel()
        balance = self.shape.experts * (shares * probabilities.mean(dim=0)).sum()
        z = logits.float().logsumexp(dim=-1).square().mean()
        return self.routing.auxiliary_loss * balance + self.routing.z_loss * z

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias toward equal loads, based on the tokens that `load` has counted since the last call."""
        self.bias.add_((self.load.float().mean() - self.load).sign(), alpha=self.routing.bias_rate)
        self.load.zero_()

    @property
    def imbalances(self) -> tuple[float, float]:
        """The tokens of the busiest expert and of this rank's experts, each divided by the mean, over all passes."""
        busiest, total, received = self.passes.tolist()
        return busiest * self.shape.experts / total, received / total if self.ranks > 1 else 1.0
