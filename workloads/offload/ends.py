"""What is before the first block and after the last."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from workloads.llama.model import next_token_loss
from workloads.llama.shapes import LlamaShape
from workloads.offload.memory import Buffer, Queues
from workloads.offload.optimizer import AdamW


class Ends:
    """Embedding, last norm and head: on the device while training, their optimizer's states where the plan says."""

    def __init__(
        self,
        shape: LlamaShape,
        states: str,
        device: torch.device,
        dtype: torch.dtype,
        queues: Queues,
        buffer: Callable[[int, str], Buffer],
    ) -> None:
        """`buffer` makes one of so many numbers in a place, `states` is the place of the optimizer's states."""
        self._queues, self._states_on_host = queues, states == "host"
        sizes: dict[str, tuple[int, ...]] = {
            "embedding.weight": (shape.vocabulary, shape.width),
            "norm.weight": (shape.width,),
        }
        if not shape.tied:
            sizes["head.weight"] = (shape.vocabulary, shape.width)
        self.sizes = sizes
        self._leaves = {
            name: torch.zeros(size, device=device, dtype=dtype).requires_grad_() for name, size in sizes.items()
        }
        for leaf in self._leaves.values():
            leaf.grad = torch.zeros_like(leaf)
        self._states = {name: tuple(buffer(math.prod(size), states) for _ in range(2)) for name, size in sizes.items()}
        self._norm = nn.RMSNorm(shape.width, eps=shape.norm_eps, device="meta")

    def embed(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.embedding(tokens, self._leaves["embedding.weight"])

    def embed_backward(self, tokens: Tensor, d_x: Tensor) -> None:
        gradient = self._leaves["embedding.weight"].grad
        assert gradient is not None
        gradient.index_add_(0, tokens.flatten(), d_x.flatten(0, 1))

    def loss(self, x: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """One chunk's part of the step's mean loss, and its gradient with respect to x."""
        leaf = x.detach().requires_grad_()
        head = self._leaves.get("head.weight", self._leaves["embedding.weight"])
        normed = functional_call(self._norm, {"weight": self._leaves["norm.weight"]}, (leaf,))
        loss = next_token_loss(normed.flatten(0, 1), head, targets.flatten(), 4096) * share
        loss.backward()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad

    def update(self, optimizer: AdamW, step: int) -> None:
        for name, leaf in self._leaves.items():
            states = self._states[name]
            on_device = states
            if self._states_on_host:
                on_device = tuple(Buffer(torch.empty(leaf.numel(), dtype=leaf.dtype, device=leaf.device)) for _ in "mv")
                for there, here in zip(on_device, states, strict=True):
                    self._queues.release(there)
                    self._queues.copy(there, here)
            self._queues.acquire(*on_device)
            assert leaf.grad is not None
            vectors = leaf.detach().view(-1), leaf.grad.view(-1), on_device[0].tensor, on_device[1].tensor
            optimizer.apply(step, *vectors)
            leaf.grad.zero_()
            self._queues.release(*on_device)
            if on_device is not states:
                for there, here in zip(on_device, states, strict=True):
                    self._queues.copy(here, there)
                    self._queues.keep_until_copied(there.tensor)

    def load(self, named: Callable[[str], Tensor]) -> None:
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(named(name))

    def weights(self) -> dict[str, Tensor]:
        return {name: leaf.detach().cpu().clone() for name, leaf in self._leaves.items()}
