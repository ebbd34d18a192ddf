"""Simulated trajectories that were deferred: what their next launch takes up, and what it does
not; and plans over them."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import pytest

from rollpacker.config.document import ConfigError
from rollpacker.core.commands import Launch, TrainOn
from rollpacker.core.events import Acted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Record
from rollpacker.sim.carried_turns import CarriedTurns
from rollpacker.sim.plan import compare
from rollpacker.sim.plan_ideas import Candidate, ScenarioEvaluate, order_idea, plan_base
from rollpacker.sim.responses import Responses
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.workload import Workload

PATH = Path(__file__).parents[2] / "configs/scenarios/agent-7b.yaml"
SMALL = ("steps=4", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4")


def scenario(*overrides: str) -> Scenario:
    queue = ("tail_batching.stragglers=queue", "stream_trainer.enabled=false")
    return load_scenario(PATH, [*SMALL, *queue, *overrides])


def records(of: Scenario) -> list[Record]:
    log: list[Entry] = []
    simulate(of, observe=log.append)
    return [entry for entry in log if isinstance(entry, Record)]


def test_what_was_drawn_is_not_decoded_again() -> None:
    carried, anew = (simulate(scenario(f"tail_batching.carry={how}")) for how in ("exact", "none"))
    assert carried.tokens_generated < 0.9 * anew.tokens_generated
    assert sum(s.total_s for s in carried.steps) < sum(s.total_s for s in anew.steps)
    assert carried.mismatch == 0


def test_where_no_token_comes_out_the_same_all_is_as_from_the_start() -> None:
    carried = simulate(scenario("tail_batching.carry=exact", "carry.mismatch=1"))
    anew = simulate(scenario("tail_batching.carry=none"))
    assert carried.steps == anew.steps
    assert carried.mismatch > 0


def test_events_are_those_of_whole_trajectories() -> None:
    """Whatever was taken up, a message has all its tokens, and the environment takes its time."""
    of = scenario("tail_batching.carry=exact", "carry.mismatch=0.0005")
    log, trajectories = records(of), Workload(of).trajectories
    assert trajectories is not None
    drawn, acted = Counter[SampleId](), defaultdict[SampleId, list[float]](list)
    for event in (record.event for record in log):
        if isinstance(event, SampleGenerated):
            drawn[event.sample] += event.num_tokens
        if isinstance(event, Acted) and not event.cause:
            acted[event.sample].append(event.seconds or 0.0)
    commands = [command for record in log for command in record.commands]
    launches = [c for c in commands if isinstance(c, Launch)]
    again = {sample for c in launches for sample in c.samples if sample.attempt}
    trained = {
        sample
        for command in commands
        if isinstance(command, TrainOn)
        for group in command.groups
        for sample in group
    }
    assert again & trained
    for sample in trained:
        turns = trajectories.turns(SampleId(sample.prompt, sample.index, 0))
        assert drawn[sample] == sum(turn.tokens for turn in turns)
        answered = [turn.seconds for turn in turns if not turn.is_cut_off]
        assert acted[sample] == answered[: len(acted[sample])]
        assert len(acted[sample]) >= len(answered) - 1


def test_places_are_counted_with_what_was_given() -> None:
    workload = Workload(scenario())
    trajectories = workload.trajectories
    assert trajectories is not None
    for row in range(30):
        sample = SampleId(PromptId("none", 0, row), 0, 0)
        first, *more = trajectories.turns(sample)
        carried = CarriedTurns(workload, 0.0, Responses(workload))
        carried.keep(sample, first.tokens + 5, 1)
        assert carried.take_up(SampleId(sample.prompt, 0, 1), sample, 2) == first.tokens + 5
        drawn = first.tokens + (max(5 - first.given, 0) if more else 0)
        assert carried.verified.num_tokens == drawn
        assert carried.take_up(SampleId(sample.prompt, 0, 2), sample, 3) == 0, "it is taken once"


def test_trajectories_cannot_carry_by_weights() -> None:
    with pytest.raises(ConfigError, match=r"tail_batching\.carry=weighted does not go with turns"):
        scenario("tail_batching.carry=weighted")


def test_what_plan_compares_leaves_slow_environments_behind() -> None:
    """Rare answers of ten minutes: without a race most steps wait for one."""
    of = load_scenario(
        PATH,
        [
            *("rollout.prompts_per_step=8", "rollout.samples_per_prompt=2", "cluster.gpus=8"),
            "turns.seconds_quantiles={0.5: 0.5, 0.99: 1, 0.995: 600}",
            "turns.deadline={min_s: 900, max_s: 900}",
            *("tail_batching.enabled=false", "stream_trainer.enabled=false"),
        ],
    )
    race = Candidate(ideas=(order_idea(1.5, stragglers="queue"),))
    evaluate = ScenarioEvaluate(scenario=of)
    now, raced = compare(plan_base(of), evaluate, [Candidate(), race], seeds=range(2), steps=9)
    assert raced.step_s < 0.8 * now.step_s
    assert abs(raced.shift) < 0.05
