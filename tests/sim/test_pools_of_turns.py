"""Simulated jobs whose environments take long: none holds the rollout pool for their sake."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.cluster.decide.events import Submitted
from rollpacker.core.commands import Continue, Enter, Leave
from rollpacker.core.events import Acted, Entered
from rollpacker.core.job.stay import Stay
from rollpacker.core.records import Record
from rollpacker.report.time_book import POOL_CAUSES
from tests.report.test_pools import booked
from tests.sim.test_pooled_jobs import FIXED, STEPS, SWITCH_S, Host, Life, demand

ANSWER_S = 600.0


def settings_of(answer_s: float) -> list[str]:
    """All trajectories alike: two messages, and an answer behind each."""
    turns = (
        "turns={messages_quantiles: {0.5: 2}, given_tokens_quantiles: {0.5: 100}, "
        f"seconds_quantiles: {{0.5: {answer_s}}}, max_tokens: 24576, max_turns: 25}}"
    )
    plain = ["stream_trainer.enabled=false", "rollout.prompts_per_step=16"]
    return [*plain, *FIXED, turns]


def run(folder: Path, answer_s: float, num_jobs: int) -> tuple[Life, Host]:
    """A job alone, and so many such ones together."""
    overrides = settings_of(answer_s)
    alone = Life("alone", folder, overrides, None)
    alone.simulation.run(STEPS)
    host = Host()
    for number in range(num_jobs):
        name = alone.name = f"job {number}"
        host.lives[name] = Life(name, folder, overrides, host)
        host.tell(Submitted(0.0, demand(alone)))
    host.run(STEPS)
    return alone, host


def period_s(life: Life) -> float:
    begin, end = STEPS // 3, STEPS - 1
    return (life.committed_s[end] - life.committed_s[begin]) / (end - begin)


def entries(life: Life) -> list[str]:
    """What the job entered the rollout pool for."""
    records = [entry for entry in life.log if isinstance(entry, Record)]
    commands = [command for record in records for command in record.commands]
    return [c.purpose for c in commands if isinstance(c, Enter) and c.pool == "rollout"]


@pytest.mark.parametrize("count", [2, 3])
def test_long_answers_are_time_for_others(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes what it takes alone, and its own switches: one more, to come back for the second
    message. Who stays while environments work has the pool one after the other."""
    alone, host = run(tmp_path, ANSWER_S, count)
    own_s = sum(alone.iterations[-1].times)
    switches_s = 2 * SWITCH_S["rollout"] + SWITCH_S["train"]
    for life in host.lives.values():
        assert period_s(life) == pytest.approx(own_s + switches_s, rel=1e-9)
        assert {*entries(life)} == {"round", "turns"}
    monkeypatch.setattr(Stay, "look", lambda self, now_s, rests: None)
    _, host = run(tmp_path, ANSWER_S, count)
    for life in host.lives.values():
        assert {*entries(life)} == {"round"}
        assert period_s(life) > count * (2 * ANSWER_S + SWITCH_S["rollout"])
    assert period_s(life) / (own_s + switches_s) > 0.9 * count


def test_short_answers_are_waited_for_on_the_pool(tmp_path: Path) -> None:
    alone, host = run(tmp_path, 2.0, 2)
    train_s = alone.iterations[-1].times.train_s
    assert train_s > 2.0
    for life in host.lives.values():
        assert {*entries(life)} == {"round"}


def test_it_trains_on_what_it_does_alone_and_every_second_has_its_cause(tmp_path: Path) -> None:
    alone, host = run(tmp_path, ANSWER_S, 2)
    for life in host.lives.values():
        assert life.trained()[:STEPS] == alone.trained()[:STEPS]
        for one, other in zip(alone.iterations, life.iterations, strict=False):
            assert other.times == pytest.approx(one.times, rel=1e-6, abs=1e-6)
        records = [entry for entry in life.log if isinstance(entry, Record)]
        away = sum(
            isinstance(c, Leave) and isinstance(record.event, Acted | Entered)
            for record in records
            for c in record.commands
        )
        assert away == 1, "but for the first step, it leaves when it is reminded, before the end"
        held = [
            record
            for record in records
            if isinstance(record.event, Entered)
            and any(isinstance(c, Continue) for c in record.commands)
        ]
        assert len(held) >= STEPS - 1
        book = booked(life.log)
        seconds = book.seconds()
        waited_s = sum(seconds[cause] for cause in POOL_CAUSES)
        assert waited_s == pytest.approx(life.phases.waited_s, rel=1e-6) and waited_s > 0
        # Two answers in each step, but for what the wait for the pool has of them.
        assert seconds["environment"] == pytest.approx(
            2 * ANSWER_S * len(life.committed_s), rel=0.1
        )
