"""Makes vLLM draw carried tokens (from before an abort) again while it reads them as the end of a
prompt.

vLLM computes logits after a prompt's last token only. So a method of its model runner is wrapped:
after each step, the carried tokens that the step has read are drawn from the hidden states before
them, with the random numbers that plain generation has there (`Anew`). A long prompt is read in
several steps, and from its beginning if the request was preempted.

The wrapped method is not a public interface: `setup.TESTED` says which versions have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollpacker.engines.embedded.extend import DRAW_LOGITS
from rollpacker.engines.vllm.draws import NUMBER, Anew, Draw, Draws, Settings

RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
"""vLLM's class of model runners that this code is written for. vLLM's runner for CPUs is a
subclass; its second runner, in `vllm.v1.worker.gpu`, is not."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""The environment variable that makes vLLM choose `RUNNER` when its value is 0."""


def watch(worker: Any, draws: Draws) -> str | None:
    """Make the model runner of one of vLLM's workers draw again the carried tokens (from before an
    abort) of the requests in `draws`. Returns None, or a sentence that says why that cannot be
    done: the runner is of another class than this code is written for."""
    runner = worker.model_runner
    classes = [f"{one.__module__}.{one.__qualname__}" for one in type(runner).__mro__]
    if RUNNER not in classes:
        return (
            f"vLLM has started with the model runner {classes[0]}, and RollPacker has code for "
            f"{RUNNER} alone: {RUNNER_VARIABLE}=0 makes vLLM choose that one, if it is set before "
            "vLLM is imported"
        )
    of_prompts = runner._get_prompt_logprobs_dict

    def also(hidden_states: Tensor, num_scheduled: Mapping[str, int]) -> Any:
        _draw_anew(runner, draws, hidden_states, num_scheduled)
        return of_prompts(hidden_states, num_scheduled)

    runner._get_prompt_logprobs_dict = also
    return None


def _draw_anew(
    runner: Any, draws: Draws, hidden_states: Tensor, num_scheduled: Mapping[str, int]
) -> None:
    """Draw again the carried tokens (from before an abort) that vLLM's step has read, from the
    hidden states before them. `hidden_states` [tokens of the step, hidden]. `num_scheduled`: vLLM
    request's id to the number of its tokens in the step."""
    found: list[_Piece] = []
    for name, num_tokens in num_scheduled.items():
        state = runner.requests[name]
        draw = draws.by_number[state.sampling_params.extra_args[NUMBER]]
        anew = draw.anew
        if anew is None or len(anew.tokens) == draw.offset:
            continue
        # The first token to draw comes from the state after the prompt without what was carried.
        before = len(state.prompt_token_ids) - draw.offset - 1
        begin, end = state.num_computed_tokens, state.num_computed_tokens + num_tokens
        place = len(anew.tokens)
        count = min(end - before, draw.offset) - place
        if count > 0:
            assert begin <= before + place, "vLLM has read carried tokens from its prefix cache"
            row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
            found.append(_Piece(draw, anew, place, count, row + before + place - begin))
    if found:
        _draw_all(runner, found, hidden_states)


class _Piece(NamedTuple):
    """Carried tokens (from before an abort) of one request that vLLM's current step has read."""

    draw: Draw
    anew: Anew
    place: int
    """Index in the response of the first of these tokens."""
    num_tokens: int
    row: int
    """Index in the step's hidden states of the one that gives the first of these tokens' logits."""


def _draw_all(runner: Any, found: list[_Piece], hidden_states: Tensor) -> None:
    device, size = hidden_states.device, runner.input_batch.vocab_size
    settings = Settings([one.draw.sampling for one in found], size, device)
    keys = [key for one in found for key in one.anew.keys[one.place : one.place + one.num_tokens]]
    all_keys = torch.tensor(keys, device=device)
    places = torch.cat([torch.arange(one.place, one.place + one.num_tokens) for one in found])
    places = places.to(device)
    rows = torch.cat([torch.arange(one.row, one.row + one.num_tokens) for one in found]).to(device)
    counts = torch.tensor([one.num_tokens for one in found])
    requests = torch.arange(len(found)).repeat_interleave(counts).to(device)
    tokens: list[int] = []
    log_probs: list[float] = []
    at_once = max(1, DRAW_LOGITS // size)
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        logits = runner.model.compute_logits(hidden_states[rows[part]])
        drawn = settings.draw(logits, all_keys[part], places[part], requests[part])
        tokens += drawn[0].tolist()
        log_probs += drawn[1].tolist()
    start = 0
    for one in found:
        one.anew.tokens += tokens[start : start + one.num_tokens]
        one.anew.log_probs += log_probs[start : start + one.num_tokens]
        start += one.num_tokens
