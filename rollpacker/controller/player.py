"""Episodes under way: a sample's tokens and messages, and its turns with an environment. Knows
neither the core nor the bus: training and evaluation play alike."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollpacker.core.acting import TurnLimits
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.trajectory import Dialogue, Segment, Trajectory
from rollpacker.environments.environment import (
    Answered,
    Begun,
    Environments,
    Episode,
    Lost,
    Message,
)
from rollpacker.rollout.engine import GenerationRequest, Response, SamplingParams
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Play:
    """One sample's episode so far."""

    sample: SampleId
    row: PromptRow
    trajectory: Trajectory
    prompt: tuple[Message, ...] | None = None
    """What the environment said first. None: the row's own prompt is it."""
    is_begun: bool = False
    """The environments know of it."""
    said: list[Message] = field(default_factory=list)
    """The model's messages, by turn, as far as they were given to the environment."""
    drawn: tuple[int, ...] = ()
    """The tokens of the latest turn."""
    num_turns: int = 0
    """Of the model."""
    messages: list[Message] = field(default_factory=list)
    """All behind the prompt."""
    rewards: list[float | None] = field(default_factory=list)
    """The environment's, by turn."""
    seconds: float = 0.0
    """Of the environment."""
    metrics: Counter[str] = field(default_factory=Counter)
    version: int = 0
    """Of the weights that drew it."""
    kept_tokens: int = 0
    """Of what stood before its turns: tokens that the engine had kept since an earlier one ..."""
    recomputed_tokens: int = 0
    """... and that it had to compute again."""

    def heard(self, response: Response) -> None:
        """The engine has drawn the next turn."""
        self.trajectory = self.trajectory.and_then(Segment(response.tokens, response.log_probs))
        self.drawn, self.version = response.tokens, response.version
        self.num_turns += 1

    def count_kept(self, num_reused: int) -> None:
        """The next turn was drawn, with so many tokens before it that the engine had kept. The
        first one's are nobody's to keep."""
        if self.num_turns:
            before = len(self.trajectory.prompt) + len(self.trajectory.tokens) - num_given(self)
            kept = min(num_reused, before - 1)  # the latest drawn one was never fed
            self.kept_tokens += kept
            self.recomputed_tokens += before - 1 - kept

    def request(self, sampling: SamplingParams, noise: SampleId | None) -> GenerationRequest:
        """For the engine: the next turn."""
        before = self.trajectory
        return GenerationRequest(
            sample=self.sample,
            prompt_tokens=before.prompt + before.tokens,
            sampling=sampling,
            noise=noise,
            turn=self.num_turns + 1,
        )

    def response(self, reason: str) -> Response:
        """The whole trajectory, ended for that reason. What was given behind its last turn is no
        part of it."""
        segments = self.trajectory.segments
        if segments and not segments[-1].is_sampled:
            segments = segments[:-1]
        whole = replace(self.trajectory, segments=segments)
        return Response(
            sample=self.sample,
            prompt_tokens=whole.prompt,
            tokens=whole.tokens,
            log_probs=tuple(value for turn in whole.turns for value in turn.log_probs or ()),
            finish_reason=reason,
            version=self.version,
            given=whole.given,
        )


class Player:
    """Plays turns with the environments of a run. One event loop; a sample's calls one after
    another."""

    def __init__(
        self,
        environments: Environments,
        dialogue: Dialogue,
        *,
        seed: int,
        limits: TurnLimits,
        timeout_s: float,
        max_prompt_tokens: int,
    ) -> None:
        """`limits`: of trajectories; the core has the same. `timeout_s`: of an answer, for who
        plays without the core. `max_prompt_tokens`: of a prompt that an environment says."""
        self.environments = environments
        self.limits = limits
        self.timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._dialogue = dialogue
        self._seed = seed
        self._prompts: dict[PromptId, tuple[int, ...]] = {}
        """What the environments made of prompts in this round: that of their first sample."""
        self._warn_once = WarnOnce(logger)

    def new(self, sample: SampleId, row: PromptRow) -> Play:
        """An episode whose prompt, unless the environments say another one, is the row's."""
        return Play(sample, row, Trajectory(row.tokens))

    def bounded(self, play: Play, request: GenerationRequest) -> GenerationRequest:
        """With as many tokens as are left of the trajectory's, one at least; kept by the engine
        unless it is the last turn that there can be."""
        max_turns, most = self.limits.max_turns, self.limits.max_trajectory_tokens
        request = replace(request, keep=max_turns is None or play.num_turns + 1 < max_turns)
        if most is None:
            return request
        left = max(most - len(play.trajectory.tokens), 1)
        sampling = request.sampling
        if left >= sampling.max_response_tokens:
            return request
        return replace(request, sampling=replace(sampling, max_response_tokens=left))

    async def begin(self, play: Play, *, timeout_s: float | None = None) -> Begun | Lost:
        """Have the environments begin the episode, and take the prompt that they say."""
        sample = play.sample
        row = {**play.row.columns, "prompt": play.row.prompt}
        begun = await self.environments.begin(
            sample, row, seed=seed_of(self._seed, sample.prompt), timeout_s=timeout_s
        )
        if isinstance(begun, Lost):
            return begun
        play.is_begun = True
        if begun.messages is not None and not play.num_turns:
            try:
                prompt = self._dialogue.prompt(begun.messages)
            except ValueError as error:
                return Lost(reason=str(error), cause="environment")
            if len(prompt) > self._max_prompt_tokens:
                most = f"data.max_prompt_tokens={self._max_prompt_tokens}"
                reason = f"it says a prompt of {len(prompt)} tokens, more than {most}"
                return Lost(reason=reason, cause="environment")
            play.trajectory, play.prompt = Trajectory(prompt), begun.messages
            if self._prompts.setdefault(sample.prompt, prompt) != prompt:
                self._warn_once(
                    "the environment begins otherwise for samples of one prompt, which are compared"
                    " with each other: let `reset` draw by row['seed'] alone"
                )
        return begun

    async def act(
        self, play: Play, turn: int, *, anew: bool = False, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give the message of this turn, the latest, to the environment; what it answers stands
        behind the trajectory, unless the episode is over. `anew`: the episode was lost, and is
        played again up to here first."""
        assert turn == play.num_turns, f"{play.sample}: turn {turn} of {play.num_turns}"
        if anew or not play.is_begun:
            begun = await self.begin(play, timeout_s=timeout_s)
            if isinstance(begun, Lost):
                return begun
            for number, message in enumerate(play.said[: turn - 1], start=1):
                again = await self.environments.act(
                    play.sample, number, message, timeout_s=timeout_s
                )
                if isinstance(again, Lost):
                    return again
        if len(play.said) < turn:
            play.said.append(self._dialogue.message(play.drawn, turn))
        message = play.said[-1]
        answer = await self.environments.act(play.sample, turn, message, timeout_s=timeout_s)
        if isinstance(answer, Lost):
            return answer
        if not (answer.done or answer.truncated):
            try:
                given = self._dialogue.appended(answer.messages, play.drawn)
            except ValueError as error:
                return Lost(reason=str(error), cause="environment")
            play.trajectory = play.trajectory.and_then(Segment(given))
        play.messages += [message, *answer.messages]
        play.rewards.append(answer.reward)
        play.seconds += answer.seconds
        play.metrics.update(answer.metrics)
        return answer

    def episode(self, play: Play) -> Episode:
        """What it came to. A turn that was cut off is a message all the same, which no environment
        was given."""
        messages = list(play.messages)
        if len(play.said) < play.num_turns:
            messages.append(self._dialogue.message(play.drawn, play.num_turns))
        return Episode(
            prompt=play.prompt,
            messages=tuple(messages),
            rewards=tuple(play.rewards),
            environment_s=play.seconds,
            metrics=dict(play.metrics),
        )

    def end(self, play: Play) -> None:
        """Nobody needs the episode any more. Also of one that did not begin, or was lost: what is
        left of it goes."""
        play.is_begun = False
        self.environments.end(play.sample)

    def forget_prompts(self) -> None:
        """A step is over."""
        self._prompts.clear()


def num_given(play: Play) -> int:
    """Tokens that stand behind the latest turn."""
    segments = play.trajectory.segments
    return len(segments[-1].tokens) if segments and not segments[-1].is_sampled else 0


def seed_of(seed: int, prompt: PromptId) -> int:
    """What the environments of a prompt draw by, whichever of its samples, in each attempt alike:
    31 bits, which everybody's generators take."""
    digest = hashlib.blake2b(f"{seed}|{prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def ends_of(plays: Sequence[Play]) -> dict[str, float]:
    """Means over these episodes: turns, seconds of the environment, and what environments count."""
    if not plays:
        return {}
    count = len(plays)
    metrics = Counter[str]()
    for play in plays:
        metrics.update(play.metrics)
    return {
        "episodes/turns/mean": sum(play.num_turns for play in plays) / count,
        "episodes/turns/max": float(max(play.num_turns for play in plays)),
        "episodes/environment_s/mean": sum(play.seconds for play in plays) / count,
        "episodes/environment_s/max": max(play.seconds for play in plays),
        "episodes/kept_tokens/mean": sum(play.kept_tokens for play in plays) / count,
        "episodes/recomputed_tokens/mean": sum(play.recomputed_tokens for play in plays) / count,
        **{name: value / count for name, value in sorted(metrics.items())},
    }
