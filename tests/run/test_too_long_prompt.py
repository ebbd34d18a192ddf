"""A prompt that an environment says and that is too long: no other sample of it could be taken."""

from __future__ import annotations

import asyncio
from typing import Any

from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.environments.environment import Begun, Lost
from rollpacker.run.ports.player import Player
from tests.dialogue.families import tokenizer_of


class Says:
    """The same prompt in each episode."""

    begins, tools, is_deterministic, scores_at_end = True, (), False, False

    async def begin(self, *_: Any, **__: Any) -> Begun:
        return Begun(messages=({"role": "user", "content": "word " * 20},))


def begun_with(max_prompt_tokens: int) -> Begun | Lost:
    player = Player(
        Says(),  # type: ignore[arg-type]
        TemplateDialogue(DialogueTemplate(tokenizer_of("mistral_newest_tools"))),
        seed=0,
        limits=TurnLimits(max_turns=4),
        timeout_s=1,
        max_prompt_tokens=max_prompt_tokens,
    )
    sample = SampleId(PromptId("train", 0, 0), 0, 0)
    play = player.new(sample, PromptRow(prompt="q", tokens=(1,), columns={}))
    return asyncio.run(player.begin(play))


def test_its_loss_says_that_it_is_the_prompts() -> None:
    lost = begun_with(5)
    assert isinstance(lost, Lost) and lost.cause == "prompt"
    assert "more than data.max_prompt_tokens=5" in lost.reason
    assert isinstance(begun_with(999), Begun)
