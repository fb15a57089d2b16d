"""A Llama that computes everything at once, with which the trainers' results are compared."""

from torch import Tensor, nn

from workloads.llama.model import Block, ChunkedLoss
from workloads.models.model import Model


class Llama(nn.Module):
    """The decoder and its loss. The logits of at most `chunk_tokens` tokens exist at a time."""

    def __init__(self, shape: Model, *, chunk_tokens: int = 4096) -> None:
        super().__init__()
        self.shape, self.chunk_tokens = shape, chunk_tokens
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden_size)
        self.blocks = nn.ModuleList([Block(shape, layer) for layer in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head = nn.Linear(*shape.linear("lm_head"), bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor, rope: Tensor, share: float = 1.0) -> Tensor:
        """Return `share` of the mean loss of predicting `targets` from `tokens`, both [batch, length] int64."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x).flatten(0, 1)
        return ChunkedLoss.apply(x, self.lm_head.weight, targets.flatten(), self.chunk_tokens, share)
