"""A made-up built-in reward: one file and one row of the table of rewards."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rollpacker.config.load import config_of
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.core.events import SampleScored
from rollpacker.core.records import Record
from rollpacker.report.log import EventLog
from rollpacker.rewards.build import BUILT_IN, BuiltIn
from rollpacker.rewards.reward import Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.rewards.shared import Shared
from rollpacker.run.parts.rewards import load_reward, reward_kinds
from tests.run.fakes import drive, make, run_config

PLAIN = {
    "name": "drill",
    "model": {"path": "none"},
    "data": {"train": {"kind": "jsonl", "path": "none"}},
    "rollout": {"prompts_per_step": 3, "samples_per_prompt": 2, "max_response_tokens": 8},
    "train": {"steps": 2},
}


# -- the file --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterConfig:
    """The reward's `arguments`."""

    letter: str


class LetterReward:
    """How often a letter stands in the completion."""

    DEADLINE = AdaptiveDeadlineConfig(min_s=1.0, factor=2.0, max_s=5.0)
    WORKERS = 3

    def __init__(
        self, config: LetterConfig, *, entry: RewardConfig, name: str, shared: Shared
    ) -> None:
        self.name, self._letter = name, config.letter

    def check(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            raise RewardError("there are no rows to judge")

    async def open(self) -> None: ...

    async def score(
        self, samples: Sequence[RewardInput], *, timeout_s: float | None = None
    ) -> list[Scored | Failed | None]:
        counts = [sample.completion.count(self._letter) for sample in samples]
        return [Scored(value=float(count), seconds=0.0) for count in counts]

    def outage(self) -> str | None:
        return None

    async def close(self) -> None: ...


# -- the drill -------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_file_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    file: Any = ModuleType("rollpacker.rewards.letters")
    file.LetterReward, file.LetterConfig = LetterReward, LetterConfig
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(BUILT_IN, "letters", BuiltIn("letters", "LetterReward", "LetterConfig"))


def config(arguments: Mapping[str, Any]) -> RunConfig:
    entry = {"function": "letters", "arguments": {**arguments}, "weight": 0.5}
    return config_of({**PLAIN, "rewards": [entry]}, [], RunConfig)


def test_a_run_is_judged_by_it(tmp_path: Path) -> None:
    reward = load_reward(config({"letter": "x"}))
    controller, _ = make(tmp_path, run_config(steps=2), reward=reward)
    assert drive(controller) == "every step is done"
    log = [entry for entry in EventLog(tmp_path / "events.jsonl") if isinstance(entry, Record)]
    scored = [entry.event for entry in log if isinstance(entry.event, SampleScored)]
    lengths = {
        entry.event.sample: entry.event.num_tokens
        for entry in log
        if type(entry.event).__name__ == "SampleGenerated"
    }
    # The fakes decode a token to an x.
    assert scored and all(one.value == 0.5 * lengths[one.sample] for one in scored)


def test_its_own_workers_and_deadline_reach_the_core() -> None:
    reward = load_reward(config({"letter": "x"}))
    wanted = RewardKindConfig(workers=LetterReward.WORKERS, deadline=LetterReward.DEADLINE)
    assert reward_kinds(reward) == {"train": wanted}
    asyncio.run(reward.close())


def test_what_is_wrong_with_its_arguments_is_said() -> None:
    with pytest.raises(RewardError, match=r'letters.*"?leter"?.*Did you mean'):
        load_reward(config({"leter": "x"}))


def test_without_its_row_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(BUILT_IN, "letters")
    with pytest.raises(RewardError, match='there is no built-in reward "letters"'):
        load_reward(config({"letter": "x"}))
