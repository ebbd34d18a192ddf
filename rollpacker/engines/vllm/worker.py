"""One of the processes that share an engine of vLLM: how it draws tokens and takes weights.

Each draws every token itself, from logits and noise that all of them have, so that none has to be
told what another one drew. vLLM imports this by name, in such a process (`engines/vllm/parallel.py`
speaks to it), and nothing else does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rollpacker.engines.vllm.draws import Draws, drawing_with
from rollpacker.engines.vllm.setup import pack_output_layer
from rollpacker.engines.vllm.verify import watch
from rollpacker.weights.buffer import WeightReader, WeightSource

logging.getLogger("vllm").setLevel(logging.ERROR)

_draws = Draws()
_reader = WeightReader()

DrawTokens = drawing_with(_draws)


class Extension:
    """Methods that vLLM's worker gets from here."""

    def take_log_probs(self, numbers: Sequence[int]) -> list[list[float]]:
        """Log-probabilities of each of these requests, which have ended and are forgotten here.
        Empty for a request that was never drawn for."""
        _draws.broken.clear()  # nobody looks at it here
        found = [_draws.by_number.pop(number, None) for number in numbers]
        return [[] if one is None else one.log_probs for one in found]

    def drawn_anew(self, numbers: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """Tokens drawn in the places of each request's carried tokens, and their
        log-probabilities."""
        found = [_draws.by_number[number].anew for number in numbers]
        return [(one.tokens, one.log_probs) for one in found if one is not None]

    def watch(self: Any) -> str | None:
        """Watch this worker's model runner; called once, before there are requests. Returns a
        sentence if the runner is not one that can be watched, else None."""
        return watch(self, _draws)

    def load_shared(self: Any, source: WeightSource) -> None:
        """Take this worker's part of these weights. Raises `StaleWeightsError`."""
        with _reader.reading(source) as weights:
            self.reload_weights(weights_iterator=iter(weights.items()))
        self.apply_model(pack_output_layer)
