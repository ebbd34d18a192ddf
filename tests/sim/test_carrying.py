"""Carrying in virtual time: a length belongs to (prompt, place), newer weights change what follows
the first token that comes out differently, and only new tokens are generated."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollpacker.core.commands import Defer, Launch, RoundKind, TrainOn
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Record
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.length_laws import PoolLengths, lengths_of
from rollpacker.sim.responses import MAX_REDRAWS, Responses
from rollpacker.sim.scenario import CarrySpec, Cluster, RolloutSpec, Scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.unkind import UnkindConfig
from rollpacker.sim.workload import Workload
from rollpacker.sim.workload_spec import LengthLaw, RewardStage

QUANTILES = {0.1: 100, 0.5: 500, 0.95: 2000, 0.99: 4096}


def small(mismatch: float = 0.0, **settings: Any) -> Scenario:
    tail = TailBatchingConfig(
        **{"stragglers": "pool", "prompt_factor": 1.5, **settings.pop("tail", {})}
    )
    return Scenario(
        **{
            "name": "small",
            "model": "qwen2.5-7b",
            "cluster": Cluster(gpu="h800", gpus=8),
            "rollout": RolloutSpec(
                prompts_per_step=8, samples_per_prompt=4, max_response_tokens=4096
            ),
            "lengths": LengthLaw(quantiles=QUANTILES),
            "rewards": (RewardStage(kind="judge", share=1.0, calls_per_s=4.0),),
            "tail_batching": tail,
            "carry": CarrySpec(mismatch=mismatch),
            "steps": 30,
            **settings,
        }
    )


def observed(scenario: Scenario) -> tuple[Any, list[Record]]:
    records: list[Record] = []
    return simulate(scenario, observe=records.append), records


def trained(records: list[Record]) -> Counter[tuple[PromptId, int, int]]:
    """(prompt, place, length) of every response trained on."""
    lengths, found = {}, Counter[tuple[PromptId, int, int]]()
    for record in records:
        if isinstance(record.event, SampleGenerated):
            lengths[record.event.sample] = record.event.num_tokens
        for command in record.commands:
            if isinstance(command, TrainOn):
                for group in command.groups:
                    found.update((s.prompt, s.index, lengths[s]) for s in group)
    return found


# -- only the order ----------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        {},
        {"prompt_factor": 2.0, "max_deferrals": 1},
        {"stragglers": "queue"},
        {"stragglers": "queue", "carry": "none"},
        {"carry": "weighted"},
        {"race": "scored"},
    ],
)
def test_without_mismatches_every_response_is_that_of_a_run_without(tail: dict[str, Any]) -> None:
    scenario = small(tail=tail)
    result, records = observed(scenario)
    workload, found = Workload(scenario), trained(records)
    assert set(found.values()) == {1} and sum(found.values()) == 30 * 32
    for prompt, place, length in found:
        assert workload.lengths(prompt, 0)[place] == length
    assert result.paired_shift == 0.0
    assert any(isinstance(c, Defer) for r in records for c in r.commands)


def test_published_selection_shifts_the_same_prompts() -> None:
    result = simulate(small(tail={"selection": "published", "prompt_factor": 1.25}))
    assert result.paired_shift < -0.1


def test_only_what_is_new_is_generated() -> None:
    result, records = observed(small())
    new = sum(
        r.event.num_tokens - (r.event.num_kept or 0)
        for r in records
        if isinstance(r.event, SampleGenerated | SampleAborted)
    )
    assert result.tokens_generated == new
    anew = simulate(small(tail={"carry": "none", "stragglers": "pool"}))
    assert anew.tokens_generated > 1.1 * result.tokens_generated
    assert anew.tokens_trained == pytest.approx(result.tokens_trained, rel=0.02)


def test_verification_takes_the_time_of_a_prefill() -> None:
    """The same rounds on a machine whose prefill is a hundred times slower end later."""
    from dataclasses import replace

    from rollpacker.sim.latency import Calibration

    slow = replace(Calibration(), prefill_utilization=Calibration().prefill_utilization / 100)
    carried = simulate(small()), simulate(small(), calibration=slow)
    plain = {"enabled": False}
    fresh = simulate(small(tail=plain)), simulate(small(tail=plain), calibration=slow)
    lost = [
        after.mean["rollout_s"] - before.mean["rollout_s"] for before, after in (carried, fresh)
    ]
    assert lost[0] > 2 * lost[1] > 0


def test_launches_name_what_is_carried_and_events_what_was_kept() -> None:
    _, records = observed(small(mismatch=1e-3))
    carried: dict[SampleId, int] = {}
    left: dict[tuple[PromptId, int], int] = {}
    for record in records:
        event = record.event
        if isinstance(event, SampleGenerated | SampleAborted):
            left[event.sample.prompt, event.sample.index] = event.num_tokens
            before = carried.get(event.sample, 0)
            assert (event.num_kept is None) == (before == 0)
            assert event.num_kept is None or 0 <= event.num_kept <= before
            assert event.num_tokens >= (event.num_kept or 0)
        for command in record.commands:
            if isinstance(command, Launch) and command.carried:
                carried = dict(zip(command.samples, command.carried, strict=True))
                for sample, tokens in carried.items():
                    assert tokens == left.get((sample.prompt, sample.index), 0)
    events = [r.event for r in records if isinstance(r.event, SampleGenerated | SampleAborted)]
    kept = [e for e in events if e.num_kept is not None]
    assert len(kept) > 100 and any(e.num_redraws for e in events)


# -- under newer weights -----------------------------------------------------------


def test_the_measured_mismatch_is_the_one_asked_for() -> None:
    found = simulate(small(mismatch=1e-3, steps=120, tail={"max_deferrals": 1}))
    assert found.mismatch == pytest.approx(1e-3, rel=0.2)  # each is carried over one update


def test_mismatches_shorten_and_the_complement_rule_lengthens_again() -> None:
    shifts = {
        complement: simulate(
            small(mismatch=2e-4, steps=200, tail={"complement": complement})
        ).paired_shift
        for complement in (False, True)
    }
    assert shifts[False] < -0.03
    assert abs(shifts[True]) < 0.6 * abs(shifts[False])


def responses(mismatch: float, **tail: Any) -> Responses:
    scenario = small(tail=tail)
    return Responses(Workload(scenario), scenario.tail_batching, mismatch)


def launch(version: int, attempt: int, *carried: int) -> Launch:
    prompt = PromptId("judge", 0, 7)
    samples = tuple(SampleId(prompt, place, attempt) for place in range(4))
    return Launch(
        round=version + 1,
        kind=RoundKind.SHORT,
        samples=samples,
        version=version,
        tensor_parallel=1,
        speculate=False,
        carried=carried,
    )


def deferred(known: Responses, *reached: int) -> None:
    """All four samples are stopped there."""
    known.reached.update(enumerate(reached))
    known._keep(Defer(prompts=(known.samples[0].prompt,)))
    known.clear()


def test_a_response_does_not_end_before_the_place_where_it_was_cut_off() -> None:
    for mismatch in (0.5, 0.01):
        known = responses(mismatch)
        known.add(launch(0, 0))
        cut = [length // 2 for length in known.lengths]
        deferred(known, *cut)
        known.add(launch(1, 1, *cut))
        for key, floor in enumerate(cut):
            redraws = [known.lengths[key]]
            while known.next_redraw(key):
                redraws.append(known.lengths[key])
            assert all(length <= floor for length in redraws[:-1])
            assert redraws[-1] > floor or len(redraws) == MAX_REDRAWS + 1
            assert known.redraws.get(key, 0) == len(redraws) - 1
        # Cut off again, earlier: the place further on is remembered.
        again = [min(10, length - 1) for length in known.lengths]
        deferred(known, *again)
        known.add(launch(2, 2, *again))
        while any(known.next_redraw(key) for key in range(4)):
            pass
        assert all(
            known.lengths[key] > cut[key] or known.redraws[key] == MAX_REDRAWS for key in range(4)
        )


def test_a_complete_one_has_no_floor_and_weighted_ones_stay() -> None:
    known = responses(1.0)
    known.add(launch(0, 0))
    lengths = list(known.lengths)
    deferred(known, *lengths)
    known.reached.clear()
    known = responses(1.0)
    known.add(launch(0, 0))
    known._keep(Defer(prompts=(known.samples[0].prompt,)))
    known.clear()
    known.add(launch(1, 1, *lengths))
    assert known.kept == dict.fromkeys(range(4), 0) and not known.next_redraw(0)
    assert known.lengths != lengths
    known = responses(1.0, carry="weighted")
    known.add(launch(0, 0))
    known._keep(Defer(prompts=(known.samples[0].prompt,)))
    known.clear()
    known.add(launch(1, 1, *lengths))
    assert known.lengths == lengths and known.done == lengths and not known.kept


def test_a_failed_response_is_the_same_once_more() -> None:
    scenario = small(unkind=UnkindConfig(failure_rate=0.05))
    _, records = observed(scenario)
    replaced = [c for r in records for c in r.commands if isinstance(c, Launch) and c.replaces]
    assert replaced
    places = {c.samples[0]: c.replaces[0] for c in replaced}
    workload = Workload(scenario)
    for record in records:
        event = record.event
        if isinstance(event, SampleGenerated) and event.sample in places:
            first = event.sample
            while first in places:
                first = places[first]
            assert event.num_tokens == workload.lengths(first.prompt, 0)[first.index]


# -- the law of what is drawn anew ---------------------------------------------------


def test_the_first_mismatch_is_geometric() -> None:
    workload = Workload(small())
    samples = [SampleId(PromptId("judge", 0, row), 0, 1) for row in range(4000)]
    found = np.array([workload.first_mismatch(sample, 300, 0.01) for sample in samples])
    assert (found == 300).mean() == pytest.approx(0.99**300, abs=0.015)
    assert (found < 50).mean() == pytest.approx(1 - 0.99**50, abs=0.025)
    assert workload.first_mismatch(samples[0], 300, 0.0) == 300
    assert workload.first_mismatch(samples[0], 300, 1.0) == 0
    assert found.tolist() == [workload.first_mismatch(s, 300, 0.01) for s in samples]


@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_what_is_drawn_anew_is_the_prompts_own_law_beyond_what_is_kept(correlation: float) -> None:
    law = LengthLaw(quantiles=QUANTILES, within_prompt_correlation=correlation)
    workload = Workload(small(lengths=law))
    prompt = PromptId("judge", 0, 3)
    own = np.concatenate([workload.lengths(prompt, attempt, 512) for attempt in range(40)])
    own = own[own > 600]
    anew = np.array(
        [
            workload.redrawn(SampleId(prompt, place, attempt), 0, 600)
            for attempt in range(500)
            for place in range(10)
        ]
    )
    assert anew.min() > 600
    for quantile in (0.25, 0.5, 0.75, 0.9):
        assert np.quantile(anew, quantile) == pytest.approx(np.quantile(own, quantile), rel=0.08)


def test_a_hard_prompt_runs_to_the_cap_more_often_the_longer_it_is() -> None:
    law = LengthLaw(quantiles=QUANTILES, hard_prompts=1.0, hard_prompt_cap_probability=0.3)
    workload = Workload(small(lengths=law))
    samples = [SampleId(PromptId("judge", 0, row), 0, 1) for row in range(1500)]
    shares = [
        np.mean([workload.redrawn(sample, 0, above) == 4096 for sample in samples])
        for above in (1, 1000)
    ]
    assert shares[0] == pytest.approx(0.31, abs=0.05) and shares[1] > 1.5 * shares[0]


def test_beyond_every_length_there_is_one_more_token() -> None:
    table = lengths_of(LengthLaw(quantiles={0.5: 10, 1.0: 20}), 4096)
    assert table.beyond(0, 0.0, 20)[0] == 0.0 and table.beyond(0, 0.0, 20)[1](0.5) == 21
    pool = PoolLengths([[3, 5, 9]], 100)
    chance, longer = pool.beyond(0, 0.0, 4)
    assert chance == pytest.approx(2 / 3) and {longer(0.0), longer(0.99)} == {5, 9}
    assert pool.beyond(0, 0.0, 9)[1](0.5) == 10
