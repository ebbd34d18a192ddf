"""Code for vLLM's workers: how they load weights, and for the worker processes of an engine that
several devices share how they draw tokens.

Every such process draws every token itself, from logits and random numbers that all of them have,
so that no result need be sent around. Only vLLM imports this module, by name; its methods are
called by `engines/vllm/parallel.py` and `engines/vllm/weights.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from rollpacker.engines.vllm.draws import Draws, drawing_with
from rollpacker.engines.vllm.setup import pack_output_layer
from rollpacker.engines.vllm.verify import watch
from rollpacker.engines.vllm.weights import Weights, opened
from rollpacker.weights.buffer import StaleWeightsError
from rollpacker.weights.delivery import UndeliveredError
from rollpacker.weights.probe import Probe

logging.getLogger("vllm").setLevel(logging.ERROR)

_draws = Draws()

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

    def watch(self: Any, noise: str) -> str | None:
        """Have this worker's model runner draw carried tokens again (`verify.watch`) with this
        noise. Called once, before any request. Returns a sentence if the runner is of an unknown
        class, else None."""
        _draws.noise = noise
        return watch(self, _draws)

    def receive_weights(self: Any, weights: Weights) -> tuple[str, str | None]:
        """Load this worker's part of these weights. Returns a hash of what was read
        (`weight_probe`), and a sentence if another version is there, or they did not arrive."""
        probe = Probe()
        try:
            with opened(weights, self.rank, self.device) as named:
                self.reload_weights(weights_iterator=probe.of(named))
        except (StaleWeightsError, UndeliveredError) as error:
            return "", str(error)
        self.apply_model(pack_output_layer)
        return probe.hexdigest(), None
