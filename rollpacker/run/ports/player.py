"""Episodes under way: a sample's tokens and messages, and its turns with an environment. Knows
neither the core nor the bus: training and evaluation play alike."""

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
    """The seconds and tokens that an episode has cost so far."""

    answer_s: list[float] = field(default_factory=list)
    """Seconds of the environment, by turn."""
    policy_s: list[float] = field(default_factory=list)
    """Seconds from asking for a turn to its last token, by turn."""
    asked_s: float | None = None
    """When the turn that is being drawn was asked for (`time.monotonic`)."""
    kept_tokens: int = 0
    """Tokens before its turns that the engine had kept since an earlier turn."""
    recomputed_tokens: int = 0
    """Tokens before its turns that the engine had to compute again."""

    def ask(self) -> None:
        """Note that an engine is about to be asked for the next turn."""
        self.asked_s = time.monotonic()

    def hear(self) -> None:
        """Note that an engine has drawn the turn."""
        self.policy_s.append(0.0 if self.asked_s is None else time.monotonic() - self.asked_s)
        self.asked_s = None


@dataclass(slots=True)
class Play:
    """The episode of one sample so far."""

    sample: SampleId
    row: PromptRow
    trajectory: Trajectory
    prompt: tuple[Message, ...] | None = None
    """The prompt that the environment said. None if the prompt is the row's own."""
    dialogue: Dialogue | None = None
    """The dialogue with the tools of this episode. None if its tools are those of every episode."""
    is_begun: bool = False
    """Whether the environments know of it."""
    said: list[Message] = field(default_factory=list)
    """The model's messages, by turn, as far as they were given to the environment."""
    drawn: tuple[int, ...] = ()
    """The tokens of the latest turn."""
    num_drawn: list[int] = field(default_factory=list)
    """Tokens that the model drew, by turn."""
    num_tokens: int = 0
    """Number of tokens of the trajectory, as limits count them: all that were drawn and given, or
    if that is more, by how much the next turn's prompt is longer than the first one's."""
    num_given: int = 0
    """Number of those tokens that stand behind the latest turn."""
    messages: list[Message] = field(default_factory=list)
    """All messages behind the prompt."""
    rewards: list[float | None] = field(default_factory=list)
    """Rewards of the environment, by turn. None where it gave none."""
    spent: Spent = field(default_factory=Spent)
    metrics: Counter[str] = field(default_factory=Counter)
    """Numbers that the environment counts."""
    version: int = 0
    """Version of the weights that drew it."""

    @property
    def seconds(self) -> float:
        """Seconds that the environment took so far."""
        return sum(self.spent.answer_s)

    def heard(self, response: Response) -> None:
        """Add the turn that the engine has drawn."""
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
        """This is given to the model behind its latest turn."""
        self._goes_on(self.trajectory.and_then(Segment(given)), len(given))

    def prompted(self, prompt: tuple[int, ...], given: tuple[int, ...] = ()) -> None:
        """The next turn has this whole prompt, whatever came before; see `Trajectory.prompted`."""
        self._goes_on(self.trajectory.prompted(prompt, given), len(given))

    def overflowed(self, most: int) -> None:
        """More is given than the trajectory may have, which is these `most`: it is over, and counts
        as full. How much it was nobody has counted."""
        self.num_given = max(most - self.num_tokens, 0)
        self.num_tokens += self.num_given

    def _goes_on(self, trajectory: Trajectory, num_given: int) -> None:
        longer = trajectory.num_context - len(trajectory.prompt) - self.num_tokens
        self.num_given = max(num_given, longer)
        self.num_tokens += self.num_given
        self.trajectory = trajectory

    def count_kept(self, num_reused: int) -> None:
        """The next turn was drawn, with so many tokens before it that the engine had kept. The
        first one's are nobody's to keep."""
        if self.num_turns:
            before = max(self.trajectory.num_context - self.num_given, 1)
            kept = min(num_reused, before - 1)  # the latest drawn one was never fed
            self.spent.kept_tokens += kept
            self.spent.recomputed_tokens += before - 1 - kept

    def request(
        self, sampling: SamplingParams, noise: SampleId | None, *, keep: bool = False
    ) -> GenerationRequest:
        """The request for the next turn. `keep`: the engine keeps what it computes, for the turn
        behind it."""
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
        """The whole trajectory, ended for that reason. What was given behind its last turn is no
        part of it."""
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
        takes_rewrites: bool = False,
    ) -> None:
        """`limits`: limits of trajectories, which are the core's, too. `timeout_s`: seconds that an
        answer may take where the core does not play. `max_prompt_tokens`: most tokens of a prompt
        that an environment says. `takes_rewrites`: where the template rewrites earlier turns, each
        turn has for its prompt what the template makes of all messages, as where the model is
        served."""
        self.environments = environments
        self.limits = limits
        self.timeout_s = timeout_s
        self._max_prompt_tokens = max_prompt_tokens
        self._dialogue = dialogue
        self._takes_rewrites = takes_rewrites
        self._seed = seed
        self._prompts: dict[PromptId, tuple[int, ...]] = {}
        """Prompt that the environments said to the first sample of each prompt in this step."""
        self._warn_once = WarnOnce(logger)

    def new(self, sample: SampleId, row: PromptRow) -> Play:
        """An episode whose prompt, unless the environments say another one, is the row's."""
        return Play(sample, row, Trajectory(row.tokens))

    def launched(self, play: Play, request: GenerationRequest) -> GenerationRequest:
        """This request of the core's, for a play that begins."""
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
        """The request for the next turn, bounded by what is left of the trajectory's tokens."""
        return play.request(self._bounded(play, sampling), noise, keep=self._is_kept(play))

    def _is_kept(self, play: Play) -> bool:
        """Engines are to keep what they compute, unless it is the last turn that there can be."""
        max_turns = self.limits.max_turns
        return max_turns is None or play.num_turns + 1 < max_turns

    def _bounded(self, play: Play, sampling: SamplingParams) -> SamplingParams:
        """The settings with at most as many response tokens as are left of the trajectory's, and at
        least one."""
        most = self.limits.max_trajectory_tokens
        if most is None or play.num_tokens + sampling.max_response_tokens <= most:
            return sampling
        return replace(sampling, max_response_tokens=max(most - play.num_tokens, 1))

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
        """Give the message of this turn, the latest, to the environment; what it answers stands
        behind the trajectory, unless the episode is over. `anew`: the episode was lost, and is
        played again up to here first."""
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
        """Give these messages to an episode that begins anew."""
        for turn, message in enumerate(said, start=1):
            answer = await self.environments.act(play.sample, turn, message, timeout_s=timeout_s)
            if isinstance(answer, Lost):
                return answer
        return None

    def must_finish(self, play: Play, reason: str) -> bool:
        """Whether an episode that ended for this reason has not said yet what it was worth."""
        asked = self.environments.scores_at_end and play.is_begun
        return asked and reason not in ("done", "truncated")

    async def finish(self, play: Play) -> Lost | None:
        """Ask the environment what the episode, which a limit has ended, was worth: a reward of
        its last turn. One that was lost is played again first where that brings the same."""
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
        """Append what the environment said, so that the next turn stands behind it. Raises
        `ValueError` if the template refuses it, and `TooLong` if it surely is more than a
        trajectory may have."""
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
        """The record of the episode. A turn that was cut off is a message of it all the same,
        though no environment was given it."""
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
        """Raises `ValueError` for tools that no dialogue that is trained on can have."""
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
        """End an episode that nobody needs any more, also one that did not begin, or was lost."""
        play.is_begun = False
        self.environments.end(play.sample)

    def forget_prompts(self) -> None:
        """Forget the prompts that the environments said: a step is over."""
        self._prompts.clear()


def seed_of(seed: int, prompt: PromptId) -> int:
    """The number by which the environments of a prompt draw, the same for all its samples and
    attempts: 31 bits, which every generator takes."""
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
        **_rows_of(plays),
        "episodes/environment_s/mean": sum(play.seconds for play in plays) / count,
        "episodes/environment_s/max": max(play.seconds for play in plays),
        "episodes/kept_tokens/mean": sum(play.spent.kept_tokens for play in plays) / count,
        "episodes/recomputed_tokens/mean": sum(play.spent.recomputed_tokens for play in plays)
        / count,
        **{name: value / count for name, value in sorted(metrics.items())},
    }


def _rows_of(plays: Sequence[Play]) -> dict[str, float]:
    """The mean number of rows that a trajectory is trained on as. Empty if all are one row."""
    numbers = [len(play.trajectory.rows) for play in plays]
    return {"episodes/rows/mean": sum(numbers) / len(numbers)} if max(numbers) > 1 else {}
