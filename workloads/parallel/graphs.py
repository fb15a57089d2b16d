"""A step's passes as one CUDA graph: the host launches it once, where a small model waits for thousands of launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Passes = Callable[..., Tensor]  # of a step's tensors, to its loss; adds to the gradients of parameters


class GraphedPasses:
    """Records the passes at the first call and replays them at every one, over other tensors of the same sizes.

    The optimizer's step is not recorded. `torch.cuda.graph` asks for runs on another stream before a recording; they
    compile what is compiled.
    """

    RUNS_BEFORE = 2

    def __init__(self, passes: Passes, parameters: Sequence[nn.Parameter]) -> None:
        self._passes, self._parameters = passes, parameters
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor | None, ...] = ()
        self._gradients: list[Tensor | None] = []
        self._loss = torch.empty(0)

    @property
    def is_recorded(self) -> bool:
        return self._graph is not None

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Return the loss and set the gradients, which the next call overwrites."""
        if self._graph is None:
            self._graph = self._record(inputs)
        for recorded, tensor in zip(self._inputs, inputs, strict=True):
            if recorded is not None and tensor is not None:
                recorded.copy_(tensor)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, inputs: tuple[Tensor | None, ...]) -> torch.cuda.CUDAGraph:
        self._inputs = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self.RUNS_BEFORE):
                self._passes(*self._inputs)
                self._clear_gradients()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._loss = self._passes(*self._inputs)
        self._gradients = [parameter.grad for parameter in self._parameters]
        return graph

    def _clear_gradients(self) -> None:
        """Drop the gradients, so that the recorded passes allocate them in the graph's own memory."""
        for parameter in self._parameters:
            parameter.grad = None
