"""Drafts for turns: tokens of a trajectory that an earlier step broke off, to be drawn again.

The episode is played again from its start. While everything after the prompt is as it was, the
request for each turn has the old tokens as drafts, which the engine draws again; from the first
difference on there are no drafts. So the trajectory is the one that it would be without drafts,
whatever the environment answers. A trajectory that is stopped again leaves its tokens for the next
step, unless they only repeat the beginning of the old tokens: then the old ones stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from rollpacker.core.checks.acting import Retracing
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.dialogue.trajectory import Segment
from rollpacker.engines.engine import Carried, GenerationRequest, Response
from rollpacker.run.ports.carried import CarriedTokens, KeptTokens
from rollpacker.run.ports.player import Play


@dataclass(frozen=True, slots=True)
class Path:
    """Tokens of a trajectory from an earlier step, and how far this step has drawn the same ones
    again."""

    kept: KeptTokens
    retracing: Retracing

    def drafts(self, so_far: tuple[int, ...], limit: int) -> Carried | None:
        """Returns drafts (old tokens for the engine to draw again) for the turn that follows the
        tokens `so_far`; `limit`: most tokens of the turn. None if nothing is known of the turn, or
        the trajectory has differed from the old one before."""
        tokens, start = self.kept.tokens, len(so_far)
        if not self.retracing.goes_on or not np.array_equal(tokens[:start], so_far):
            return None
        end = min((first for first, _ in self.kept.given if first >= start), default=len(tokens))
        if any(first <= start < behind for first, behind in self.kept.given):
            return None
        turn = slice(start, min(end, start + limit))
        found = tuple(tokens[turn].tolist())
        return Carried(tokens=found, log_probs=tuple(self.kept.log_probs[turn].tolist()))


class CarriedTurns:
    """Adds an earlier step's tokens of a turn to the turn's request: the engine draws them again,
    and keeps them as far as they come out the same. Used under the bus's lock."""

    def __init__(self, carried: CarriedTokens) -> None:
        self._carried = carried
        self._paths: dict[SampleId, Path] = {}
        self._cancelled: dict[SampleId, Play] = {}
        """Episodes of cancelled samples, of which an engine may still report tokens."""

    def launched(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request for a sample's first turn, with drafts (old tokens to draw again) if
        tokens of an earlier step are kept."""
        if request.carried is None:
            return request
        kept = self._carried.taken_up(request.sample)
        path = self._paths[request.sample] = Path(kept, Retracing(len(kept.tokens)))
        return replace(request, carried=path.drafts((), request.sampling.max_response_tokens))

    def further(self, request: GenerationRequest, play: Play) -> GenerationRequest:
        """Returns the request for a sample's next turn, with drafts (old tokens to draw again) if
        tokens of an earlier step are kept."""
        path = self._paths.get(request.sample)
        if path is None:
            return request
        limit = request.sampling.max_response_tokens
        return replace(request, carried=path.drafts(play.trajectory.tokens, limit))

    def play_of(self, sample: SampleId) -> Play | None:
        """Returns the episode of a cancelled sample, or None for other samples."""
        return self._cancelled.get(sample)

    def drawn(self, event: SampleGenerated, play: Play, response: Response) -> None:
        """Note that an engine has generated a turn, which is added to the episode `play` later."""
        path = self._paths.get(event.sample)
        if path is not None:
            start = len(play.trajectory.tokens)
            path.retracing.drawn(start, event.num_tokens, event.num_kept)
        # It was told to stop, and had just come to its end. In a first turn no episode is open that
        # could be cancelled.
        if event.sample in self._cancelled or self._carried.is_deferred(event.sample.prompt):
            self._leave(play, response)

    def aborted(self, event: SampleAborted, play: Play | None, response: Response | None) -> None:
        """Note that an engine was stopped in the middle of a turn. The episode's tokens are kept
        for a later step, if they are more than a beginning of those kept before."""
        play = self._cancelled.get(event.sample) or play
        if play is None or response is None:
            return
        path = self._paths.get(event.sample)
        retracing = Retracing() if path is None else path.retracing
        start = len(play.trajectory.tokens)
        if retracing.stopped(start, event.num_tokens, event.num_kept):
            self._leave(play, response)

    def cancelled(self, plays: Iterable[Play]) -> None:
        """Keep the tokens of these episodes, whose samples were cancelled, to go on from in a later
        step. The episodes are remembered, as engines may still report tokens of them."""
        if not self._carried.carries:
            return
        for play in plays:
            self._cancelled[play.sample] = play
            self._leave(play)

    def concluded(self, response: Response) -> None:
        """Keep a whole trajectory's tokens, in case its prompt is put off to a later step."""
        self._carried.left(response)

    def settle(self) -> None:
        """End the step: forget all drafts (old tokens to draw again)."""
        self._paths.clear()
        self._cancelled.clear()

    def _leave(self, play: Play, turn: Response | None = None) -> None:
        """Keep the episode's tokens, those of an unfinished `turn` included, unless they only
        repeat the beginning of the tokens kept before."""
        path = self._paths.get(play.sample)
        if path is not None and path.retracing.goes_on:
            return
        if turn is not None:
            segment = Segment(turn.tokens, turn.log_probs)
            play = replace(play, trajectory=play.trajectory.and_then(segment))
        response = play.response("aborted")
        if response.tokens:
            self._carried.left(response)
