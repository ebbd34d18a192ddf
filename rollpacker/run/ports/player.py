"""Plays episodes (samples that take turns with an environment), and keeps the tokens and messages
of each. The core is not used here, so that training and evaluation play alike."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.trajectory import Dialogue, Segment, TooLong, Trajectory
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.environments.environment import (
    Answered,
    Begun,
    Environments,
    Episode,
    Lost,
    Message,
    ToolSchema,
)
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Spent:
    """Seconds and tokens that one episode has taken so far."""

    answer_s: list[float] = field(default_factory=list)
    """Seconds that the environment took to answer each turn."""
    policy_s: list[float] = field(default_factory=list)
    """Seconds that the engine took for each of the model's turns."""
    asked_s: float | None = None
    """When the engine was asked for the current turn (`time.monotonic`). None between turns."""
    kept_tokens: int = 0
    """Number of context tokens, over all turns, that engines had in their caches."""
    recomputed_tokens: int = 0
    """Number of context tokens, over all turns, that engines had to compute again."""

    def ask(self) -> None:
        """Note the time at which an engine is asked for the next turn."""
        self.asked_s = time.monotonic()

    def hear(self) -> None:
        """Note that an engine has finished the turn, and the seconds that this took."""
        self.policy_s.append(0.0 if self.asked_s is None else time.monotonic() - self.asked_s)
        self.asked_s = None


@dataclass(slots=True)
class Play:
    """The state of one sample's episode (all its turns with an environment)."""

    sample: SampleId
    row: PromptRow
    trajectory: Trajectory
    prompt: tuple[Message, ...] | None = None
    """Messages of the prompt that the environment gave. None if the data row's prompt is used."""
    dialogue: Dialogue | None = None
    """Chat format (makes tokens of messages) with tools that this episode alone has. None: the
    format with the tools of all episodes."""
    is_begun: bool = False
    """Whether the environment has begun this episode."""
    said: list[Message] = field(default_factory=list)
    """The model's messages that the environment was given, one per turn."""
    drawn: tuple[int, ...] = ()
    """Tokens that the model generated in the latest turn."""
    num_drawn: list[int] = field(default_factory=list)
    """Number of tokens that the model generated in each turn."""
    num_tokens: int = 0
    """Length of the trajectory in tokens, for limits: all tokens generated and given; or the growth
    of the prompt since the first turn, if that is more."""
    num_given: int = 0
    """Number of tokens that were given to the model after its latest turn."""
    messages: list[Message] = field(default_factory=list)
    """All messages after the prompt, of model and environment."""
    rewards: list[float | None] = field(default_factory=list)
    """Reward that the environment gave each turn; None for a turn without one."""
    spent: Spent = field(default_factory=Spent)
    metrics: Counter[str] = field(default_factory=Counter)
    """Sums of the environment's own metrics over the turns, by name."""
    version: int = 0
    """Version of the weights that generated the latest turn."""

    @property
    def seconds(self) -> float:
        """Seconds that the environment has taken so far, over all turns."""
        return sum(self.spent.answer_s)

    def heard(self, response: Response) -> None:
        """Append a turn that an engine has generated."""
        self.spent.hear()
        self.trajectory = self.trajectory.and_then(Segment(response.tokens, response.log_probs))
        self.drawn, self.version = response.tokens, response.version
        self.num_drawn.append(len(response.tokens))
        self.num_tokens, self.num_given = self.num_tokens + len(response.tokens), 0

    @property
    def num_turns(self) -> int:
        """Number of turns that the model has had."""
        return len(self.num_drawn)

    def grown(self, given: tuple[int, ...]) -> None:
        """Append tokens that are given to the model after its latest turn."""
        self._goes_on(self.trajectory.and_then(Segment(given)), len(given))

    def prompted(self, prompt: tuple[int, ...], given: tuple[int, ...] = ()) -> None:
        """Make `prompt` the whole context of the next turn, where the chat template has changed
        earlier turns. `given`: the part of it that came after the model's latest turn."""
        self._goes_on(self.trajectory.prompted(prompt, given), len(given))

    def overflowed(self, most: int) -> None:
        """Give the trajectory its largest length, `most` tokens, since the environment's answer,
        which does not fit, would exceed it: the episode ends by this limit."""
        self.num_given = max(most - self.num_tokens, 0)
        self.num_tokens += self.num_given

    def _goes_on(self, trajectory: Trajectory, num_given: int) -> None:
        longer = trajectory.num_context - len(trajectory.prompt) - self.num_tokens
        self.num_given = max(num_given, longer)
        self.num_tokens += self.num_given
        self.trajectory = trajectory

    def count_kept(self, num_reused: int) -> None:
        """Count, for the turn just generated, the context tokens that the engine had cached
        (`num_reused`) and those it recomputed. A first turn has none to count."""
        if self.num_turns:
            before = max(self.trajectory.num_context - self.num_given, 1)
            kept = min(num_reused, before - 1)  # the latest drawn one was never fed
            self.spent.kept_tokens += kept
            self.spent.recomputed_tokens += before - 1 - kept

    def request(
        self, sampling: SamplingParams, noise: SampleId | None, *, keep: bool = False
    ) -> GenerationRequest:
        """Returns the request for the next turn. `noise`: the sample whose random numbers draw the
        tokens; None: its own. `keep`: whether the engine keeps its KV cache after the turn, for the
        turn that follows."""
        self.spent.ask()
        return GenerationRequest(
            sample=self.sample,
            prompt_tokens=self.trajectory.context,
            sampling=sampling,
            noise=noise,
            turn=self.num_turns + 1,
            keep=keep,
        )

    def response(self, reason: str) -> Response:
        """Returns the whole trajectory as a response, with `reason` as its finish reason. Tokens
        given to the model after its last turn are left out."""
        whole = self.trajectory.ended()
        return Response(
            sample=self.sample,
            prompt_tokens=whole.prompt,
            tokens=whole.tokens,
            log_probs=whole.log_probs,
            finish_reason=reason,
            version=self.version,
            given=whole.given,
            rewritten=whole.rewritten,
        )


class Player:
    """Plays episodes with a run's environments, on one event loop. Calls for one sample must not
    overlap."""

    def __init__(
        self,
        environments: Environments,
        dialogue: Dialogue,
        *,
        seed: int,
        limits: TurnLimits,
        timeout_s: float,
        max_prompt_tokens: int,
        takes_rewrites: bool = False,
    ) -> None:
        """`limits`: most turns and tokens of a trajectory. `timeout_s`: seconds for an answer in an
        evaluation, and for a final reward. `max_prompt_tokens`: most tokens of an environment's
        prompt. `takes_rewrites`: whether the chat template may change earlier turns; each turn's
        prompt is then made of all messages anew."""
        self.environments = environments
        self.limits = limits
        self.timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._dialogue = dialogue
        self._takes_rewrites = takes_rewrites
        self._seed = seed
        self._prompts: dict[PromptId, tuple[int, ...]] = {}
        """Prompt tokens that the environment gave the first sample of each prompt in this step, to
        be compared with those of its other samples."""
        self._warn_once = WarnOnce(logger)

    def new(self, sample: SampleId, row: PromptRow) -> Play:
        """Returns a new episode with the data row's prompt, which the environment may replace."""
        return Play(sample, row, Trajectory(row.tokens))

    def launched(self, play: Play, request: GenerationRequest) -> GenerationRequest:
        """Returns the core's request for a first turn with the episode's prompt and token limit."""
        play.spent.ask()
        return replace(
            request,
            prompt_tokens=play.trajectory.prompt,
            sampling=self._bounded(play, request.sampling),
            keep=self._is_kept(play),
        )

    def request(
        self, play: Play, sampling: SamplingParams, noise: SampleId | None
    ) -> GenerationRequest:
        """Returns the request for the next turn, within the trajectory's limits. `noise`: the
        sample whose random numbers draw the tokens; None: this one."""
        return play.request(self._bounded(play, sampling), noise, keep=self._is_kept(play))

    def _is_kept(self, play: Play) -> bool:
        """Whether the engine is to keep its KV cache of the next turn, as another may follow."""
        max_turns = self.limits.max_turns
        return max_turns is None or play.num_turns + 1 < max_turns

    def _bounded(self, play: Play, sampling: SamplingParams) -> SamplingParams:
        """Returns the sampling settings, with the response length limited to what is left to the
        trajectory, but at least one token."""
        most = self.limits.max_trajectory_tokens
        if most is None or play.num_tokens + sampling.max_response_tokens <= most:
            return sampling
        return replace(sampling, max_response_tokens=max(most - play.num_tokens, 1))

    async def begin(self, play: Play, *, timeout_s: float | None = None) -> Begun | Lost:
        """Have the environment begin the episode, and use the prompt and tools that it gives.
        Returns `Lost` if it fails or gives something unusable."""
        sample = play.sample
        row = {**play.row.columns, "prompt": play.row.prompt}
        begun = await self.environments.begin(
            sample, row, seed=seed_of(self._seed, sample.prompt), timeout_s=timeout_s
        )
        if isinstance(begun, Lost):
            return begun
        play.is_begun = True
        try:
            if begun.tools is not None:
                play.dialogue = self._with_tools(begun.tools)
            if begun.messages is None or play.num_turns:
                return begun
            prompt = self._dialogue_of(play).prompt(begun.messages, most=self._max_prompt_tokens)
        except TooLong:
            return self._too_long_prompt("a prompt of")
        except ValueError as error:
            return Lost(reason=str(error), cause="environment")
        if len(prompt) > self._max_prompt_tokens:
            return self._too_long_prompt(f"a prompt of {len(prompt)} tokens,")
        play.trajectory, play.prompt = Trajectory(prompt), begun.messages
        if self._prompts.setdefault(sample.prompt, prompt) != prompt:
            self._warn_once(
                "the environment begins otherwise for samples of one prompt, which are compared"
                " with each other: let `reset` draw by row['seed'] alone"
            )
        return begun

    def _too_long_prompt(self, said: str) -> Lost:
        most = f"data.max_prompt_tokens={self._max_prompt_tokens}"
        return Lost(reason=f"it says {said} more than {most}", cause="prompt")

    async def act(
        self, play: Play, turn: int, *, anew: bool = False, timeout_s: float | None = None
    ) -> Answered | Lost:
        """Give the model's latest message (of turn `turn`) to the environment, and append its
        answer unless the episode is over. `anew`: whether the environment's episode was lost, so
        that earlier turns are replayed first. Returns `Lost` if the environment fails."""
        assert turn == play.num_turns, f"{play.sample}: turn {turn} of {play.num_turns}"
        if anew or not play.is_begun:
            begun = await self.begin(play, timeout_s=timeout_s)
            if isinstance(begun, Lost):
                return begun
            lost = await self._again(play, play.said[: turn - 1], timeout_s)
            if lost is not None:
                return lost
        if len(play.said) < turn:
            play.said.append(self._dialogue_of(play).message(play.drawn, turn))
        message = play.said[-1]
        answer = await self.environments.act(play.sample, turn, message, timeout_s=timeout_s)
        if isinstance(answer, Lost):
            return answer
        if not (answer.done or answer.truncated):
            try:
                self._answered(play, message, answer.messages)
            except TooLong:
                play.overflowed(self.limits.max_trajectory_tokens or 0)
            except ValueError as error:
                return Lost(reason=str(error), cause="environment")
        play.messages += [message, *answer.messages]
        play.rewards.append(answer.reward)
        play.spent.answer_s.append(answer.seconds)
        play.metrics.update(answer.metrics)
        return answer

    async def _again(
        self, play: Play, said: Sequence[Message], timeout_s: float | None
    ) -> Lost | None:
        """Replay these messages in an episode that was begun again. Returns `Lost` if the
        environment fails, else None."""
        for turn, message in enumerate(said, start=1):
            answer = await self.environments.act(play.sample, turn, message, timeout_s=timeout_s)
            if isinstance(answer, Lost):
                return answer
        return None

    def must_finish(self, play: Play, reason: str) -> bool:
        """Whether to ask for a final reward: not if the environment ended the episode
        (`reason`)."""
        asked = self.environments.scores_at_end and play.is_begun
        return asked and reason not in ("done", "truncated")

    async def finish(self, play: Play) -> Lost | None:
        """Ask the environment for the final reward of an episode that a limit (of turns, tokens or
        seconds) ended, and add it to the last turn's. An episode lost meanwhile is replayed first
        if environments are deterministic. Returns `Lost` if the environment fails, else None."""
        environments, timeout_s = self.environments, self.timeout_s
        worth = await environments.finish(play.sample, timeout_s=timeout_s)
        if isinstance(worth, Lost) and worth.cause == "infrastructure":
            if not environments.is_deterministic:
                return worth
            begun = await self.begin(play, timeout_s=timeout_s)
            if isinstance(begun, Lost):
                return begun
            lost = await self._again(play, play.said, timeout_s)
            worth = lost or await environments.finish(play.sample, timeout_s=timeout_s)
        if isinstance(worth, Lost):
            return worth
        if worth is not None:
            play.rewards += [None] * (play.num_turns - len(play.rewards))
            play.rewards[-1] = (play.rewards[-1] or 0.0) + worth
        return None

    def _answered(self, play: Play, said: Message, told: Sequence[Message]) -> None:
        """Append the environment's messages `told` to the tokens. Raises `ValueError` if the chat
        template refuses them, and `TooLong` if they exceed the trajectory's limit."""
        dialogue, most = self._dialogue_of(play), self.limits.max_trajectory_tokens
        room = None if most is None else most - play.num_tokens
        if not self._takes_rewrites or dialogue.rewritten() is None:
            play.grown(dialogue.appended(told, play.drawn, most=room))
            return
        begun = play.prompt or play.row.messages
        if begun is None:
            raise ValueError(
                "the prompt is a text, and a template that rewrites earlier turns needs messages:"
                " set data.train.chat=true, or let reset say the prompt"
            )
        longest = None if most is None else len(play.trajectory.prompt) + most
        prompt = dialogue.prompt([*begun, *play.messages, said, *told], most=longest)
        given: tuple[int, ...] = ()
        with contextlib.suppress(ValueError):  # it cannot be told apart from what was rewritten
            given = dialogue.appended(told, play.drawn, most=room)
        play.prompted(prompt, given)

    def episode(self, play: Play) -> Episode:
        """Returns the record of the episode: messages, rewards, times. It includes a last turn that
        was cut off and that the environment never got."""
        messages = list(play.messages)
        if len(play.said) < play.num_turns:
            messages.append(self._dialogue_of(play).message(play.drawn, play.num_turns))
        return Episode(
            prompt=play.prompt,
            messages=tuple(messages),
            rewards=tuple(play.rewards),
            num_drawn=tuple(play.num_drawn),
            environment_s=play.seconds,
            answer_s=tuple(play.spent.answer_s),
            policy_s=tuple(play.spent.policy_s),
            metrics=dict(play.metrics),
        )

    def _with_tools(self, tools: Sequence[ToolSchema]) -> Dialogue:
        """Returns the chat format with these tools. Raises `ValueError` if with them the chat
        template changes earlier turns, and the run does not accept that."""
        dialogue = self._dialogue.with_tools(tools)
        if not self._takes_rewrites and (why := dialogue.rewritten()) is not None:
            raise ValueError(
                f"with its tools {why} environment.rewrites=prefixes trains on each turn behind"
                " what the template makes of it then"
            )
        return dialogue

    def _dialogue_of(self, play: Play) -> Dialogue:
        return self._dialogue if play.dialogue is None else play.dialogue

    def end(self, play: Play) -> None:
        """End an episode in the environment; also one that was never begun, or is lost."""
        play.is_begun = False
        self.environments.end(play.sample)

    def forget_prompts(self) -> None:
        """Forget the prompts that environments gave in this step."""
        self._prompts.clear()


def seed_of(seed: int, prompt: PromptId) -> int:
    """Returns the seed for a prompt's environments, which all its samples and retries share: 31
    bits, as every random generator accepts."""
    digest = hashlib.blake2b(f"{seed}|{prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def ends_of(plays: Sequence[Play]) -> dict[str, float]:
    """Returns metrics of finished episodes: turns, environment seconds, tokens cached and
    recomputed, and the environments' own. Empty without episodes."""
    if not plays:
        return {}
    count = len(plays)
    metrics = Counter[str]()
    for play in plays:
        metrics.update(play.metrics)
    return {
        "episodes/turns/mean": sum(play.num_turns for play in plays) / count,
        "episodes/turns/max": float(max(play.num_turns for play in plays)),
        **_rows_of(plays),
        "episodes/environment_s/mean": sum(play.seconds for play in plays) / count,
        "episodes/environment_s/max": max(play.seconds for play in plays),
        "episodes/kept_tokens/mean": sum(play.spent.kept_tokens for play in plays) / count,
        "episodes/recomputed_tokens/mean": sum(play.spent.recomputed_tokens for play in plays)
        / count,
        **{name: value / count for name, value in sorted(metrics.items())},
    }


def _rows_of(plays: Sequence[Play]) -> dict[str, float]:
    """Returns the mean number of training rows per trajectory as a metric. There are several, each
    with its own context, if the chat template changed earlier turns. Empty if all have one."""
    numbers = [len(play.trajectory.rows) for play in plays]
    return {"episodes/rows/mean": sum(numbers) / len(numbers)} if max(numbers) > 1 else {}
