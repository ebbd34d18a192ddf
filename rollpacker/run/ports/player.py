"""Episodes under way: the tokens and messages of each sample, and its turns with an environment.
Nothing here knows the core or the bus, so that training and evaluation play alike."""

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
    """Seconds and tokens that an episode has cost so far."""

    answer_s: list[float] = field(default_factory=list)
    """Seconds that the environment took to answer, by turn."""
    policy_s: list[float] = field(default_factory=list)
    """Seconds from asking for a turn to its last token, by turn."""
    asked_s: float | None = None
    """When the turn under way was asked for (`time.monotonic`). None if no turn is under way."""
    kept_tokens: int = 0
    """Number of context tokens, over all turns, that the engine had kept since an earlier turn."""
    recomputed_tokens: int = 0
    """Number of context tokens, over all turns, that the engine had to compute again."""

    def ask(self) -> None:
        """Note the time: an engine is about to be asked for the next turn."""
        self.asked_s = time.monotonic()

    def hear(self) -> None:
        """Note that an engine has finished the turn, and how long that took."""
        self.policy_s.append(0.0 if self.asked_s is None else time.monotonic() - self.asked_s)
        self.asked_s = None


@dataclass(slots=True)
class Play:
    """The episode of one sample, as far as it has been played."""

    sample: SampleId
    row: PromptRow
    trajectory: Trajectory
    prompt: tuple[Message, ...] | None = None
    """The prompt that the environment gave. None if the prompt is the data row's own."""
    dialogue: Dialogue | None = None
    """Message format with this episode's tools. None if it has the tools of every episode."""
    is_begun: bool = False
    """Whether the environments have begun this episode."""
    said: list[Message] = field(default_factory=list)
    """The model's messages that were given to the environment so far, by turn."""
    drawn: tuple[int, ...] = ()
    """Tokens that the model generated in the latest turn."""
    num_drawn: list[int] = field(default_factory=list)
    """Number of tokens that the model generated, by turn."""
    num_tokens: int = 0
    """Length of the trajectory in tokens, as limits count it: all that were generated and given, or
    how much the next turn's prompt is longer than the first one's, if that is more."""
    num_given: int = 0
    """Number of the trajectory's tokens that the model was given after its latest turn."""
    messages: list[Message] = field(default_factory=list)
    """All messages after the prompt, the model's and the environment's."""
    rewards: list[float | None] = field(default_factory=list)
    """Rewards that the environment gave, by turn. None for a turn without a reward."""
    spent: Spent = field(default_factory=Spent)
    metrics: Counter[str] = field(default_factory=Counter)
    """Sums of the numbers that the environment counts, by name."""
    version: int = 0
    """Version of the weights that generated the latest turn."""

    @property
    def seconds(self) -> float:
        """Seconds that the environment took so far."""
        return sum(self.spent.answer_s)

    def heard(self, response: Response) -> None:
        """Append the turn that the engine has generated."""
        self.spent.hear()
        self.trajectory = self.trajectory.and_then(Segment(response.tokens, response.log_probs))
        self.drawn, self.version = response.tokens, response.version
        self.num_drawn.append(len(response.tokens))
        self.num_tokens, self.num_given = self.num_tokens + len(response.tokens), 0

    @property
    def num_turns(self) -> int:
        """Number of the model's turns."""
        return len(self.num_drawn)

    def grown(self, given: tuple[int, ...]) -> None:
        """Append tokens that are given to the model after its latest turn."""
        self._goes_on(self.trajectory.and_then(Segment(given)), len(given))

    def prompted(self, prompt: tuple[int, ...], given: tuple[int, ...] = ()) -> None:
        """Give the next turn this whole prompt, whatever came before; see `Trajectory.prompted`."""
        self._goes_on(self.trajectory.prompted(prompt, given), len(given))

    def overflowed(self, most: int) -> None:
        """Mark the trajectory as full, with `most` tokens: what is given is more than it may have.
        How many tokens that would be is not counted."""
        self.num_given = max(most - self.num_tokens, 0)
        self.num_tokens += self.num_given

    def _goes_on(self, trajectory: Trajectory, num_given: int) -> None:
        longer = trajectory.num_context - len(trajectory.prompt) - self.num_tokens
        self.num_given = max(num_given, longer)
        self.num_tokens += self.num_given
        self.trajectory = trajectory

    def count_kept(self, num_reused: int) -> None:
        """Count the tokens before the turn that was just generated: the engine had kept
        `num_reused` of them and computed the rest again. A first turn is not counted, since nothing
        could be kept for it."""
        if self.num_turns:
            before = max(self.trajectory.num_context - self.num_given, 1)
            kept = min(num_reused, before - 1)  # the latest drawn one was never fed
            self.spent.kept_tokens += kept
            self.spent.recomputed_tokens += before - 1 - kept

    def request(
        self, sampling: SamplingParams, noise: SampleId | None, *, keep: bool = False
    ) -> GenerationRequest:
        """Returns the request for the next turn. `keep`: whether the engine is to keep what it
        computes, for the turn after that."""
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
        """Returns the whole trajectory as a response that ended for this reason. Tokens given after
        the last turn are left out."""
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
    """Plays the turns of samples with the environments of a run, on one event loop. Calls for the
    same sample come one after another."""

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
        """`limits`: limits of a trajectory, the same as the core's. `timeout_s`: seconds that an
        answer may take in an evaluation, or the final reward of an episode. `max_prompt_tokens`:
        most tokens of a prompt that an environment gives. `takes_rewrites`: whether each turn's
        prompt is what the chat template makes of all messages, as where the model is served, if the
        template changes earlier turns."""
        self.environments = environments
        self.limits = limits
        self.timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._dialogue = dialogue
        self._takes_rewrites = takes_rewrites
        self._seed = seed
        self._prompts: dict[PromptId, tuple[int, ...]] = {}
        """Prompt that the environments gave the first sample of each prompt in this step."""
        self._warn_once = WarnOnce(logger)

    def new(self, sample: SampleId, row: PromptRow) -> Play:
        """Returns a new episode. Its prompt is the row's, unless the environments give another."""
        return Play(sample, row, Trajectory(row.tokens))

    def launched(self, play: Play, request: GenerationRequest) -> GenerationRequest:
        """Returns the core's request for a first turn, with the play's own prompt and limits."""
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
        """Returns the request for the next turn, bounded by the tokens left to the trajectory."""
        return play.request(self._bounded(play, sampling), noise, keep=self._is_kept(play))

    def _is_kept(self, play: Play) -> bool:
        """Whether engines are to keep what they compute in the next turn: not if it must be the
        last."""
        max_turns = self.limits.max_turns
        return max_turns is None or play.num_turns + 1 < max_turns

    def _bounded(self, play: Play, sampling: SamplingParams) -> SamplingParams:
        """Returns the settings with at most as many response tokens as the trajectory may still
        get, and at least one."""
        most = self.limits.max_trajectory_tokens
        if most is None or play.num_tokens + sampling.max_response_tokens <= most:
            return sampling
        return replace(sampling, max_response_tokens=max(most - play.num_tokens, 1))

    async def begin(self, play: Play, *, timeout_s: float | None = None) -> Begun | Lost:
        """Have the environments begin the episode, and use the prompt and the tools that they give.
        Returns `Lost` if they fail, or give what cannot be used."""
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
        """Give the model's message of this turn, the latest, to the environment, and append the
        answer unless the episode is over. Returns `Lost` if the environment fails. `anew`: whether
        the episode was lost, so that the turns before are played again first."""
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
        """Give these messages to an episode that was begun again. Returns `Lost` if the environment
        fails."""
        for turn, message in enumerate(said, start=1):
            answer = await self.environments.act(play.sample, turn, message, timeout_s=timeout_s)
            if isinstance(answer, Lost):
                return answer
        return None

    def must_finish(self, play: Play, reason: str) -> bool:
        """Whether the environment still has to give a final reward, given why the episode ended."""
        asked = self.environments.scores_at_end and play.is_begun
        return asked and reason not in ("done", "truncated")

    async def finish(self, play: Play) -> Lost | None:
        """Ask the environment for the final reward of an episode that a limit has ended, and add it
        to the last turn's reward. If the episode was lost and environments are deterministic, it is
        played again first. Returns `Lost` if the environment fails."""
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
        """Append the environment's messages, so that the next turn comes after them. Raises
        `ValueError` if the chat template refuses them, and `TooLong` if they surely exceed a
        trajectory's limit."""
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
        """Returns the record of the episode. A last turn that was cut off is one of its messages,
        though no environment was given that message."""
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
        """Returns the dialogue with these tools. Raises `ValueError` if it cannot be trained on."""
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
        """End an episode that is not needed any more, even if it never began or was lost."""
        play.is_begun = False
        self.environments.end(play.sample)

    def forget_prompts(self) -> None:
        """Forget the prompts that the environments gave, at the end of a step."""
        self._prompts.clear()


def seed_of(seed: int, prompt: PromptId) -> int:
    """Returns the seed of a prompt's environments, the same for all its samples and attempts: 31
    bits, which every random generator accepts."""
    digest = hashlib.blake2b(f"{seed}|{prompt}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def ends_of(plays: Sequence[Play]) -> dict[str, float]:
    """Metrics of finished episodes: means of turns, seconds, tokens kept and computed again, and
    what environments count; also the most turns and seconds. Empty without episodes."""
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
    """Metric: mean number of training rows of a trajectory. Empty if each trajectory is one row."""
    numbers = [len(play.trajectory.rows) for play in plays]
    return {"episodes/rows/mean": sum(numbers) / len(numbers)} if max(numbers) > 1 else {}
