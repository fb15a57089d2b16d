"""What is before the first block and after the last."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from workloads.llama.block import BlockMath
from workloads.llama.model import loss_and_gradients
from workloads.llama.shapes import LlamaShape
from workloads.offload.memory import Buffer, Queues
from workloads.offload.optimizer import AdamW
from workloads.offload.plan import LOGIT_TOKENS, Place


class Ends:
    """Embedding, last norm and head: on the device while training, their optimizer's states where the plan says."""

    def __init__(
        self,
        shape: LlamaShape,
        math_: BlockMath,
        device: torch.device,
        dtype: torch.dtype,
        queues: Queues,
        states: Callable[[int], tuple[Buffer, ...]],
        states_on: Place,
    ) -> None:
        """`states` makes the optimizer's states of so many numbers, where they stay."""
        self._math, self._queues, self._states_on = math_, queues, states_on
        self.sizes: dict[str, tuple[int, ...]] = {
            "embedding.weight": (shape.vocabulary, shape.hidden_size),
            "norm.weight": (shape.hidden_size,),
        }
        if not shape.tied:
            self.sizes["lm_head.weight"] = (shape.vocabulary, shape.hidden_size)
        self._weights, self._gradients = (
            {name: torch.zeros(size, device=device, dtype=dtype) for name, size in self.sizes.items()} for _ in "wg"
        )
        self._states = {name: states(math.prod(size)) for name, size in self.sizes.items()}
        self._lm_head = "embedding.weight" if shape.tied else "lm_head.weight"

    def embed(self, tokens: Tensor) -> Tensor:
        """[…, length] to [tokens, width]."""
        return nn.functional.embedding(tokens.flatten(), self._weights["embedding.weight"])

    def embed_backward(self, tokens: Tensor, d_x: Tensor) -> None:
        self._gradients["embedding.weight"].index_add_(0, tokens.flatten(), d_x)

    def loss(self, x: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """One chunk's part of the step's mean loss, and its gradient with respect to x[tokens, width]."""
        norm, lm_head = self._weights["norm.weight"], self._weights[self._lm_head]
        normed = self._math.norm(x, norm)
        loss, d_normed = loss_and_gradients(
            normed, lm_head, targets.flatten(), LOGIT_TOKENS, self._gradients[self._lm_head], share
        )
        _, d_x, d_norm = self._math.norm_backward(x, norm, d_normed, torch.zeros((), dtype=x.dtype, device=x.device))
        self._gradients["norm.weight"] += d_norm
        return loss, d_x

    def update(self, optimizer: AdamW, step: int) -> None:
        for name, states in self._states.items():
            on_device = states
            if self._states_on == "host":
                on_device = tuple(Buffer(torch.empty_like(each.tensor, device=self._device)) for each in states)
                for there, here in zip(on_device, states, strict=True):
                    self._queues.release(there)
                    self._queues.copy(there, here)
            self._queues.acquire(*on_device)
            vectors = self._weights[name].view(-1), self._gradients[name].view(-1)
            with self._queues.span("optimizer"):
                optimizer.apply(step, *vectors, *(each.tensor for each in on_device))
            self._gradients[name].zero_()
            self._queues.release(*on_device)
            if on_device is not states:
                for there, here in zip(on_device, states, strict=True):
                    self._queues.copy(here, there)
                self._queues.acquire(*on_device)  # what left them is done before their memory is another's

    @property
    def _device(self) -> torch.device:
        return self._weights["norm.weight"].device

    def load(self, named: Callable[[str], Tensor]) -> None:
        for name, weight in self._weights.items():
            value = named(name)
            weight.copy_(value)
            for master in self._states[name][2:]:
                master.tensor.copy_(value.flatten())

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.cpu().clone() for name, weight in self._weights.items()}
