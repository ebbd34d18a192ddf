"""Decode steps replayed as CUDA graphs, one per shape, captured when a shape is first met."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch

logger = logging.getLogger(__name__)


class StepGraphs:
    """Runs steps that read and write fixed tensors only; as they are once a capture has failed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._enabled = device.type == "cuda"

    def forget(self) -> None:
        """Drop all graphs: the tensors that they were captured on have moved."""
        self._graphs.clear()

    def run(self, key: Hashable, step: Callable[[], None], state: Sequence[torch.Tensor]) -> None:
        """Run `step`; `state` are the tensors that it both reads and changes."""
        if not self._enabled:
            step()
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, step, state)
        if graph is None:
            step()
        else:
            graph.replay()

    def _capture(
        self, key: Hashable, step: Callable[[], None], state: Sequence[torch.Tensor]
    ) -> torch.cuda.CUDAGraph | None:
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        for tensor, saved in zip(state, before, strict=True):
            tensor.copy_(saved)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            logger.warning("decode steps run without CUDA graphs: capturing one failed (%s)", error)
            self._enabled = False
            self._graphs.clear()
            return None
        self._graphs[key] = graph
        return graph
