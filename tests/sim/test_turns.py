"""Scenarios with turns: what is drawn, what environments cost, and what the core makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.config.document import ConfigError
from rollpacker.core.commands import CancelAct, Conclude, Continue, TrainOn
from rollpacker.core.events import Acted
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Record
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.workload import Workload

PATH = Path(__file__).parents[2] / "configs/scenarios/agent-7b.yaml"
SMALL = ("steps=3", "rollout.prompts_per_step=16", "rollout.samples_per_prompt=4")


def scenario(*overrides: str, system: str | None = None) -> Scenario:
    return load_scenario(PATH, [*SMALL, *overrides], system)


def records(of: Scenario) -> list[Record]:
    log: list[Entry] = []
    simulate(of, observe=log.append)
    return [entry for entry in log if isinstance(entry, Record)]


def test_a_trajectory_is_the_same_whoever_asks_and_keeps_its_limits() -> None:
    drawn = [Workload(scenario()).trajectories for _ in range(2)]
    one, other = drawn
    assert one is not None and other is not None
    samples = [SampleId(PromptId("none", 0, row), i, 0) for row in range(50) for i in range(4)]
    for sample in reversed(samples):
        other.turns(sample)
    cut_off = 0
    for sample in samples:
        turns = one.turns(sample)
        assert turns == other.turns(sample)
        assert 1 <= len(turns) <= 25 and one.total(sample) <= 24576
        assert all(1 <= turn.tokens <= 2048 and turn.given >= 1 for turn in turns)
        assert not any(turn.is_cut_off or turn.is_over for turn in turns[:-1])
        cut_off += turns[-1].is_cut_off
    assert 0 < cut_off < len(samples)
    assert len({one.turns(sample)[0].seconds for sample in samples}) > 100


def test_what_is_trained_on_are_whole_trajectories() -> None:
    of = scenario(system="verl")
    log, result = records(of), simulate(of)
    trajectories = Workload(of).trajectories
    assert trajectories is not None
    trained = [
        sample
        for record in log
        for command in record.commands
        if isinstance(command, TrainOn)
        for group in command.groups
        for sample in group
    ]
    assert len(trained) == 3 * 64
    # What was lost to a deadline was replaced, and has another index.
    assert sum(map(trajectories.total, trained)) == sum(s.tokens_trained for s in result.steps)
    reasons = {c.reason for r in log for c in r.commands if isinstance(c, Conclude)}
    assert reasons >= {"done", "length", "turns"}


def test_environments_keep_engines_waiting_and_nothing_is_counted_twice() -> None:
    quick = simulate(scenario("turns.seconds_quantiles={0.5: 0.001}", system="verl"))
    slow = simulate(scenario("turns.seconds_quantiles={0.5: 60}", system="verl"))
    assert sum(s.total_s for s in slow.steps) > 2 * sum(s.total_s for s in quick.steps)
    for result in (quick, slow):
        assert sum(result.bubble.values()) < result.device_seconds
        for step in result.steps:
            stages = step.rollout_s + step.reward_s + step.train_s + step.sync_s
            assert stages == pytest.approx(step.total_s)
    share = slow.bubble["environment"] / slow.device_seconds
    assert share > 0.5 > quick.bubble["environment"] / quick.device_seconds


def test_races_leave_slow_environments_behind() -> None:
    of = scenario()
    raced, awaited = records(of), simulate(scenario(system="verl"))
    assert any(isinstance(c, CancelAct) for r in raced for c in r.commands)
    assert simulate(of).steps[0].total_s < awaited.steps[0].total_s


def test_rows_that_are_kept_spare_the_prefill() -> None:
    kept, anew = (
        sum(s.total_s for s in simulate(scenario(f"turns.keep_rows={on}", system="verl")).steps)
        for on in ("true", "false")
    )
    assert kept < anew


def test_hung_environments_end_at_their_deadline() -> None:
    log = records(scenario("unkind={act_hang_rate: 0.05}", system="verl"))
    late = [r.event for r in log if isinstance(r.event, Acted) and r.event.cause == "deadline"]
    assert late and all((event.seconds or 0.0) <= 600 for event in late)
    assert len({c.samples for r in log for c in r.commands if isinstance(c, Continue)}) > 100


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("turns.max_tokens=0", "turns.max_tokens .* must be at least 1"),
        ("turns.workers=0", "turns.workers .* must be at least 1"),
        ("turns.messages_quantiles={0.5: 0}", "messages_quantiles"),
        ("turns.seconds_quantiles={2: 1}", "seconds_quantiles"),
        ("turns.max_tokens=90000000", "lower turns.max_tokens"),
    ],
)
def test_turns_that_cannot_be(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        scenario(override)
