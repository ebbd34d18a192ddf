"""Names of other packages' environments, before any package is needed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rollpacker import imports
from rollpacker.imports import MissingPackageError
from rollpacker.integrations import environments as adapters
from rollpacker.integrations.environments.messages import OwnRandomness, as_text, text_of


def test_which_names_are_adapted() -> None:
    for name in (
        *("gem:game:Sokoban-v0-easy", "gymnasium:Taxi-v4", "openenv:http://a:1"),
        "program:python my_agent.py",
    ):
        assert adapters.is_adapted(name)
    for name in ("my_env.py:Guess", "package.module:Guess", "gem", "gem:", "verifier:x", ""):
        assert not adapters.is_adapted(name)


@pytest.mark.parametrize("call", [adapters.load, adapters.rows])
def test_a_package_that_nobody_knows(call) -> None:
    with pytest.raises(ValueError, match=r'of gymnasum are known\. Did you mean "gymnasium"\?'):
        call("gymnasum:FrozenLake-v1", {})
    with pytest.raises(ValueError, match='names no environment; write "gem:NAME"'):
        call("gem:", {})
    with pytest.raises(ValueError, match='names no command; write "program:COMMAND"'):
        call("program:", {})


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("gem:game:Sokoban-v0-easy", "gem", "gem"),
        ("gymnasium:FrozenLake-v1", "gymnasium", "gymnasium"),
        ("openenv:http://127.0.0.1:9", "openenv", "openenv"),
        ("reasoning-gym:chain_sum", "reasoning_gym", "gym"),
        ("verifiers:gsm8k", "verifiers", "verifiers"),
    ],
)
def test_a_missing_package_is_one_sentence(monkeypatch, name, package, extra) -> None:
    monkeypatch.setattr(imports.importlib.util, "find_spec", lambda _: None)
    for call in (adapters.load, adapters.rows):
        with pytest.raises(MissingPackageError) as caught:
            call(name, {})
        assert str(caught.value).endswith(
            f"needs {package}, which is not installed: pip install 'rollpacker[{extra}]'"
        )


def test_each_episode_draws_its_own_random_numbers() -> None:
    """Two at once draw what each draws alone, and the process's own numbers stay its own."""

    def draw(randomness: OwnRandomness, seed: int | None = None) -> tuple[float, float]:
        with randomness.drawn_from():
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
            return random.random(), float(np.random.rand())

    alone = OwnRandomness()
    expected = [draw(alone, 5), draw(alone), draw(alone)]
    random.seed(0)
    before = random.getstate()
    one, other = OwnRandomness(), OwnRandomness()
    found = [draw(one, 5)]
    draw(other, 6)
    found.append(draw(one))
    draw(other)
    found.append(draw(one))
    assert found == expected
    assert random.getstate() == before


def test_what_the_model_says_and_reads() -> None:
    assert text_of({"role": "assistant", "content": None}) == ""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url"}, {"type": "text", "text": "b"}]
    assert text_of({"role": "assistant", "content": parts}) == "ab"
    assert as_text((np.int64(3), {"x": np.arange(2)}, True)) == '[3, {"x": [0, 1]}, true]'
    assert as_text("as it is") == "as it is"
