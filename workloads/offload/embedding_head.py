"""The parts of a Llama outside its blocks: token embedding, last norm and LM head."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from workloads.llama.block import BlockMath
from workloads.llama.model import loss_and_gradients
from workloads.models.model import Model
from workloads.offload.optimizer import AdamW, Precision
from workloads.offload.plan import LOGIT_TOKENS, Location
from workloads.offload.transfers import Buffer, CopyStreams


class EmbeddingAndHead:
    """Embedding, last norm and LM head. Weights and gradients stay on the device, optimizer states where the plan says.

    `sizes` has the size of each weight by its name in `workloads.llama.model.Llama`.
    """

    def __init__(
        self,
        shape: Model,
        block_math: BlockMath,
        device: torch.device,
        precision: Precision,
        copy_streams: CopyStreams,
        states_on: Location,
        allocate_states: Callable[[int, Location], tuple[Buffer, ...]],
    ) -> None:
        self._math, self._copy_streams, self._states_on = block_math, copy_streams, states_on
        self._has_master_weights, dtype = precision.master_weights, precision.dtype
        self.sizes: dict[str, tuple[int, ...]] = {
            "embedding.weight": (shape.vocabulary, shape.hidden_size),
            "norm.weight": (shape.hidden_size,),
        }
        if not shape.tied:
            self.sizes["lm_head.weight"] = (shape.vocabulary, shape.hidden_size)
        self._weights = {name: torch.zeros(size, device=device, dtype=dtype) for name, size in self.sizes.items()}
        self._gradients = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        self._states = {name: allocate_states(math.prod(size), states_on) for name, size in self.sizes.items()}
        self._lm_head = "embedding.weight" if shape.tied else "lm_head.weight"

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of tokens[…, length] as [tokens, hidden_size]."""
        return nn.functional.embedding(tokens.flatten(), self._weights["embedding.weight"])

    def embed_backward(self, tokens: Tensor, d_x: Tensor) -> None:
        self._gradients["embedding.weight"].index_add_(0, tokens.flatten(), d_x)

    def loss(self, x: Tensor, targets: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """Return `share` times the mean loss of a chunk, and its gradient with respect to x[tokens, hidden_size].

        The gradients of the last norm and the LM head are added to theirs.
        """
        norm, lm_head = self._weights["norm.weight"], self._weights[self._lm_head]
        normed = self._math.norm(x, norm)
        loss, d_normed = loss_and_gradients(
            normed, lm_head, targets.flatten(), LOGIT_TOKENS, self._gradients[self._lm_head], share
        )
        _, d_x, d_norm = self._math.norm_backward(x, norm, d_normed, torch.zeros((), dtype=x.dtype, device=x.device))
        self._gradients["norm.weight"] += d_norm
        return loss, d_x

    def update(self, optimizer: AdamW, step: int) -> None:
        """Update every weight and zero its gradient. States on the host are copied to the device and back."""
        device = self._weights["norm.weight"].device
        for name, stored in self._states.items():
            states = stored
            if self._states_on == "host":
                states = tuple(Buffer(torch.empty_like(buffer.tensor, device=device)) for buffer in stored)
                for on_device, on_host in zip(states, stored, strict=True):
                    self._copy_streams.release(on_device)
                    self._copy_streams.copy(on_device, on_host)
            self._copy_streams.acquire(*states)
            weights, gradients = self._weights[name].view(-1), self._gradients[name].view(-1)
            with self._copy_streams.span("optimizer"):
                optimizer.apply(step, weights, gradients, *(buffer.tensor for buffer in states))
            self._gradients[name].zero_()
            self._copy_streams.release(*states)
            if states is not stored:
                for on_device, on_host in zip(states, stored, strict=True):
                    self._copy_streams.copy(on_host, on_device)
                self._copy_streams.acquire(*states)  # so that their memory is not reused before the copies are done

    def load(self, get_weight: Callable[[str], Tensor]) -> None:
        """Copy all weights from `get_weight(name)`, and the fp32 master weights where there are any."""
        for name, weight in self._weights.items():
            value = get_weight(name)
            weight.copy_(value)
            for master in self._states[name][-1:] if self._has_master_weights else ():
                master.tensor.copy_(value.flatten())

    @property
    def dtype(self) -> torch.dtype:  # of weights and products
        return self._weights[self._lm_head].dtype

    def copy_weights(self) -> dict[str, Tensor]:  # to the host
        return {name: weight.cpu().clone() for name, weight in self._weights.items()}
