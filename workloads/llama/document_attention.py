"""Causal attention within the documents that are packed into sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workloads.models.flops import document_lengths


def document_offsets(lengths: Tensor) -> Tensor:
    """Return where documents start among all tokens, and the number of tokens, [documents + 1] int32.

    lengths: of the documents of each sequence, [sequences, documents per sequence]
    """
    return functional.pad(lengths.flatten().cumsum(0), (1, 0)).to(torch.int32)


class DocumentAttention:
    """PyTorch's variable-length attention on a GPU, which computes no masked pair, and a masked reference on a CPU.

    Attributes:
        document_tokens: the mean length of documents.
        name: of the function that computes it.
    """

    def __init__(self, sequence_length: int, document_tokens: int, device: torch.device) -> None:
        self.document_tokens = document_tokens
        self.name = "masked scaled_dot_product_attention" if device.type == "cpu" else "varlen_attn"
        self._longest = max(document_lengths(sequence_length, document_tokens))
        self._function = _attend_masked if device.type == "cpu" else _load_varlen()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        """Return attention [batch, heads, length, head_size], like q; k and v may have fewer heads."""
        return self._function(q, k, v, offsets, self._longest)


def _load_varlen() -> Callable[..., Tensor]:
    """Import PyTorch's function on use, since its module imports the compiler, and return attention by it."""
    from torch.nn.attention.varlen import varlen_attn

    # Older versions take grouped heads without being told (torch 2.11).
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
        packed_q, packed_k, packed_v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        out: Any = varlen_attn(
            packed_q, packed_k, packed_v, offsets, offsets, longest, longest, window_size=(-1, 0), **grouped
        )
        attn_out: Tensor = out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)
        return attn_out

    return attend_varlen


def find_varlen_ops() -> set[Any]:
    """Return the operation of PyTorch's variable-length attention; empty before it is loaded."""
    operation = getattr(torch.ops.torch_attn, "_varlen_attn", None)
    return {operation.default} if operation else set()


def _attend_masked(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int) -> Tensor:
    batch, length = q.shape[0], q.shape[2]
    positions = torch.arange(batch * length, device=q.device, dtype=offsets.dtype)
    documents = torch.searchsorted(offsets, positions, right=True).view(batch, 1, length)
    is_same_document = documents[:, :, :, None] == documents[:, :, None, :]
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=is_same_document.tril(), enable_gqa=True)
