"""Drafts change how many decode steps there are and nothing that comes out of them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded import drafts
from rollpacker.engines.embedded.drafts import Drafter
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.embedded.rows import Pending, RowTable
from rollpacker.engines.engine import (
    Carried,
    EngineConfig,
    EngineOutput,
    EngineStatus,
    GenerationRequest,
    SamplingParams,
)
from tests.engines.tiny import END, MODELS, VOCABULARY, group, make_engine, request, tiny_model


class Letters:
    """A tokenizer whose token t is one letter."""

    eos_token_id = END

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in tokens)


class Insider(Drafter):
    """Knows what will come out, and errs at random places: drafts of every kind of quality.

    Goes on behind the end of a response, where nothing may be taken from.
    """

    def __init__(self, outputs: Sequence[EngineOutput]) -> None:
        super().__init__(7)
        self._known = {
            output.event.sample: output.response.tokens for output in outputs if output.response
        }
        self._dice = random.Random(0)

    def propose(self, rows: RowTable) -> list[list[int]] | None:
        if self._dice.random() < 0.3:
            return None
        proposed = []
        for row, count in enumerate(rows.host_column("count").tolist()):
            known = self._known.get(rows.pending[row].request.sample, ())
            length = self._dice.randint(0, 7)
            tokens = [*known[count : count + length], END, 9, 9][:length]
            if tokens and self._dice.random() < 0.5:
                tokens[self._dice.randrange(len(tokens))] = self._dice.randrange(VOCABULARY)
            proposed.append(tokens)
        if not any(proposed):
            return None
        self._proposed = [(0, 0, len(tokens)) for tokens in proposed]
        return proposed


def _serve(engine: TorchEngine, requests: Sequence[GenerationRequest]) -> list[EngineOutput]:
    """What the engine says of each request, in their order."""
    outputs: dict[SampleId, EngineOutput] = {}
    errors: list[BaseException] = []
    done = threading.Event()

    def listen(new: Sequence[EngineOutput]) -> None:
        outputs.update((output.event.sample, output) for output in new)
        if len(outputs) == len(requests):
            done.set()

    def fail(error: BaseException) -> None:
        errors.append(error)
        done.set()

    engine.start(listen, fail)
    engine.submit(requests)
    assert done.wait(60)
    assert not errors, errors
    return [outputs[one.sample] for one in requests]


def _with_and_without(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], **options: object
) -> tuple[EngineStatus, EngineStatus]:
    """Serves the requests on an engine without drafts and on one with an insider's: all that it
    says must be the same. Returns how the engines ended up."""
    engine = make_engine(model, draft_tokens=0, **options)
    wanted = _serve(engine, requests)
    before = engine.status()
    asyncio.run(engine.close())
    engine = make_engine(model, **options)
    engine._drafter = Insider(wanted)
    outputs = _serve(engine, requests)
    after = engine.status()
    asyncio.run(engine.close())
    for one, other in zip(outputs, wanted, strict=True):
        assert one.event == other.event
        assert (one.response is None) == (other.response is None)
        if one.response is not None and other.response is not None:
            assert one.response.tokens == other.response.tokens
            assert one.response.log_probs == pytest.approx(other.response.log_probs, abs=1e-4)
    assert after.generated_tokens == before.generated_tokens
    return before, after


SAMPLINGS: dict[str, dict[str, object]] = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
    "long": {"max_response_tokens": 60},
    "short": {"max_response_tokens": 4},
    "forced": {"forced_length": 33},
    "stop": {"stop": ("GH", "K", "MAN")},
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("options", [{}, {"plain_forward": False}])
def test_what_comes_out_does_not_depend_on_drafts(
    sampling: str, options: dict[str, object]
) -> None:
    requests = [one for row in range(5) for one in group(row, 4, **SAMPLINGS[sampling])]
    before, after = _with_and_without(
        tiny_model(), requests, tokenizer=Letters(), max_slots=7, **options
    )
    assert after.drafted_tokens > after.accepted_tokens > 0
    assert after.decode_steps < before.decode_steps
    assert (before.drafted_tokens, before.accepted_tokens) == (0, 0)


@pytest.mark.parametrize("model_type", sorted(set(MODELS) - {"qwen2"}))
def test_what_comes_out_does_not_depend_on_drafts_on_any_model(model_type: str) -> None:
    requests = [one for row in range(5) for one in group(row, 4, max_response_tokens=40)]
    before, after = _with_and_without(tiny_model(model_type), requests, max_slots=7)
    assert after.decode_steps < before.decode_steps


def test_a_response_that_fails_fails_at_the_same_token() -> None:
    """Logits are no numbers once the poison was drawn, and a draft may contain it at any time."""
    model = tiny_model(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[20] = float("nan")
    requests = [request(row, index, forced_length=30) for row in range(6) for index in range(3)]
    before, after = _with_and_without(model, requests, max_slots=5)
    assert after.decode_steps < before.decode_steps


def test_the_complement_rule_draws_again_as_without_drafts() -> None:
    model = tiny_model()
    requests = [one for row in range(6) for one in group(row, 4, max_response_tokens=40)]
    engine = make_engine(model)
    old = _serve(engine, requests)
    asyncio.run(engine.close())
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    carrying = [
        dataclasses.replace(
            one,
            carried=Carried(
                tokens=output.response.tokens[:-1],
                log_probs=output.response.log_probs[:-1],
                floor=len(output.response.tokens) - 1,
            ),
        )
        for one, output in zip(requests, old, strict=True)
        if output.response is not None and len(output.response.tokens) > 1
    ]
    engine = make_engine(model, draft_tokens=0)
    redraws = [output.event.num_redraws for output in _serve(engine, carrying)]
    asyncio.run(engine.close())
    assert sum(redraws) > 3
    before, after = _with_and_without(model, carrying, max_slots=5)
    assert after.decode_steps < before.decode_steps


def test_a_real_drafter_copies_what_a_sibling_had_and_does_the_same_again() -> None:
    """Greedy samples of one prompt are all alike; those that have to wait find it said already."""
    requests = [
        request(row, index, temperature=0.0, forced_length=80, max_response_tokens=80)
        for index in range(4)
        for row in range(4)
    ]
    model = tiny_model()
    plain = make_engine(model, draft_tokens=0, max_slots=4)
    wanted = [output.response for output in _serve(plain, requests)]
    engine = make_engine(model, draft_tokens=15, max_slots=4)
    steps = []
    for _ in range(3):
        before = engine.status()
        outputs = _serve(engine, requests)
        after = engine.status()
        steps.append(
            (
                after.decode_steps - before.decode_steps,
                after.drafted_tokens - before.drafted_tokens,
                after.accepted_tokens - before.accepted_tokens,
            )
        )
        for output, response in zip(outputs, wanted, strict=True):
            assert output.response is not None and response is not None
            assert output.response.tokens == response.tokens
    assert steps[0] == steps[1] == steps[2], "what is learnt in a round must not outlast it"
    assert steps[0][0] < 0.6 * plain.status().decode_steps
    asyncio.run(engine.close())
    asyncio.run(plain.close())


def test_negative_draft_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="draft_tokens must be at least 0"):
        EngineConfig(draft_tokens=-1)


# -- the drafter alone -----------------------------------------------------------------------------


class Rows:
    """As much of a `RowTable` as a drafter looks at; each row is (prompt, sample, text)."""

    def __init__(self, *rows: tuple[int, int, str], limit: int = 100, prompt: str = "") -> None:
        params = SamplingParams(max_response_tokens=limit)
        self.texts = [text for _, _, text in rows]
        self.redraws = [0] * len(rows)
        self.limit = limit
        self.pending = [
            Pending(
                GenerationRequest(
                    sample=SampleId(PromptId("train", 0, row), index, 0),
                    prompt_tokens=_tokens(prompt),
                    sampling=params,
                ),
                10 * row + index,
            )
            for row, index, _ in rows
        ]

    @property
    def num_rows(self) -> int:
        return len(self.pending)

    def host_column(self, name: str) -> np.ndarray:
        columns = {
            "count": [len(text) for text in self.texts],
            "limit": [self.limit] * len(self.texts),
            "redraw": self.redraws,
        }
        return np.array(columns[name])

    def tokens(self, row: int, start: int = 0) -> list[int]:
        return list(_tokens(self.texts[row][start:]))

    def token_array(self, row: int) -> np.ndarray:
        return np.array(self.tokens(row))

    def carry(self, row: int, text: str) -> None:
        carried = Carried(tokens=_tokens(text), log_probs=(0.0,) * len(text))
        entry = self.pending[row]
        request = dataclasses.replace(entry.request, carried=carried)
        self.pending[row] = dataclasses.replace(entry, request=request)


def _tokens(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def _proposed(drafter: Drafter, rows: Rows) -> list[str] | None:
    drafter._pacing.credit = 1.0  # It looks at once.
    found = drafter.propose(rows)  # type: ignore[arg-type]  # as much of it as is looked at
    return None if found is None else ["".join(map(chr, draft)) for draft in found]


def _drafter(max_tokens: int = 7) -> Drafter:
    return Drafter(max_tokens)


def test_a_row_goes_on_as_its_own_text_did_and_round_again() -> None:
    assert _proposed(_drafter(), Rows((0, 0, "xyzabcdefghabcdefgh"))) == ["abcdefg"]
    assert _proposed(_drafter(), Rows((0, 0, "no!!!!!!!!!!!!"))) == ["!!!!!!!"]


def test_the_prompt_is_looked_at_too() -> None:
    rows = Rows((0, 0, "Mr Quick"), prompt="Mr Quick Brown? ")
    assert _proposed(_drafter(), rows) == [" Brown? "[:7]]


def test_the_longest_match_wins_and_of_equals_the_own_text() -> None:
    sibling = (0, 0, "__the same words again 11111111")
    found = _proposed(
        _drafter(), Rows(sibling, (0, 1, "the same words again--the same words again"))
    )
    assert found == ["1111111", "--the s"]
    found = _proposed(_drafter(), Rows(sibling, (0, 1, "e words again--the same words again")))
    assert found is not None and found[1] == " 111111"


def test_samples_of_another_prompt_are_no_siblings() -> None:
    others = [(row, 0, "!" * 20) for row in range(3)]
    rows = Rows(*others, (8, 0, "__the same words again 1111"), (9, 0, "the same words again"))
    assert _proposed(_drafter(), rows) == [*["!!!!!!!"] * 3, "1111111", ""]


def test_an_ended_sibling_stays_up_to_its_end() -> None:
    drafter = _drafter()
    rows = Rows((0, 0, "the quick brown fox"), (0, 1, "brown dog"), (0, 2, "The quick bro"))
    drafter.keep(rows, [0, 1])  # type: ignore[arg-type]
    del rows.pending[:2], rows.texts[:2], rows.redraws[:2]
    assert _proposed(drafter, rows) == ["wn fox"]
    drafter.forget()
    assert _proposed(drafter, rows) is None


def test_what_an_earlier_launch_had_goes_on_behind_the_token_that_differs() -> None:
    rows = Rows((0, 0, "five and six"), (1, 0, "!" * 20), (2, 0, "!" * 20))
    rows.carry(0, "five and ten are fifteen")
    assert _proposed(_drafter(), rows) == [" are fi", "!!!!!!!", "!!!!!!!"]


def test_tokens_taken_back_are_forgotten() -> None:
    drafter = _drafter()
    rows = Rows((0, 0, "uvwxyz123456uvwxyz"))
    assert _proposed(drafter, rows) == ["123456u"]
    rows.texts[0], rows.redraws[0] = "abcdefgh7777abcdefgh", 1
    assert _proposed(drafter, rows) == ["7777abc"]


def test_no_draft_goes_beyond_the_limit() -> None:
    rows = Rows((0, 0, "!" * 20), (1, 0, "!" * 24), (2, 0, "!" * 17), limit=25)
    assert _proposed(_drafter(), rows) == ["!!!!", "", "!!!!!!!"]


def test_drafts_that_fail_get_shorter_and_stop_and_are_tried_again() -> None:
    drafter, text, lengths = _drafter(15), "ab" * 8, []
    rows = Rows((0, 0, text), (1, 0, text), (2, 0, text), limit=10_000)
    drafter._pacing.credit = 1.0
    for _ in range(600):
        found = drafter.propose(rows)  # type: ignore[arg-type]
        lengths.append(max(map(len, found)) if found else 0)
        if found:
            drafter.judge(np.array([1, 1, 1]))
    assert lengths[0] >= 7
    assert lengths.count(0) > 550
    tail = lengths[100:]
    assert sum(tail) < 0.1 * len(tail) * lengths[0]


def test_drafts_that_hold_get_longer() -> None:
    drafter, lengths = _drafter(31), []
    rows = Rows((0, 0, "ab" * 5), limit=100_000)
    for _ in range(30):
        (draft,) = _proposed(drafter, rows) or [""]
        lengths.append(len(draft))
        rows.texts[0] += draft + "ab"[len(rows.texts[0] + draft) % 2]
        if draft:
            drafter.judge(np.array([len(draft) + 1]))
    assert lengths[-1] > lengths[0] > 0
    assert drafter.num_accepted == drafter.num_drafted == sum(lengths)


def test_many_rows_get_no_drafts() -> None:
    few = [(row, 0, "!" * 30) for row in range(drafts.MAX_ROWS)]
    assert _proposed(_drafter(), Rows(*few)) is not None
    assert _proposed(_drafter(), Rows(*few, (999, 0, "!" * 30))) is None


def test_what_is_kept_of_ended_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "MAX_KEPT_TOKENS", 100)
    drafter = _drafter()
    for row in range(10):
        drafter.keep(Rows((row, 0, f"some {row} " * 5)), [0])  # type: ignore[arg-type]
    assert sum(ended.num_tokens for ended in drafter._ended.values()) <= 100
    assert PromptId("train", 0, 9) in drafter._ended
    assert PromptId("train", 0, 0) not in drafter._ended


def test_tokens_that_are_no_characters_come_back_as_they_were() -> None:
    tokens = (0xD800, 0xDFFF, 70_000, 0, 151_935)
    rows = Rows((0, 0, "".join(map(chr, tokens * 20))), limit=1000)
    found = _proposed(_drafter(), rows)
    assert found == ["".join(map(chr, (*tokens, *tokens[:2])))]
