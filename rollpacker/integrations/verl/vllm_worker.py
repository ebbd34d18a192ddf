"""What vLLM's worker processes run for verl where tokens are carried to a later step: how they
draw, and how they draw carried tokens again. Only vLLM imports this module, by name."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollpacker.engines.vllm.draws import Draws, drawing_with
from rollpacker.engines.vllm.verify import watch

_draws = Draws()

DrawTokens = drawing_with(_draws)


class Extension(vLLMColocateWorkerExtension):  # type: ignore[misc]  # verl is not typed
    """verl's own methods of vLLM's worker, and those that carried tokens need."""

    def monkey_patch_model(self, *args: Any, **kwargs: Any) -> None:
        """Do what verl does to a model that has been loaded, once, and begin to watch it."""
        super().monkey_patch_model(*args, **kwargs)
        if (refusal := watch(self, _draws)) is not None:
            raise ValueError(refusal)

    def take_anew(self, name: str) -> tuple[list[int], list[float], list[int]]:
        """Return the tokens that were drawn in the places of this request's carried tokens, their
        log-probabilities, and the tokens that end a response, and forget the request. None are
        drawn for an unknown request."""
        _draws.broken.clear()  # nobody looks at it here
        draw = _draws.by_number.pop(name, None)
        anew = None if draw is None else draw.anew
        ends = sorted(_draws.ends)
        return ([], [], ends) if anew is None else (anew.tokens, anew.log_probs, ends)
