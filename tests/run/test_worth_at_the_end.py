"""Runs with environments that give one reward at the end, whose episodes end by a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.run.test_turns import (
    entries,
    folder,
    model,
    train,
    trained,
)

__all__ = ["folder", "model"]

WORTH = '''
import os, time
from pathlib import Path

class Worth:
    """A sum of what was said, known when all is over."""

    deterministic = True

    def reset(self, number, **columns):
        self.number = number

    def add(self, value: int) -> int:
        """Add.

        Args:
            value: What.
        """
        return value

    def get_reward(self):
        return 2.0 + self.number % 4

class Hangs(Worth):
    def get_reward(self):
        if self.number % 4 == 1:
            time.sleep(1000)
        return super().get_reward()

class Raises(Worth):
    def get_reward(self):
        raise OSError("nobody counts")

class Dies(Worth):
    def get_reward(self):
        mark = Path(f"died-{self.number}")
        if self.number % 4 == 1 and not mark.exists():
            mark.touch()
            os._exit(1)
        return super().get_reward()
'''
CUT_OFF = ("rollout.stop=[]", "rollout.max_response_tokens=4", "data.train.chat=true")


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    (folder / "worth.py").write_text(WORTH)
    environment = (f"environment.function=worth.py:{name}", "environment.workers=2")
    assert train(*environment, *CUT_OFF, "data.max_prompt_tokens=250", *overrides) == 0
    found = entries(folder)
    concluded = [c for one in found for c in one.get("commands", ()) if c["command"] == "Conclude"]
    assert "length" in {one["reason"] for one in concluded}
    return found


def scored(found: list[dict[str, Any]]) -> dict[str, float | None]:
    return {one["sample"]: one["value"] for one in found if one.get("event") == "SampleScored"}


def worth(sample: str) -> float:
    """Of the row that the sample is of."""
    return 2.0 + int(sample.split("/")[2]) % 4


def test_an_episode_that_a_limit_ends_is_worth_what_its_environment_says(folder: Path) -> None:
    found = run(folder, "Worth", "eval={every_steps: 3, max_prompts: 2}", "data.eval_fraction=0.2")
    values = scored(found)
    assert trained(found) and trained(found) <= set(values)
    assert set(values.values()) == {2.0, 3.0, 4.0, 5.0}
    told = [one for one in found if "eval/reward" in one.get("metrics", {})]
    assert told and all(one["metrics"]["eval/reward"] >= 2.0 for one in told)


@pytest.mark.parametrize(
    ("name", "cause", "timeout_s"), [("Hangs", "deadline", 2), ("Raises", "sample", 60)]
)
def test_one_that_cannot_say_is_no_zero(
    folder: Path, name: str, cause: str, timeout_s: int
) -> None:
    """Of one that raises at once, a busy machine may take long to hear."""
    found = run(folder, name, f"environment.timeout_s={timeout_s}", "train.steps=2")
    lost = [one for one in found if one.get("event") == "SampleScored" and one["value"] is None]
    assert lost and {one["cause"] for one in lost} == {cause}
    assert all("its environment: " in one["reason"] for one in lost)
    assert not {one["sample"] for one in lost} & trained(found)
    assert 0.0 not in scored(found).values()


def test_one_whose_process_died_is_played_again(folder: Path) -> None:
    found = run(folder, "Dies")
    assert (folder / "died-1").exists()
    assert None not in scored(found).values()
    assert len(trained(found)) == 3 * 4 * 2
