"""Shows an episode (a conversation with an environment) for `rollpacker play`: tokens with their
mask, what was understood of each message, and the answers. No text can steer the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.engines.engine import GenerationRequest, Response
from rollpacker.environments.environment import Answered, Begun, Environments, Episode, Lost
from rollpacker.rewards.reward import Failed, Scored

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.ids import SampleId
    from rollpacker.data.dataset import PromptRow
    from rollpacker.dialogue.template import DialogueTemplate
    from rollpacker.run.parts.environments import TurnParts
    from rollpacker.run.ports.playing import Generate

_DRAWN, _GIVEN = "green", "dim"
_WHY = {
    "done": "the environment says that it is over",
    "truncated": "the environment cut it off",
    "length": "a message ran into rollout.max_response_tokens={length}",
    "turns": "environment.max_turns={turns} was reached",
    "tokens": "the next message would not fit into what a trajectory may have",
    "environment_s": "environment.max_environment_s={environment_s} was reached",
}


class EpisodeDisplay:
    """Stands between the program that plays the episode and its environments, and shows each call
    to an environment with its answer. Used on one event loop, for one episode."""

    def __init__(
        self,
        template: DialogueTemplate,
        environments: Environments,
        *,
        by_hand: bool,
        each_token: bool,
    ) -> None:
        """`by_hand`: whether a person types the model's messages. `each_token`: whether each token
        gets a line of its own, with its id and log-prob."""
        from rollpacker.run.output import console

        self.console = console(highlight=False)
        self.tools = environments.tools
        self.begins = environments.begins
        self.is_deterministic = environments.is_deterministic
        self.scores_at_end = environments.scores_at_end
        self.lost: Lost | None = None
        """Why the environment failed, so that the episode was lost. None if it did not fail."""
        self._environments = environments
        self._template = template
        self._by_hand = by_hand
        self._each_token = each_token
        self._shown: tuple[int, ...] = ()
        """Tokens shown so far. The next prompt begins so, unless the chat template alters it."""
        self._turn = 0

    # -- Environments ------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._environments.open()

    async def begin(
        self,
        episode: SampleId,
        row: Mapping[str, Any],
        *,
        seed: int,
        timeout_s: float | None = None,
    ) -> Begun | Lost:
        begun = await self._environments.begin(episode, row, seed=seed, timeout_s=timeout_s)
        if isinstance(begun, Lost):
            self.lost = begun
        elif begun.messages is not None:
            self._told(f"the environment says the prompt, after {_seconds(begun.seconds)}")
        return begun

    async def act(
        self,
        episode: SampleId,
        turn: int,
        message: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
    ) -> Answered | Lost:
        self._understood(message)
        answer = await self._environments.act(episode, turn, message, timeout_s=timeout_s)
        if isinstance(answer, Lost):
            self.lost = answer
            return answer
        reward = "no reward" if answer.reward is None else f"reward {answer.reward:g}"
        counts = "".join(f", {name} {value:g}" for name, value in answer.metrics.items() if value)
        self._told(f"environment: {_seconds(answer.seconds)}, {reward}{_visible(counts)}")
        if answer.done or answer.truncated:  # the model does not get these
            for said in answer.messages:
                self._told(f"{_text(said.get('role'))}: {_text(said.get('content'))}")
        return answer

    async def finish(
        self, episode: SampleId, *, timeout_s: float | None = None
    ) -> float | Lost | None:
        reward = await self._environments.finish(episode, timeout_s=timeout_s)
        if isinstance(reward, Lost):
            self.lost = reward
        elif reward is not None:
            self._told(f"environment: reward {reward:g}, asked for at the end")
        return reward

    def end(self, episode: SampleId) -> None:
        self._environments.end(episode)

    async def close(self) -> None:
        await self._environments.close()

    # -- the dialogue ------------------------------------------------------------------------------

    def starts(self, sample: SampleId, row: PromptRow, turns: TurnParts) -> None:
        """Show the prompt's id, the tools and the limits of the episode that now begins."""
        self._told(f"prompt {sample.prompt}, {row.where}; > is drawn and would be trained on")
        for tool in self.tools:
            function = tool["function"]
            names = ", ".join((function.get("parameters") or {}).get("properties") or {})
            self._told(f"tool {_text(function['name'])}({_text(names)})")
        limits = turns.limits
        most = f"{limits.max_turns} turns, {limits.max_trajectory_tokens} tokens"
        self._told(f"at most {most}; an answer within {turns.timeout_s:g} s")

    def shown(self, generate: Generate) -> Generate:
        """Returns `generate`, which makes a turn's response, made to show the turn, too."""
        import time

        async def show(requests: Sequence[GenerationRequest]) -> Sequence[Response]:
            (request,) = requests
            prompt = request.prompt_tokens
            start = len(self._shown)
            if prompt[:start] != self._shown:
                self._told("the chat template has rewritten what came before:")
                start = 0
            self._stretch(prompt[start:], None, start)
            began = time.monotonic()
            responses = await generate(requests)
            seconds = time.monotonic() - began
            (response,) = responses
            self._turn += 1
            took = "" if self._by_hand else f", {_seconds(seconds)}"
            self._told(f"turn {self._turn}: {len(response.tokens)} tokens{took}", "bold")
            self._stretch(response.tokens, response.log_probs, len(prompt))
            self._shown = prompt + response.tokens
            return responses

        return show

    def _stretch(
        self, tokens: Sequence[int], log_probs: Sequence[float] | None, start: int
    ) -> None:
        """Show tokens, whose first has the place `start` in the context. `log_probs` is None for
        tokens that the model did not generate."""
        mark, style = (" ", _GIVEN) if log_probs is None else (">", _DRAWN)
        if self._each_token:
            for place, token in enumerate(tokens):
                log_prob = "" if log_probs is None else f"{log_probs[place]:.3f}"
                piece = _visible(self._decoded([token]))
                self._line(f"{mark} {start + place:>6} {token:>7} {log_prob:>8}  |{piece}|", style)
            return
        for line in self._decoded(tokens).split("\n"):
            self._line(f"{mark} {_visible(line)}", style)

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(
            self._template.tokenizer.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _understood(self, message: Mapping[str, Any]) -> None:
        """Show the tool calls of the model's message, and texts that were meant as tool calls."""
        for call in message.get("tool_calls") or ():
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False, default=str)
            self._told(f"calls {_text(function['name'])} {_text(arguments)}")
        for text in message.get("malformed_tool_calls") or ():
            self._told(f"a call that cannot be read: {_text(text)}", "yellow")

    # -- the end -----------------------------------------------------------------------------------

    def stopped(self) -> None:
        """Show that the person who types has ended the input."""
        self.console.print()
        self._told("stopped before its end: there is nothing to judge", "bold")

    def ended(self, response: Response, episode: Episode, config: RunConfig) -> None:
        """Show why the episode ended, and its numbers of turns and tokens."""
        assert config.environment is not None
        why = _WHY.get(response.finish_reason, "").format(
            length=config.sampling.max_response_tokens,
            turns=config.environment.max_turns,
            environment_s=config.environment.max_environment_s,
        )
        self._told(f"ended: {response.finish_reason}{f' ({why})' if why else ''}", "bold")
        given = len(response.tokens) - response.num_drawn
        count = f"{self._turn} turn{'' if self._turn == 1 else 's'}"
        self._told(f"{count}, {response.num_drawn} tokens drawn, {given} given")
        policy = "" if self._by_hand else f"policy {_seconds(sum(episode.policy_s))}, "
        self._told(f"{policy}environment {_seconds(episode.environment_s)}")

    def judged(self, verdict: Scored | Failed) -> None:
        """Show each reward's value and their weighted sum, or why there is no verdict."""
        for name, value in verdict.parts.items():
            told = "does not judge it" if value is None else f"{value:g}"
            self._told(f"reward {_text(name)}: {told}")
        if isinstance(verdict, Failed):
            self._told(f"no verdict: {_text(verdict.reason)}", "yellow")
        else:
            self._told(f"reward, weighted: {verdict.value:g}", "bold")

    def _told(self, text: str, style: str = "cyan") -> None:
        self._line(f"- {text}", style)

    def _line(self, text: str, style: str) -> None:
        from rich.text import Text

        self.console.print(Text(text, style=style), soft_wrap=True)


def _visible(text: str) -> str:
    """The text on one line, with all characters made visible that could steer a terminal."""
    from rollpacker.data.chat import visible

    return visible(text)


def _text(value: Any) -> str:
    """A value that somebody else's code made, as a safe text on one line."""
    return _visible(value if isinstance(value, str) else json.dumps(value, default=str))


def _seconds(value: float) -> str:
    return f"{value:.3f} s"
