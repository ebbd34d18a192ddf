"""Code for the worker processes of a vLLM engine that several devices share: how they draw tokens
and load weights.

Every worker draws every token itself, from logits and random numbers that all workers have, so that
no result need be sent around. Only vLLM imports this module, by name; its methods are called by
`engines/vllm/parallel.py`.
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
    """Methods that are added to vLLM's worker class."""

    def take_log_probs(self, numbers: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities of the generated tokens of each of these ended requests, and
        forget the requests. Empty for a request of which no token was drawn."""
        _draws.broken.clear()  # nobody looks at it here
        found = [_draws.by_number.pop(number, None) for number in numbers]
        return [[] if one is None else one.log_probs for one in found]

    def drawn_anew(self, numbers: Sequence[int]) -> list[tuple[list[int], list[float]]]:
        """For each request, return the tokens that were drawn in the places of its carried tokens
        (from before an abort), and their log-probabilities."""
        found = [_draws.by_number[number].anew for number in numbers]
        return [(one.tokens, one.log_probs) for one in found if one is not None]

    def watch(self: Any) -> str | None:
        """Have this worker's model runner draw carried tokens again (`verify.watch`). Called once,
        before any request. Returns a sentence if the runner is of an unknown class, else None."""
        return watch(self, _draws)

    def load_shared(self: Any, source: WeightSource) -> None:
        """Load this worker's part of the weights in the shared memory that `source` names. Raises
        `StaleWeightsError` if another version is there by now."""
        with _reader.reading(source) as weights:
            self.reload_weights(weights_iterator=iter(weights.items()))
        self.apply_model(pack_output_layer)
