"""Makes vLLM draw carried tokens (from before an abort) again while it reads them as the end of a
prompt.

vLLM computes logits after a prompt's last token only. So a method of its model runner is wrapped:
after each step, the carried tokens that the step has read are drawn from the hidden states before
them, with the random numbers that plain generation has there (`Anew`). A long prompt is read in
several steps, and from its beginning if the request was preempted.

vLLM has two classes of model runners, with a method for each of the two kinds of noise. The wrapped
methods are no public interface: `setup.TESTED` says which versions have them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollpacker.engines.embedded.extend import DRAW_LOGITS
from rollpacker.engines.vllm.draws import DRAW, NUMBER, Anew, Draw, Draws, Settings

RUNNERS = {
    "rollpacker": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
"""vLLM's class of model runners that draws with each noise (`EngineConfig.noise`). vLLM's runners
for CPUs are subclasses of these."""
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""The environment variable that makes vLLM choose a runner: 0 the first of `RUNNERS`, 1 the
second."""


def watch(worker: Any, draws: Draws) -> str | None:
    """Make the model runner of one of vLLM's workers draw again the carried tokens (from before an
    abort) of the requests in `draws`. Returns None, or a sentence that says why that cannot be
    done: the runner is of another class than the noise needs."""
    runner, noise = worker.model_runner, draws.noise
    classes = [f"{one.__module__}.{one.__qualname__}" for one in type(runner).__mro__]
    if RUNNERS[noise] not in classes:
        return (
            f"vLLM has started with the model runner {classes[0]}, and RollPacker has code for "
            f"{RUNNERS[noise]} alone where rollout.engine.noise is {noise}: "
            f"{RUNNER_VARIABLE}={int(noise == 'vllm')} makes vLLM choose that one, if it is set "
            "before vLLM is imported"
        )
    (_watch_second if noise == "vllm" else _watch_first)(runner, draws)
    return None


def _watch_first(runner: Any, draws: Draws) -> None:
    of_prompts = runner._get_prompt_logprobs_dict

    def also(hidden_states: Tensor, num_scheduled: Mapping[str, int]) -> Any:
        found: list[_Piece] = []
        for name, num_tokens in num_scheduled.items():
            state = runner.requests[name]
            given = state.sampling_params.extra_args or {}
            if (draw := draws.by_number.get(given.get(NUMBER, ""))) is None:
                continue
            row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[name]])
            begin, length = state.num_computed_tokens, len(state.prompt_token_ids)
            found += _pieces(draw, len(found), row, begin, num_tokens, length)
        if found:
            size = runner.input_batch.vocab_size
            settings = Settings([one.draw.sampling for one in found], size, hidden_states.device)

            def drawn(logits: Tensor, column: Columns) -> tuple[Tensor, Tensor]:
                return settings.draw(logits, column["key"], column["place"], column["owner"])

            _draw_all(found, hidden_states, size, runner.model.compute_logits, drawn)
        return of_prompts(hidden_states, num_scheduled)

    runner._get_prompt_logprobs_dict = also


def _watch_second(runner: Any, draws: Draws) -> None:
    worker, watched = runner.prompt_logprobs_worker, dict[str, Draw]()
    add, remove, of_prompts = (
        worker.add_request,
        worker.remove_request,
        worker.compute_prompt_logprobs,
    )

    def add_also(name: str, slot: int, params: Any) -> None:
        given = params.extra_args or {}
        if DRAW in given:
            watched[name] = draws.by_number.setdefault(given[NUMBER], given[DRAW])
        add(name, slot, params)

    def remove_also(name: str) -> None:
        watched.pop(name, None)
        remove(name)

    def also(logits_of: LogitsOf, hidden_states: Tensor, batch: Any, *more: Any) -> Any:
        found: list[_Piece] = []
        for index, name in enumerate(batch.req_ids if watched else ()):
            if name in watched:
                slot, row, begin, num_tokens = (
                    int(column[index])
                    for column in (
                        batch.idx_mapping_np,
                        batch.query_start_loc_np,
                        batch.num_computed_prefill_tokens_np,
                        batch.num_scheduled_tokens,
                    )
                )
                length = int(runner.req_states.prompt_len.np[slot])
                found += _pieces(watched[name], slot, row, begin, num_tokens, length)
        if found:
            drawn = functools.partial(_drawn_as_by, runner.sampler)
            _draw_all(found, hidden_states, runner.vocab_size, logits_of, drawn)
        return of_prompts(logits_of, hidden_states, batch, *more)

    worker.add_request, worker.remove_request = add_also, remove_also
    worker.compute_prompt_logprobs = also


def _drawn_as_by(sampler: Any, logits: Tensor, column: Columns) -> tuple[Tensor, Tensor]:
    """Draw a token per row of logits as the second runner's sampler draws it in plain generation:
    by vLLM's own functions, with the parameters of the request in slot `owner`. Returns tokens and
    log-probabilities [rows]."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    states, slots = sampler.sampling_states, column["owner"]
    about = slots.to(torch.int32), slots.cpu().numpy()
    logits = logits.float()
    states.apply_temperature(logits, *about)
    logits = states.apply_top_k_top_p(logits, *about)
    tokens = gumbel_sample(
        logits,
        torch.arange(len(slots), dtype=torch.int32, device=slots.device),
        states.temperature.gpu[slots],
        column["key"],
        column["position"],
        apply_temperature=False,
        is_drafting=False,
        use_fp64=sampler.use_fp64_gumbel,
    )
    return tokens, compute_token_logprobs(logits, tokens[:, None])[:, 0]


class _Piece(NamedTuple):
    """Carried tokens (from before an abort) of one request that vLLM's current step has read."""

    draw: Draw
    anew: Anew
    owner: int
    """Number by which the runner finds the request's parameters."""
    num_tokens: int
    place: int
    """Index in the response of the first of these tokens."""
    position: int
    """Position, counted from the prompt's first token, of the token before it."""
    row: int
    """Index in the step's hidden states of the one that gives the first of these tokens' logits."""

    def lines(self) -> Iterator[tuple[int, ...]]:
        """A line of `COLUMNS` for each token."""
        for n, key in enumerate(self.anew.keys[self.place : self.place + self.num_tokens]):
            yield key, self.place + n, self.position + n, self.row + n, self.owner


def _pieces(
    draw: Draw, owner: int, row: int, begin: int, num_tokens: int, length: int
) -> list[_Piece]:
    """What is to be drawn again of a request of which vLLM's step has read `num_tokens` tokens from
    position `begin` on: one piece or none. `row`: index of the first in the step's hidden states.
    `length`: number of tokens of the request's prompt, which ends with the carried ones."""
    anew = draw.anew
    if anew is None or len(anew.tokens) == draw.offset:
        return []
    # The first token to draw comes from the state after the prompt without what was carried.
    before, place = length - draw.offset - 1, len(anew.tokens)
    count = min(begin + num_tokens - before, draw.offset) - place
    if count <= 0:
        return []
    position = before + place
    assert begin <= position, "vLLM has read carried tokens from its prefix cache"
    return [_Piece(draw, anew, owner, count, place, position, row + position - begin)]


COLUMNS = ("key", "place", "position", "row", "owner")
Columns = Mapping[str, Tensor]
"""By name of `COLUMNS`, int64 [tokens]: a fact about each of some tokens that are drawn again."""
LogitsOf = Callable[[Tensor], Tensor]
"""Function that gives the logits [rows, vocabulary] of hidden states [rows, hidden]."""


def _draw_all(
    found: Sequence[_Piece],
    hidden_states: Tensor,
    vocabulary_size: int,
    logits_of: LogitsOf,
    drawn: Callable[[Tensor, Columns], tuple[Tensor, Tensor]],
) -> None:
    """Draw these pieces' tokens again, some at a time, and note them. `hidden_states` [tokens of
    the step, hidden]. `drawn` draws a token per row of logits."""
    lines = [line for one in found for line in one.lines()]
    columns = torch.tensor(lines, device=hidden_states.device).T.contiguous()
    tokens: list[int] = []
    log_probs: list[float] = []
    at_once = max(1, DRAW_LOGITS // vocabulary_size)
    for start in range(0, len(lines), at_once):
        part = columns[:, start : start + at_once]
        column = dict(zip(COLUMNS, part, strict=True))
        new = drawn(logits_of(hidden_states[column["row"]]), column)
        tokens += new[0].tolist()
        log_probs += new[1].tolist()
    start = 0
    for one in found:
        one.anew.tokens += tokens[start : start + one.num_tokens]
        one.anew.log_probs += log_probs[start : start + one.num_tokens]
        start += one.num_tokens
