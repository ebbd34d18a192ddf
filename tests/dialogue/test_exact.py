"""What is trained on is what was drawn and given, token by token, whatever was drawn and said."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.dialogue.families import FAMILIES
from tests.dialogue.played import Scene, play

SCENES = [
    (name, tools)
    for name, family in FAMILIES.items()
    for tools in ((False, True) if family.tools else (False,))
]


@pytest.mark.parametrize(("name", "tools"), SCENES)
def test_dialogues_grow_exactly(name: str, tools: bool) -> None:
    scene = Scene.of(name, tools=tools)
    assert scene.rewrites == (FAMILIES[name].rewrites and (tools or name == "thinking"))
    counted: Counter[str] = Counter()
    for number in range(150):
        played = play(random.Random(f"{name} {tools} {number}"), scene)
        assert not played.faults, (number, played.faults)
        counted["whole"] += played.is_whole
        counted["canonical"] += played.is_canonical and not played.is_hostile
        counted["hostile"] += played.is_hostile
    # Each comparison was made, not only written down. Where history is rewritten whenever a user
    # speaks, nothing that grew is the whole rendering.
    if (name, tools) != ("thinking", False):
        assert counted["whole"] > 10 and counted["canonical"] >= (1 if scene.rewrites else 15)
    assert counted["hostile"] > 10


@pytest.mark.parametrize(("name", "tools"), SCENES)
def test_each_turn_is_trained_on_behind_its_own_prompt(name: str, tools: bool) -> None:
    """Templates that rewrite, and those that do not: there a canonical dialogue is one row."""
    scene = Scene.of(name, tools=tools)
    counted: Counter[str] = Counter()
    for number in range(60):
        played = play(random.Random(f"{name} {tools} {number}"), scene, anew=True)
        assert not played.faults, (number, played.faults)
        counted["turns"] += len(played.turns)
        counted["rows"] += len(played.trajectory.rows)
        if played.is_canonical and not played.is_hostile:
            counted["canonical"] += 1
            assert scene.rewrites or len(played.trajectory.rows) == 1
    assert counted["canonical"] > 5
    if (name, tools) == ("thinking", False):  # a user speaks behind each turn
        assert counted["rows"] == counted["turns"]
    else:
        assert counted["rows"] < counted["turns"]


def test_a_fault_is_seen() -> None:
    """A token too few, and words encoded with the markers that they spell."""
    scene = Scene.of("chatml", tools=False)
    template = scene.template
    appended = template.appended
    cases = {
        "the text is not the template's": lambda m, s: appended(m, s)[:-1],
        "given words became a marker": lambda m, s: tuple(
            template.tokenizer(
                template.behind_turn(m).removeprefix("<|im_end|>"), add_special_tokens=False
            )["input_ids"]
        ),
    }
    for fault, wrong in cases.items():
        template.appended = wrong  # type: ignore[method-assign]
        found = [one for number in range(100) for one in play(random.Random(number), scene).faults]
        assert fault in found
