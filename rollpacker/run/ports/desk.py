"""The desk keeps what is known of each sample, from its response to the commit of its step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Episode, Lost
from rollpacker.rewards.reward import Scored, TurnRewards
from rollpacker.trainer.trainer import TokenScores, TrainSample


@dataclass(slots=True)
class KnownSample:
    """What the controller keeps of one sample: its response, verdict, episode and training
    sample."""

    response: Response
    completion: str | None = None
    """The text that the rewards were given. None before any reward was asked."""
    verdict: Scored | None = None
    """The rewards' verdict. None if there is none yet, or the rewards had none to give."""
    episode: Episode | None = None
    """Messages and rewards of a sample of several turns. None for a single response."""
    finish: Future[Episode | Lost] | None = None
    """The episode with its final reward, once the environment gave that. None if none is asked
    for."""
    check_s: float | None = None
    """Seconds that the check took, with a verdict or without. None if no check has ended."""
    scores: TokenScores | None = None
    """Log-probs and values that other models gave the tokens. None if no model was asked."""
    streamed: TrainSample | None = None
    """The sample, with a provisional weight, as the step's gradient holds it. None if the gradient
    does not hold the sample yet."""


class Desk:
    """What is known of each sample. The engine's thread adds responses, the event loop the rest.
    All samples are gone through only while the engine is empty, or under the bus's lock."""

    def __init__(self) -> None:
        self._known: dict[SampleId, KnownSample] = {}
        self.round_kind = ""
        """Kind of the step's first round, such as short or long; empty before there is a round."""

    def lay_down(self, response: Response) -> None:
        self._known[response.sample] = KnownSample(response)

    def __getitem__(self, sample: SampleId) -> KnownSample:
        return self._known[sample]

    def get(self, sample: SampleId) -> KnownSample | None:
        """The record of the sample. None if it was forgotten, its step being over."""
        return self._known.get(sample)

    def scored_groups(
        self, groups: Sequence[Sequence[SampleId]]
    ) -> list[list[tuple[Response, float]]]:
        """Responses with their rewards, by group. Every one of these samples has a verdict."""
        return [[self._scored(sample) for sample in group] for group in groups]

    def reward_parts(
        self, groups: Sequence[Sequence[SampleId]]
    ) -> dict[SampleId, Mapping[str, float | None]]:
        """The value that each reward gave, by its name, for these samples with a verdict."""
        known = {sample: self._known[sample].verdict for group in groups for sample in group}
        return {sample: verdict.parts for sample, verdict in known.items() if verdict is not None}

    def turn_rewards(self, groups: Sequence[Sequence[SampleId]]) -> dict[SampleId, TurnRewards]:
        """The rewards of the turns of these samples, without the samples of a single turn."""
        known = {sample: self._known[sample] for group in groups for sample in group}
        return {
            sample: TurnRewards(one.episode.num_drawn, one.verdict.turns)
            for sample, one in known.items()
            if one.episode is not None and one.verdict is not None
        }

    def logged(self, groups: Sequence[Sequence[SampleId]]) -> dict[str, float]:
        """Values that rewards logged of these samples, by name: each the mean over the samples that
        have it."""
        values: dict[str, list[float]] = {}
        for verdict in (self._known[sample].verdict for group in groups for sample in group):
            for name, value in ({} if verdict is None else verdict.metrics).items():
                values.setdefault(name, []).append(value)
        return {name: math.fsum(of) / len(of) for name, of in values.items()}

    def streamed(self) -> dict[SampleId, TrainSample]:
        """The samples that the step's gradient holds already."""
        return {s: k.streamed for s, k in self._known.items() if k.streamed is not None}

    def forget_gradients(self) -> None:
        """Note that the step's gradient was lost, with all samples that it held."""
        for known in self._known.values():
            known.streamed = None

    def slowest(self, count: int) -> list[SampleId]:
        """The samples whose checks took longest, the longest first."""
        seconds = {s: k.check_s for s, k in self._known.items() if k.check_s is not None}
        return sorted(seconds, key=lambda sample: (-seconds[sample], sample))[:count]

    def forget(self, waiting: Iterable[SampleId]) -> None:
        """Forget all samples at the end of a step, but the responses of `waiting`, whose checks are
        still to be handed over."""
        kept = {sample: self._known[sample] for sample in waiting}
        self._known = {s: _waiting(one) for s, one in kept.items()}
        self.round_kind = ""

    def _scored(self, sample: SampleId) -> tuple[Response, float]:
        known = self._known[sample]
        assert known.verdict is not None, f"{sample} has no verdict, and is trained on"
        return known.response, known.verdict.value


def _waiting(known: KnownSample) -> KnownSample:
    return KnownSample(known.response, episode=known.episode, finish=known.finish)
