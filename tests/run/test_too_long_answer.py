"""An answer of an environment that surely is more than a trajectory may have: nobody encodes it,
and the trajectory ends as any other that is full."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.encoding import Encoder
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Answered, Begun, Lost
from rollpacker.run.ports.player import Play, Player
from tests.dialogue.families import tokenizer_of

LIMITS = TurnLimits(max_turns=9, max_trajectory_tokens=200)
ENDLESS = "9" * 300_000


class Says:
    begins, is_deterministic, scores_at_end = True, True, False
    tools = ()

    def __init__(self, prompt: str, answer: str) -> None:
        self._prompt, self._answer = prompt, answer

    async def begin(self, *_: Any, **__: Any) -> Begun:
        return Begun(messages=({"role": "user", "content": self._prompt},))

    async def act(self, *_: Any, **__: Any) -> Answered:
        return Answered(messages=({"role": "user", "content": self._answer},), reward=1.0)


def player_of(family: str, prompt: str, answer: str, *, limits: TurnLimits = LIMITS) -> Player:
    return Player(
        Says(prompt, answer),  # type: ignore[arg-type]
        TemplateDialogue(DialogueTemplate(tokenizer_of(family))),
        seed=0,
        limits=limits,
        timeout_s=1,
        max_prompt_tokens=100,
        takes_rewrites=True,
    )


def begun(player: Player) -> tuple[Play, Begun | Lost]:
    sample = SampleId(PromptId("train", 0, 0), 0, 0)
    play = player.new(sample, PromptRow(prompt="q", tokens=(1,), columns={}))
    return play, asyncio.run(player.begin(play))


def played(player: Player, family: str) -> Play:
    play, _ = begun(player)
    tokenizer = tokenizer_of(family)
    drawn = (*tokenizer("hello", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    play.heard(
        Response(
            sample=play.sample,
            prompt_tokens=play.trajectory.context,
            tokens=drawn,
            log_probs=(-1.0,) * len(drawn),
            finish_reason="stop",
            version=0,
        )
    )
    assert isinstance(asyncio.run(player.act(play, 1)), Answered)
    return play


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all texts that are encoded."""
    lengths: list[int] = []
    encode = Encoder.encode

    def watched(self: Encoder, text: str, *more: Any, **named: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, *more, **named)

    monkeypatch.setattr(Encoder, "encode", watched)
    return lengths


@pytest.mark.parametrize("family", ["chatml", "thinking"])  # the latter rewrites earlier turns
def test_it_ends_the_trajectory_and_is_not_encoded(family: str, encoded: list[int]) -> None:
    play = played(player_of(family, "q", ENDLESS), family)
    assert max(encoded) < 1000
    assert play.num_tokens == 200 and LIMITS.reached(1, play.num_tokens, 0.0) == "tokens"
    response = play.response("tokens")
    assert response.tokens == play.drawn and response.given == ()
    assert play.rewards == [1.0] and play.messages[-1]["content"] == ENDLESS


@pytest.mark.parametrize("family", ["chatml", "thinking"])
def test_it_is_encoded_where_nothing_limits_it(family: str, encoded: list[int]) -> None:
    limits = TurnLimits(max_turns=9)
    play = played(player_of(family, "q", ENDLESS[:30_000], limits=limits), family)
    assert max(encoded) > 30_000 and play.num_given > 200


def test_a_prompt_is_refused_likewise(encoded: list[int]) -> None:
    _, lost = begun(player_of("chatml", ENDLESS, "a"))
    assert isinstance(lost, Lost) and lost.cause == "prompt"
    assert lost.reason == "it says a prompt of more than data.max_prompt_tokens=100"
    assert max(encoded, default=0) < 1000
