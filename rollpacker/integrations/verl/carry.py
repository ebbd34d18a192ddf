"""A response whose tokens of an earlier step are carried on (`carry=exact`), by several requests to
verl's vLLM server one after the other:

    verify     the prompt and the carried tokens are read, and drawn again on the way
               (engines/vllm/verify.py): one request, which generates a single token
    generate   from the first token that came out differently, if any, to the end
    once more  from a place before, if the length is refused

Which tokens are kept, and which lengths are refused, is as in RollPacker's engine (`Live`).
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.core.events import SampleGenerated
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.engines.loop import abortion
from rollpacker.engines.vllm.draws import DRAW, NUMBER, written
from rollpacker.engines.vllm.live import Live

WORKER = "rollpacker.integrations.verl.vllm_worker"
ENGINE = {
    "logits_processors": [f"{WORKER}:DrawTokens"],
    "worker_extension_cls": f"{WORKER}.Extension",
    "async_scheduling": False,
    "logprobs_mode": "raw_logprobs",
}
"""Arguments of vLLM's engine. The tokens are drawn before vLLM's own sampler, which needs all that
were drawn before, and whose processed log-probs are those of a token that is left alone."""

Ask = Callable[[list[int], dict[str, Any]], Awaitable[Any]]
"""Has a server generate after the prompt and these tokens, with these sampling parameters. Returns
verl's `TokenOutput`, aborted if the response was stopped."""
Anew = tuple[Sequence[int], Sequence[float], Sequence[int]]
"""What `vllm_worker.Extension.take_anew` returns."""


@dataclass(slots=True)
class Said:
    """What `Live` reads of vLLM's record of a request."""

    output_token_ids: list[int]
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)


async def generated(
    request: GenerationRequest,
    version: int,
    ask: Ask,
    take_anew: Callable[[str | None], Awaitable[Anew]],
) -> tuple[EngineOutput, Any]:
    """Generate a response of a single turn. `take_anew` is called with the name of a request that
    drew carried tokens again, or None. Returns the response's end, as RollPacker's engines report
    it under weights of this `version`, and verl's output with all of its tokens; None if it was
    stopped."""
    live, number = Live(Pending(request, 0)), 0
    while True:
        given, verifies, number = live.begin(), live.is_unseen, number + 1
        name = f"{request.sample} {number}"
        most = 1 if verifies else live.most_tokens - len(given)
        output = await ask(
            given,
            {
                "max_tokens": most,
                "extra_args": {NUMBER: name, DRAW: written(live.draw)},
                # What comes from the prefix cache is not read, and so not drawn anew.
                "skip_reading_prefix_cache": verifies,
            },
        )
        live.request = Said(list(output.token_ids), max(output.num_preempted or 0, 0))
        live.draw.log_probs = list(output.log_probs or [0.0] * len(output.token_ids))
        is_stopped = output.stop_reason in ("aborted", "abort")
        tokens, log_probs, ends = await take_anew(name if verifies else None)
        count = None
        if verifies and live.request.num_output_tokens:
            assert live.draw.anew is not None
            live.draw.anew.tokens, live.draw.anew.log_probs = list(tokens), list(log_probs)
            count = live.look(functools.partial(_ends, ends))
        live.leave()
        if count is not None:
            live.cut(count)
        if is_stopped:
            response = live.response("aborted", version)
            return abortion(live.entry, response, **live.facts)[1], None
        has_stopped = live.given[-1] in ends
        is_over = has_stopped or len(live.given) >= live.entry.limit
        if not live.draw_again(stopped=has_stopped) and is_over:
            break
    output.token_ids = live.given
    output.log_probs = None if output.log_probs is None else live.log_probs
    response = live.response("stop" if has_stopped else "length", version)
    event = SampleGenerated(
        time_s=0.0,
        sample=response.sample,
        num_tokens=len(response.tokens),
        finish_reason=response.finish_reason,
        version=version,
        **live.facts,
    )
    return EngineOutput(event, response), output


def _ends(ends: Sequence[int], tokens: Sequence[int], count: int) -> bool:
    return count > 0 and tokens[count - 1] in ends
