"""Drafts of turns: tokens of deferred trajectories, for an engine to draw anew in the next launch.

The episode is played anew. As long as all that came behind the prompt is what came there before,
each turn's request has the tokens that stood there as drafts, which the engine draws anew; from the
first difference on no draft is used. So a trajectory is the one that it would be without drafts,
whatever its environment answers.

Once stopped, a trajectory leaves what it has by then, unless that is only the beginning of what its
launch began with: then that stays.
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
    """Tokens that an earlier launch of the sample left, and how far this launch drew the same
    tokens."""

    kept: KeptTokens
    retracing: Retracing

    def drafts(self, so_far: tuple[int, ...], limit: int) -> Carried | None:
        """Drafts for the turn that begins after the tokens `so_far`, at most `limit` of them. None
        if there are none, as after the first difference."""
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
    """The drafts (tokens of an earlier launch) for a step's samples. Used under the bus's lock."""

    def __init__(self, carried: CarriedTokens) -> None:
        self._carried = carried
        self._paths: dict[SampleId, Path] = {}
        self._cancelled: dict[SampleId, Play] = {}
        """Episodes of cancelled samples, of which an engine may still report tokens."""

    def launched(self, request: GenerationRequest) -> GenerationRequest:
        """Returns the request of a sample's first turn, with drafts if an earlier launch left
        tokens."""
        if request.carried is None:
            return request
        kept = self._carried.taken_up(request.sample)
        path = self._paths[request.sample] = Path(kept, Retracing(len(kept.tokens)))
        return replace(request, carried=path.drafts((), request.sampling.max_response_tokens))

    def further(self, request: GenerationRequest, play: Play) -> GenerationRequest:
        """Returns the request of the sample's next turn, with drafts if there are any."""
        path = self._paths.get(request.sample)
        if path is None:
            return request
        limit = request.sampling.max_response_tokens
        return replace(request, carried=path.drafts(play.trajectory.tokens, limit))

    def play_of(self, sample: SampleId) -> Play | None:
        """The episode of a cancelled sample. None if the sample was not cancelled."""
        return self._cancelled.get(sample)

    def drawn(self, event: SampleGenerated, play: Play, response: Response) -> None:
        """Note that an engine has generated a turn, which is not added to the episode yet."""
        path = self._paths.get(event.sample)
        if path is not None:
            start = len(play.trajectory.tokens)
            path.retracing.drawn(start, event.num_tokens, event.num_kept)
        # It was told to stop, and had just come to its end. In a first turn no episode is open that
        # could be cancelled.
        if event.sample in self._cancelled or self._carried.is_deferred(event.sample.prompt):
            self._leave(play, response)

    def aborted(self, event: SampleAborted, play: Play | None, response: Response | None) -> None:
        """Note that an engine has stopped a turn before its end; keep the tokens that go beyond
        those of the earlier launch."""
        play = self._cancelled.get(event.sample) or play
        if play is None or response is None:
            return
        path = self._paths.get(event.sample)
        retracing = Retracing() if path is None else path.retracing
        start = len(play.trajectory.tokens)
        if retracing.stopped(start, event.num_tokens, event.num_kept):
            self._leave(play, response)

    def cancelled(self, plays: Iterable[Play]) -> None:
        """Keep the tokens of these episodes, which are not needed any more. An engine may still
        report tokens of their turns."""
        if not self._carried.carries:
            return
        for play in plays:
            self._cancelled[play.sample] = play
            self._leave(play)

    def concluded(self, response: Response) -> None:
        """Keep the response of a trajectory that is complete."""
        self._carried.left(response)

    def settle(self) -> None:
        """Forget all drafts at the end of a step."""
        self._paths.clear()
        self._cancelled.clear()

    def _leave(self, play: Play, turn: Response | None = None) -> None:
        """Keep the episode's tokens for the next launch, with those of the turn at hand, unless
        they are only the beginning of what this launch began with."""
        path = self._paths.get(play.sample)
        if path is not None and path.retracing.goes_on:
            return
        if turn is not None:
            segment = Segment(turn.tokens, turn.log_probs)
            play = replace(play, trajectory=play.trajectory.and_then(segment))
        response = play.response("aborted")
        if response.tokens:
            self._carried.left(response)
