"""Which tokens of a deferred trajectory each turn of its next launch has as drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollpacker.core.commands import Defer, Launch, RoundKind
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.dialogue.trajectory import Segment, Trajectory
from rollpacker.engines.engine import Carried, GenerationRequest, Response, SamplingParams
from rollpacker.run.errors import RunError
from rollpacker.run.ports.carried import CarriedTokens, read_carried, write_carried
from rollpacker.run.ports.carried_turns import CarriedTurns
from rollpacker.run.ports.player import Play

PROMPT = PromptId("train", 0, 0)
ROW = PromptRow(prompt="p", tokens=(1, 2), columns={})
SAMPLING = SamplingParams(max_response_tokens=9)
LOG_PROB = -1 / 3


class Sample:
    """One sample's way through the ports, in the order of a run."""

    def __init__(
        self, carried: CarriedTokens, turns: CarriedTurns, attempt: int, count: int
    ) -> None:
        self.carried, self.turns, self.sample = carried, turns, SampleId(PROMPT, 0, attempt)
        self.play = Play(self.sample, ROW, Trajectory(ROW.tokens))
        command = Launch(
            round=1, kind=RoundKind.SHORT, samples=(self.sample,), version=0,
            carried=(count,) if count else (),
        )  # fmt: skip
        [request] = carried.requests(command, (ROW,), SAMPLING)
        self.request = turns.launched(request)

    @property
    def drafts(self) -> tuple[int, ...]:
        return () if self.request.carried is None else self.request.carried.tokens

    def response(self, tokens: tuple[int, ...], reason: str) -> Response:
        return Response(
            sample=self.sample, prompt_tokens=(), tokens=tokens, version=0,
            log_probs=(LOG_PROB,) * len(tokens), finish_reason=reason,
        )  # fmt: skip

    def num_kept(self, tokens: tuple[int, ...]) -> int | None:
        pairs = zip(tokens, self.drafts, strict=False)
        same = [one == other for one, other in pairs]
        return (same.index(False) if False in same else len(same)) if self.drafts else None

    def draw(self, *tokens: int) -> None:
        event = SampleGenerated(
            time_s=0, sample=self.sample, num_tokens=len(tokens), finish_reason="stop", version=0,
            num_kept=self.num_kept(tokens),
        )  # fmt: skip
        response = self.response(tokens, "stop")
        self.turns.drawn(event, self.play, response)
        self.play.heard(response)

    def give(self, *tokens: int) -> None:
        self.play.trajectory = self.play.trajectory.and_then(Segment(tokens))
        request = self.play.request(SAMPLING, None)
        self.request = self.turns.further(request, self.play)

    def stop(self, *tokens: int, looked: bool = True) -> None:
        """By the end of the race; an engine had so many tokens of the turn at hand."""
        self.turns.cancelled([self.play])
        self.carried.routes()[Defer](Defer(prompts=(PROMPT,)))
        if tokens:
            event = SampleAborted(
                time_s=0, sample=self.sample, num_tokens=len(tokens),
                num_kept=self.num_kept(tokens) if looked else None,
            )  # fmt: skip
            self.turns.aborted(event, self.play, self.response(tokens, "aborted"))
        self.turns.settle()


def left(carried: CarriedTokens) -> tuple[tuple[int, ...], object]:
    kept = carried.settle()[PROMPT][0]
    return tuple(kept.tokens.tolist()), kept.given


def begun() -> tuple[CarriedTokens, CarriedTurns]:
    """Two turns and a bit of the third one wait."""
    carried = CarriedTokens(TailBatchingConfig())
    turns = CarriedTurns(carried)
    first = Sample(carried, turns, 0, 0)
    assert first.request.carried is None
    first.draw(11, 12, 13)
    first.give(21, 22)
    first.draw(14, 15)
    first.give(23)
    first.stop(16, 17)
    return carried, turns


ALL = (11, 12, 13, 21, 22, 14, 15, 23, 16, 17)


def test_each_turn_has_what_stood_there_as_drafts() -> None:
    carried, turns = begun()
    assert left(carried) == (ALL, ((3, 5), (7, 8)))
    again = Sample(carried, turns, 1, len(ALL))
    assert again.request.carried == Carried(tokens=(11, 12, 13), log_probs=(LOG_PROB,) * 3)
    again.draw(11, 12, 13)
    again.give(21, 22)
    assert again.drafts == (14, 15)
    again.draw(14, 15)
    again.give(23)
    assert again.drafts == (16, 17)
    again.draw(16, 17, 18)
    again.give(24)
    assert again.drafts == ()
    again.stop(19)
    assert left(carried) == ((*ALL, 18, 24, 19), ((3, 5), (7, 8), (11, 12)))


@pytest.mark.parametrize("drawn", [(11, 12, 99), (11, 12, 13, 14), (11, 12)])
def test_from_the_first_token_that_differs_on_nothing_is_used(drawn: tuple[int, ...]) -> None:
    carried, turns = begun()
    again = Sample(carried, turns, 1, len(ALL))
    again.draw(*drawn)
    again.give(21, 22)
    assert again.drafts == ()
    again.stop(14)
    expected = (*drawn, 21, 22, 14)
    if drawn == (11, 12):  # it ended before what was left did: nothing is known to differ
        expected = ALL
    assert left(carried)[0] == expected


@pytest.mark.parametrize("given", [(21, 29), (21,), (21, 22, 23), ()])
def test_another_answer_is_a_difference(given: tuple[int, ...]) -> None:
    carried, turns = begun()
    again = Sample(carried, turns, 1, len(ALL))
    again.draw(11, 12, 13)
    again.give(*given)
    assert again.drafts == ()
    again.draw(14, 15)
    again.stop()
    assert left(carried)[0] == (11, 12, 13, *given, 14, 15)


@pytest.mark.parametrize("tokens", [(), (14,), (14, 15)])
@pytest.mark.parametrize("looked", [True, False])
def test_one_that_is_stopped_on_what_it_had_keeps_all_of_it(
    tokens: tuple[int, ...], looked: bool
) -> None:
    carried, turns = begun()
    again = Sample(carried, turns, 1, len(ALL))
    again.draw(11, 12, 13)
    again.give(21, 22)
    again.stop(*tokens, looked=looked)
    assert left(carried)[0] == ALL


def test_drafts_are_no_more_than_the_turn_may_have() -> None:
    carried, turns = begun()
    again = Sample(carried, turns, 1, len(ALL))
    again.draw(11, 12, 13)
    again.play.trajectory = again.play.trajectory.and_then(Segment((21, 22)))
    short = GenerationRequest(
        sample=again.sample,
        prompt_tokens=(1, 2),
        sampling=SamplingParams(max_response_tokens=1),
    )
    request = turns.further(short, again.play)
    assert request.carried is not None and request.carried.tokens == (14,)


def test_a_checkpoint_holds_trajectories(tmp_path: Path) -> None:
    carried, _ = begun()
    waiting = carried.settle()
    write_carried(tmp_path, waiting, "tokenizer")
    found = read_carried(tmp_path, "tokenizer", {PROMPT: [len(ALL)]})
    ours, theirs = found[PROMPT][0], waiting[PROMPT][0]
    assert np.array_equal(ours.tokens, theirs.tokens) and ours.given == theirs.given
    assert np.array_equal(ours.log_probs, theirs.log_probs)
    assert ours.log_probs[3] == 0.0 and ours.log_probs[5] == LOG_PROB
    resumed = CarriedTokens(TailBatchingConfig(), found)
    assert Sample(resumed, CarriedTurns(resumed), 1, len(ALL)).drafts == (11, 12, 13)
    index = tmp_path / "carried" / "carried.json"
    index.write_text(index.read_text().replace("[3, 5]", "[3, 99]"))
    with pytest.raises(RunError, match="no stretches of 10"):
        read_carried(tmp_path, "tokenizer", {})


def test_without_carrying_nothing_is_kept() -> None:
    carried = CarriedTokens(TailBatchingConfig(carry="none"))
    first = Sample(carried, CarriedTurns(carried), 0, 0)
    first.draw(11, 12)
    first.stop()
    assert not carried.settle()
