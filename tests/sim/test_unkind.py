"""What goes wrong is drawn from the seed and the sample, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from rollpacker.bus import Recorded
from rollpacker.core.commands import Launch, RoundKind, Score
from rollpacker.core.events import SampleAborted, SampleFailed, SampleGenerated, SampleScored
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.sim.unkind import Unkind, UnkindConfig

SAMPLES = [SampleId(PromptId("train", 0, row), 0, 0) for row in range(1000)]


def unkind(seed: int = 0, **rates: float) -> Unkind:
    return Unkind(UnkindConfig(**rates), Recorded(Launch, Score), seed=seed)


def generated(sample: SampleId) -> SampleGenerated:
    return SampleGenerated(time_s=2.0, sample=sample, num_tokens=5, finish_reason="stop", version=3)


def scored(sample: SampleId, **values: Any) -> SampleScored:
    return SampleScored(time_s=2.0, sample=sample, value=1.0, seconds=0.5, **values)


def test_the_kind_world_is_left_as_it_is() -> None:
    world = unkind()
    for sample in SAMPLES[:10]:
        for event in (generated(sample), scored(sample)):
            assert world.answer(event) is event
        assert world.delay_s(sample) == 0


def test_the_same_seed_brings_the_same_misfortune() -> None:
    def failed(seed: int) -> list[SampleId]:
        answers = [unkind(seed, failure_rate=0.2).answer(generated(s)) for s in SAMPLES]
        return [a.sample for a in answers if isinstance(a, SampleFailed)]

    assert failed(1) == failed(1) != failed(2)
    assert 150 < len(failed(1)) < 250


def test_an_abort_that_comes_too_late_finds_a_response_of_the_same_weights() -> None:
    world = unkind(late_finish_rate=1.0)
    launch = Launch(round=1, kind=RoundKind.SHORT, samples=tuple(SAMPLES), version=7)
    world.routes()[Launch](launch)
    late = world.answer(SampleAborted(time_s=2.0, sample=SAMPLES[0], num_tokens=4))
    assert isinstance(late, SampleGenerated)
    assert (late.num_tokens, late.version, late.time_s) == (5, 7, 2.0)


def test_machinery_that_failed_may_work_when_it_is_asked_again() -> None:
    world = unkind(infrastructure_rate=0.3, no_verdict_rate=0.1)
    causes: dict[int, list[str]] = {0: [], 1: []}
    for retry in causes:
        for sample in SAMPLES:
            world.routes()[Score](Score(sample=sample, retry=retry))
            answer = world.answer(scored(sample))
            assert isinstance(answer, SampleScored)
            assert bool(answer.cause) == (answer.value is None) == bool(answer.reason)
            causes[retry].append(answer.cause)
    both = [one == other == "infrastructure" for one, other in zip(*causes.values(), strict=True)]
    assert 250 < causes[0].count("infrastructure") < 350 and 60 < sum(both) < 120
    lost = [[c == "sample" for c in causes[retry]] for retry in causes]
    assert any(lost[0]) and any(lost[1])
    cancelled = scored(SAMPLES[0], cause="cancelled")
    assert world.answer(cancelled) is cancelled


def test_delays_lie_below_the_most() -> None:
    delays = [unkind(verdict_delay_s=10.0).delay_s(sample) for sample in SAMPLES]
    assert 0 <= min(delays) < 0.5 and 9.5 < max(delays) < 10


@pytest.mark.parametrize(
    ("name", "value"),
    [("failure_rate", 1.5), ("late_finish_rate", -0.1), ("verdict_delay_s", float("inf"))],
)
def test_shares_are_shares(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        UnkindConfig(**{name: value})
