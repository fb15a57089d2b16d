"""A mixture of experts against a plain loop over experts, and its router against those of transformers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from workloads.llama.experts import Experts, choose_experts, force_experts, sort_by_expert
from workloads.llama.grouped import multiply_groups
from workloads.models.model import MODELS, Model
from workloads.models.routing import Routing, tokens_of_experts

TINY = MODELS["experts_tiny"]
CPU = torch.device("cpu")
SHAPES: dict[str, Model] = {
    "softmax, renormalized, gated shared expert": TINY,
    "softmax, no shared expert": replace(
        TINY, renormalized=False, shared_expert_intermediate_size=0, shared_expert_gate=False
    ),
    "sigmoid in groups, scaled, shared expert": replace(
        TINY,
        router_scores="sigmoid",
        expert_groups=4,
        groups_per_token=2,
        router_scale=2.5,
        experts_per_token=3,
        shared_expert_gate=False,
    ),
    "gpt-oss, with biases": replace(TINY, gpt_oss=True, shared_expert_intermediate_size=0, shared_expert_gate=False),
}
ROUTINGS = {"natural": Routing(), "forced": Routing(imbalance=2.0), "losses": Routing(auxiliary_loss=0.1, z_loss=0.01)}


def build(shape: Model, routing: Routing, tokens: int, device: torch.device, dtype: torch.dtype) -> Experts:
    """Return experts with random weights and a bias that changes choices."""
    torch.manual_seed(0)
    experts = Experts(shape)
    # In fp32 some values are clamped; in bf16 rounding puts those at the limit on either side of it.
    std = 0.8 if shape.gpt_oss and dtype == torch.float32 else 0.2
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=std)
    experts.to(device, dtype).start(routing, tokens, device)
    experts.bias.copy_(torch.linspace(-0.05, 0.05, shape.experts))
    return experts


def loop(experts: Experts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output one expert after the other, and the router's loss, as the papers write them."""
    shape, routing, tokens = experts.shape, experts.routing, x.flatten(0, 1)
    logits = experts.router(tokens)
    chosen, weights, scores = choose_experts(logits, experts.bias, shape, experts.forced)
    out = torch.zeros_like(tokens, dtype=torch.promote_types(x.dtype, torch.float32))
    shares = []
    for expert in range(shape.experts):
        token, slot = torch.where(chosen == expert)
        shares.append(len(token) / chosen.numel())
        if shape.gpt_oss:
            product = functional.linear(tokens[token], experts.gate_up[expert], experts.gate_up_bias[expert])
            gate, up = product.clamp(max=7).chunk(2, dim=-1)
            hidden = gate * functional.sigmoid(1.702 * gate) * (1 + up.clamp(min=-7))
            y = functional.linear(hidden, experts.down[expert], experts.down_bias[expert])
        else:
            gate, up = (tokens[token] @ experts.gate_up[expert].t()).chunk(2, dim=-1)
            y = (functional.silu(gate) * up) @ experts.down[expert].t()
        out = out.index_add(0, token, (y * weights[token, slot, None]).to(out.dtype))
    if shape.shared_expert_intermediate_size:
        gate, up = experts.shared_gate_up(tokens).chunk(2, dim=-1)
        shared = experts.shared_down(functional.silu(gate) * up)
        out = out + (shared * torch.sigmoid(experts.shared_gate(tokens)) if shape.shared_expert_gate else shared)
    mean_scores = (scores / scores.sum(-1, keepdim=True)).mean(0)
    balance = shape.experts * sum(share * score for share, score in zip(shares, mean_scores, strict=True))
    z = torch.logsumexp(logits.float(), dim=-1).square().mean()
    return out.view_as(x), routing.auxiliary_loss * balance + routing.z_loss * z


def results(experts: Experts, x: Tensor, d_out: Tensor, function: Any) -> dict[str, Tensor]:
    """Return the output and the gradients of the input and of all weights."""
    x = x.clone().requires_grad_()
    experts.zero_grad()
    out, loss = function(x)
    ((out * d_out).sum() + loss).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in experts.named_parameters()}  # type: ignore[union-attr]
    return {"out": out.detach(), "x": x.grad, **gradients}  # type: ignore[dict-item]


def assert_equal_to_loop(
    shape: Model, routing: Routing, device: torch.device, dtype: torch.dtype, tolerance: float, length: int = 24
) -> None:
    experts = build(shape, routing, 2 * length, device, dtype)
    x, d_out = (torch.randn(2, length, shape.hidden_size, device=device).to(dtype) for _ in range(2))
    grouped = results(experts, x, d_out, lambda x: (experts(x), 0.0))
    plain = results(experts, x, d_out, lambda x: loop(experts, x))
    for name, expected in plain.items():
        error = (grouped[name].double() - expected.double()).norm() / expected.double().norm()
        assert error < tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", SHAPES)
def test_output_and_gradients_equal_a_loop_over_experts(kind: str, routing: str) -> None:
    assert_equal_to_loop(SHAPES[kind], ROUTINGS[routing], CPU, torch.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", SHAPES)
def test_output_and_gradients_equal_a_loop_over_experts_on_a_gpu(kind: str, routing: str) -> None:
    shape = replace(SHAPES[kind], hidden_size=256, expert_intermediate_size=128)
    assert_equal_to_loop(shape, ROUTINGS[routing], torch.device("cuda"), torch.bfloat16, 0.02, length=500)


@pytest.mark.gpu
def test_experts_without_tokens_have_no_gradient_on_a_gpu() -> None:
    shape = replace(TINY, hidden_size=256, expert_intermediate_size=128)
    experts = build(shape, Routing(), 64, torch.device("cuda"), torch.bfloat16)
    experts.forced = torch.tensor([[1, 6]], device="cuda").expand(64, 2).contiguous()
    trash = torch.full((8, 256, 256), torch.nan, device="cuda")  # what memory without a write would hold
    del trash
    experts(torch.randn(1, 64, 256, device="cuda", dtype=torch.bfloat16)).square().sum().backward()
    for gradient in (experts.gate_up.grad, experts.down.grad):
        norms = gradient.flatten(1).float().norm(dim=1).tolist()  # type: ignore[union-attr]
        assert [norm > 0 for norm in norms] == [expert in (1, 6) for expert in range(8)]


@pytest.mark.gpu
def test_nothing_waits_for_the_host() -> None:
    shape = replace(TINY, hidden_size=256, expert_intermediate_size=128)
    experts = build(shape, ROUTINGS["losses"], 64, torch.device("cuda"), torch.bfloat16)
    x = torch.randn(1, 64, 256, device="cuda", dtype=torch.bfloat16)
    experts(x).square().sum().backward()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_router_chooses_and_weighs_as_that_of_transformers() -> None:
    module = pytest.importorskip("transformers.models.glm4_moe.modeling_glm4_moe")
    shape = SHAPES["sigmoid in groups, scaled, shared expert"]
    config = SimpleNamespace(
        hidden_size=shape.hidden_size,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        n_group=shape.expert_groups,
        topk_group=shape.groups_per_token,
        norm_topk_prob=shape.renormalized,
        routed_scaling_factor=shape.router_scale,
    )
    router = module.Glm4MoeTopkRouter(config)
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    router.e_score_correction_bias.copy_(0.2 * torch.randn(shape.experts))
    logits, weights, experts = router(torch.randn(200, shape.hidden_size))
    chosen = choose_experts(logits, router.e_score_correction_bias, shape)
    for ours, theirs in ((chosen.experts, experts), (chosen.weights, weights)):
        torch.testing.assert_close(ours.sort(dim=1).values.double(), theirs.sort(dim=1).values.double())


def test_every_token_has_a_row_at_each_of_its_experts() -> None:
    experts = torch.randint(0, 8, (50, 3), generator=torch.Generator().manual_seed(0))
    order = sort_by_expert(experts, 8)
    assert int(order.ends[-1]) == experts.numel()  # none is dropped
    assert order.counts.tolist() == experts.flatten().bincount(minlength=8).tolist()
    row_experts = torch.repeat_interleave(torch.arange(8), order.counts)
    assert torch.equal(row_experts[order.rows], experts)
    assert torch.equal(order.tokens[order.rows][:, :, 0], torch.arange(50)[:, None].expand(50, 3))


@pytest.mark.parametrize("imbalance", [1.0, 1.7, 4.0])  # 8 experts, 2 of a token: at most 4 times the mean
def test_forced_experts_have_the_loads_and_none_twice(imbalance: float) -> None:
    experts = force_experts(512, TINY, imbalance, seed=3)
    assert (experts[:, 0] != experts[:, 1]).all()
    loads = experts.flatten().bincount(minlength=8).tolist()
    assert loads == tokens_of_experts(1024, 8, imbalance, seed=3)
    assert max(loads) / 128 == pytest.approx(imbalance, abs=0.01)


def test_the_imbalance_is_that_of_each_pass() -> None:
    experts = build(TINY, Routing(), 4, CPU, torch.float32)
    for busy in (0, 4):  # each pass has all tokens at other experts
        experts.forced = torch.tensor([[busy, busy + 1]]).expand(4, 2)
        experts(torch.randn(1, 4, 64))
    assert experts.imbalances == (4.0, 1.0)


def test_the_auxiliary_loss_balances_loads() -> None:
    experts = build(TINY, Routing(auxiliary_loss=1.0), 256, CPU, torch.float32)
    torch.manual_seed(1)
    x = torch.randn(1, 256, 64) + 0.5  # the router prefers some experts
    loads = []
    for _ in range(20):
        experts.zero_grad()
        (0.0 * experts(x)).sum().backward()  # the router's loss alone
        with torch.no_grad():
            experts.router.weight.sub_(experts.router.weight.grad, alpha=2.0)  # type: ignore[arg-type]
        loads.append(int(experts.load.max()) / 64)
        experts.load.zero_()
    assert loads[0] > 1.8 and loads[-1] < 1.4


def test_the_bias_balances_loads_without_a_loss() -> None:
    experts = build(TINY, Routing(bias_rate=0.003), 256, CPU, torch.float32)
    torch.manual_seed(1)
    x = torch.randn(1, 256, 64) + 0.5  # the router prefers some experts
    loads = []
    with torch.no_grad():
        for _ in range(80):
            experts(x)
            loads.append(experts.load.clone())
            experts.balance()
    first, last = (int(load.max()) / 64 for load in (loads[0], loads[-1]))
    assert first > 1.8
    assert last < 1.25
    assert int(experts.load.sum()) == 0


def test_pytorchs_grouped_gemm_multiplies_in_the_layouts_of_every_pass() -> None:
    """GPUs of both vendors call it; this is its implementation for CPUs."""
    x, weights, d_out = (torch.randn(size, dtype=torch.bfloat16) for size in ((64, 32), (4, 48, 32), (64, 48)))
    ends = torch.tensor([16, 16, 40, 64], dtype=torch.int32)
    for a, b in ((x, weights.mT), (d_out, weights), (d_out.t(), x)):
        torch.testing.assert_close(torch.nn.functional.grouped_mm(a, b, offs=ends), multiply_groups(a, b, ends))
