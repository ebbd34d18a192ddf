"""The desk: what the run knows of each sample, from its response until its step is committed."""

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
    """What is known of one sample: its response, and later text, verdict, episode and so on."""

    response: Response
    completion: str | None = None
    """The response's text as the rewards got it. None before any reward was asked."""
    verdict: Scored | None = None
    """The rewards' verdict. None if it is still awaited, or the rewards failed."""
    episode: Episode | None = None
    """Messages and rewards of a sample with several turns. None for a single response."""
    finish: Future[Episode | Lost] | None = None
    """Future of the episode with the final reward of its environment. None if no final reward is
    asked for."""
    check_s: float | None = None
    """Seconds that the rewards took for this sample, whether or not they gave a verdict. None if
    they have not ended."""
    scores: TokenScores | None = None
    """Log-probs and values of the tokens by other models. None if no other model was asked."""
    streamed: TrainSample | None = None
    """The training sample, with a provisional weight, whose gradient was accumulated before the
    step was complete. None if that was not done."""


class Desk:
    """Keeps what is known of each sample, from its response to the end of its step. Engine threads
    add responses, the event loop all else. Methods over all samples are called while no engine
    runs, or under the bus's lock."""

    def __init__(self) -> None:
        self._known: dict[SampleId, KnownSample] = {}
        self.round_kind = ""
        """Kind of the step's first round (batch of generation), such as "short" or "long". Empty
        before the step's first round."""

    def lay_down(self, response: Response) -> None:
        self._known[response.sample] = KnownSample(response)

    def __getitem__(self, sample: SampleId) -> KnownSample:
        return self._known[sample]

    def get(self, sample: SampleId) -> KnownSample | None:
        """Returns what is known of the sample. None if it is not known, or was forgotten when its
        step ended."""
        return self._known.get(sample)

    def scored_groups(
        self, groups: Sequence[Sequence[SampleId]]
    ) -> list[list[tuple[Response, float]]]:
        """Returns (response, reward) of each sample, in the same groups. All must have a
        verdict."""
        return [[self._scored(sample) for sample in group] for group in groups]

    def reward_parts(
        self, groups: Sequence[Sequence[SampleId]]
    ) -> dict[SampleId, Mapping[str, float | None]]:
        """Returns each reward's own value by name, for each of these samples with a verdict."""
        known = {sample: self._known[sample].verdict for group in groups for sample in group}
        return {sample: verdict.parts for sample, verdict in known.items() if verdict is not None}

    def turn_rewards(self, groups: Sequence[Sequence[SampleId]]) -> dict[SampleId, TurnRewards]:
        """Returns the rewards of the turns of those samples that have several turns."""
        known = {sample: self._known[sample] for group in groups for sample in group}
        return {
            sample: TurnRewards(one.episode.num_drawn, one.verdict.turns)
            for sample, one in known.items()
            if one.episode is not None and one.verdict is not None
        }

    def logged(self, groups: Sequence[Sequence[SampleId]]) -> dict[str, float]:
        """Returns the mean of each value that reward functions logged for these samples, by its
        name. Samples for which a value was not logged do not count in its mean."""
        values: dict[str, list[float]] = {}
        for verdict in (self._known[sample].verdict for group in groups for sample in group):
            for name, value in ({} if verdict is None else verdict.metrics).items():
                values.setdefault(name, []).append(value)
        return {name: math.fsum(of) / len(of) for name, of in values.items()}

    def streamed(self) -> dict[SampleId, TrainSample]:
        """Returns the training samples whose gradients were accumulated before the step was
        complete."""
        return {s: k.streamed for s, k in self._known.items() if k.streamed is not None}

    def forget_gradients(self) -> None:
        """Note that the trainer is lost, and with it the gradients accumulated in this step."""
        for known in self._known.values():
            known.streamed = None

    def slowest(self, count: int) -> list[SampleId]:
        """Returns the `count` samples whose rewards took longest, the longest first."""
        seconds = {s: k.check_s for s, k in self._known.items() if k.check_s is not None}
        return sorted(seconds, key=lambda sample: (-seconds[sample], sample))[:count]

    def forget(self, waiting: Iterable[SampleId]) -> None:
        """Forget all samples at the end of a step, except `waiting`: samples that no reward was
        asked for yet. Of these, response and episode stay."""
        kept = {sample: self._known[sample] for sample in waiting}
        self._known = {s: _waiting(one) for s, one in kept.items()}
        self.round_kind = ""

    def _scored(self, sample: SampleId) -> tuple[Response, float]:
        known = self._known[sample]
        assert known.verdict is not None, f"{sample} has no verdict, and is trained on"
        return known.response, known.verdict.value


def _waiting(known: KnownSample) -> KnownSample:
    return KnownSample(known.response, episode=known.episode, finish=known.finish)
