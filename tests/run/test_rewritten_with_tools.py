"""A template that rewrites earlier turns only where there are tools, which the episode brings."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.engines.engine import Response
from rollpacker.environments.environment import Answered, Begun, Lost
from rollpacker.run.ports.player import Player
from tests.dialogue.families import tokenizer_of

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "d",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}


class Brings:
    """Tools of its own in each episode."""

    begins, tools, is_deterministic = True, (), False
    scores_at_end = False

    async def begin(self, *_: Any, **__: Any) -> Begun:
        return Begun(messages=({"role": "user", "content": "q"},), tools=(SEARCH,))

    async def act(self, *_: Any, **__: Any) -> Answered:
        return Answered(messages=({"role": "user", "content": "And then?"},))


@pytest.mark.parametrize("takes", [True, False])
def test_it_is_played_or_refused_as_the_config_says(takes: bool) -> None:
    tokenizer = tokenizer_of("mistral_newest_tools")
    dialogue = TemplateDialogue(DialogueTemplate(tokenizer))
    assert dialogue.rewritten() is None
    assert dialogue.with_tools([SEARCH]).rewritten() is not None
    player = Player(
        Brings(),  # type: ignore[arg-type]
        dialogue,
        seed=0,
        limits=TurnLimits(max_turns=4),
        timeout_s=1,
        max_prompt_tokens=999,
        takes_rewrites=takes,
    )
    sample = SampleId(PromptId("train", 0, 0), 0, 0)
    play = player.new(sample, PromptRow(prompt="q", tokens=(1,), columns={}))
    begun = asyncio.run(player.begin(play))
    if not takes:
        assert isinstance(begun, Lost) and "environment.rewrites=prefixes" in begun.reason
        return
    assert isinstance(begun, Begun)
    drawn = (*tokenizer("hello", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id)
    play.heard(
        Response(
            sample=sample,
            prompt_tokens=play.trajectory.context,
            tokens=drawn,
            log_probs=(-1.0,) * len(drawn),
            finish_reason="stop",
            version=0,
        )
    )
    assert isinstance(asyncio.run(player.act(play, 1)), Answered)
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "And then?"},
    ]
    assert play.trajectory.context == dialogue.with_tools([SEARCH]).prompt(messages)
