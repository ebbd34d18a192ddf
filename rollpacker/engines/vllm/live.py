"""A response while vLLM generates it, perhaps in several requests to vLLM one after the other.

    begin       vLLM gets the prompt and the response's tokens; carried tokens (from before an
                abort) that are to be verified are drawn again (engines/vllm/verify.py)
    look        once vLLM's first new token is there: how many carried tokens came out the same?
    leave       the response has left vLLM: its tokens are kept here
    cut, begin  once more, if a carried token came out differently, or the length is refused

Which carried tokens are kept, and which lengths are refused, is as in engines/embedded/extend.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollpacker.engines.embedded.extend import MAX_REDRAWS
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import Carried, Response
from rollpacker.engines.vllm.draws import Anew, Draw

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Live:
    """One response while vLLM generates it, perhaps in several requests, one after another."""

    draw: Draw
    request: Request
    """vLLM's own record of the request while vLLM has it, with the tokens generated and the number
    of preemptions."""

    def __init__(self, entry: Pending) -> None:
        carried = entry.request.carried or Carried(tokens=(), log_probs=(), verify=False)
        self.entry = entry
        self.carried = carried
        count = carried.num_verified if carried.verify else len(carried.tokens)
        self.given = list(carried.tokens[:count])
        """The response's tokens when vLLM got its current request, which generates further ones."""
        self.log_probs = list(carried.log_probs[:count])
        """Log-probability of each token in `given`."""
        self.num_kept: int | None = None
        """Number of carried tokens (from before an abort) that came out the same when drawn again.
        None: they have not been drawn again."""
        self.num_redraws = 0
        entry.draw_with(0, entry.carried_redraw(0)[0])
        self.num_preemptions = 0
        """Number of times that vLLM preempted this response in its earlier requests to vLLM."""
        self.num_reused = 0
        """Number of prompt tokens of a later turn that vLLM found in its prefix cache."""

    @property
    def is_unseen(self) -> bool:
        """Whether carried tokens (from before an abort) are not yet drawn again and compared."""
        return self.num_kept is None and self.carried.verify and bool(self.carried.tokens)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the response so far. May be called while vLLM has the response."""
        new = () if self.is_unseen else self.request.output_token_ids
        return (*self.given, *new)

    @property
    def is_broken(self) -> bool:
        """Whether vLLM generated a token of this response from logits that are not numbers. With
        worker processes this is known only when the response has left vLLM."""
        num_new = 0 if self.is_unseen else len(self.request.output_token_ids)
        return any(map(math.isnan, self.draw.log_probs[:num_new]))

    @property
    def first_broken(self) -> int | None:
        """Index of the first token with a NaN log-probability, or None. Called after `leave`."""
        return next((n for n, one in enumerate(self.log_probs) if math.isnan(one)), None)

    # -- vLLM gets it and gives it back ------------------------------------------------------------

    def begin(self) -> list[int]:
        """Make the `Draw` for vLLM's next request, and return the response tokens that are to be
        the end of its prompt. If carried tokens (from before an abort) are to be verified, all but
        the last are: a request must generate something."""
        entry = self.entry
        if not self.is_unseen:
            key = entry.key(entry.redraws[-1][1] if entry.redraws else 0)
            self.draw = Draw(entry.request.sampling, key, offset=len(self.given))
            return self.given
        keys: list[int] = []
        while len(keys) < len(self.given):
            redraw, end = entry.carried_redraw(len(keys))
            keys += [entry.key(redraw)] * (min(end or len(self.given), len(self.given)) - len(keys))
        *before, last = keys
        self.draw = Draw(entry.request.sampling, last, offset=len(before), anew=Anew(before))
        return self.given[:-1]

    def look(self, ends: Callable[[Sequence[int], int], bool]) -> int | None:
        """Compare the carried tokens (from before an abort) with the tokens drawn in their places.
        vLLM's first new token must be there.

        `ends(tokens, count)`: whether the first `count` tokens have just ended the response.
        Returns None if vLLM's request can go on; else the number of tokens that are kept, after
        which a new request must begin.
        """
        anew, carried = self.draw.anew, self.carried.tokens
        assert anew is not None and len(anew.tokens) == self.carried.num_verified - 1
        num_same = 0
        for token, log_prob in zip(anew.tokens, anew.log_probs, strict=True):
            if math.isnan(log_prob):
                # A wrong token may have spoilt it, and those before it too: without it one knows.
                return self._take(num_same, num_same)
            if token != carried[num_same]:
                return self._take(num_same, num_same + 1)
            num_same += 1
            if ends(anew.tokens, num_same):
                return self._take(num_same, num_same)
        self._take(num_same, num_same)
        self.num_kept = num_same + (self.request.output_token_ids[0] == carried[num_same])
        return None

    def _take(self, num_same: int, num_tokens: int) -> int:
        anew = self.draw.anew
        assert anew is not None
        self.num_kept = num_same
        self.given, self.log_probs = anew.tokens[:num_tokens], anew.log_probs[:num_tokens]
        place = 0
        while place <= num_same:
            redraw, end = self.entry.carried_redraw(place)
            self.entry.draw_with(place, redraw)
            place = num_same + 1 if end is None else end
        return num_tokens

    def note_reused(self, num_tokens: int | None) -> None:
        """Note how many of the prompt's tokens vLLM found in its prefix cache. None: unknown."""
        request = self.entry.request
        if request.turn > 1 and num_tokens:
            self.num_reused = min(num_tokens, len(request.prompt_tokens))

    def leave(self) -> None:
        """Add vLLM's new tokens to `given`, once the response has left vLLM."""
        self.num_preemptions += self.request.num_preemptions
        carried, num_kept = self.carried, self.num_kept
        if self.is_unseen:
            self.given, self.log_probs = list(carried.tokens), list(carried.log_probs)
            return
        new = self.request.output_token_ids
        self.given = [*self.given, *new]
        self.log_probs = [*self.log_probs, *self.draw.log_probs[: len(new)]]
        if num_kept is not None and num_kept >= carried.num_verified and not self.num_redraws:
            self.num_kept = carried.num_same(self.given)  # it was generated beyond them

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens beyond the first `num_tokens`."""
        del self.given[num_tokens:], self.log_probs[num_tokens:]

    # -- ends that are not taken -------------------------------------------------------------------

    @property
    def _ceiling(self) -> float:
        ceiling, num_kept = self.carried.ceiling, self.num_kept
        if ceiling is None or num_kept is None or num_kept == len(self.carried.tokens):
            return math.inf
        return ceiling

    @property
    def is_too_long(self) -> bool:
        """Whether the response is longer than `Carried.ceiling` allows, and has not been drawn
        again `MAX_REDRAWS` times yet."""
        return len(self.tokens) > self._ceiling and self.num_redraws < MAX_REDRAWS

    @property
    def most_tokens(self) -> int:
        """Number of tokens with which the response is over, or is found to be too long."""
        ceiling = self._ceiling if self.num_redraws < MAX_REDRAWS else math.inf
        return int(min(self.entry.limit, ceiling + 1))

    def draw_again(self, *, stopped: bool) -> bool:
        """Cut a response that has left vLLM if it is too short or too long, as in
        `Extender.draw_again`. Returns whether it was cut and must go on, with new random numbers.
        `stopped`: whether it ended by itself."""
        count = len(self.given)
        floor = self.carried.floor if self.carried.verify else 0
        is_wrong = (stopped and count <= floor) or count > self._ceiling
        if not is_wrong or self.num_redraws == MAX_REDRAWS:
            return False
        num_kept = -1 if self.num_kept is None else self.num_kept
        start = min(num_kept + 1, count - 1)
        self.num_redraws += 1
        self.entry.redraw_from(start)
        self.cut(start)
        return True

    # -- reports -----------------------------------------------------------------------------------

    @property
    def facts(self) -> dict[str, Any]:
        """Fields of the response's event: numbers of preemptions by vLLM, of carried tokens (from
        before an abort) that came out the same, and of times that tokens were drawn again."""
        return {
            "preemptions": self.num_preemptions,
            "num_kept": self.num_kept,
            "num_redraws": self.num_redraws,
        }

    def response(self, reason: Literal["stop", "length", "aborted"], version: int) -> Response:
        """Return the finished `Response`, once vLLM no longer has it."""
        request = self.entry.request
        return Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(self.given),
            log_probs=tuple(self.log_probs),
            finish_reason=reason,
            version=version,
            redraws=tuple(self.entry.redraws),
        )
