"""Buckets, slots and the thread measurement on their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.embedded import extend, rows
from rollpacker.engines.embedded.attention import (
    Scores,
    UnsupportedModelError,
    causal_attention,
    install_attention,
)
from rollpacker.engines.embedded.buckets import (
    MAX_BUCKETS,
    Bucket,
    bucket_cost,
    least_moves,
    plan_buckets,
)
from rollpacker.engines.embedded.extend_step import ExtendStep, NewTokens, Span, plan_spans
from rollpacker.engines.embedded.kv_slots import KVSlots, LayerShape
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import Carried, GenerationRequest, SamplingParams
from rollpacker.run.parts import policy
from rollpacker.run.parts.policy import measure_threads
from tests.engines.tiny import END, generate, request, tiny_model


def test_buckets_cover_all_rows_and_reach_every_length() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 600, rng.integers(1, 40))
        buckets = plan_buckets(lengths, call_cost=float(rng.choice([0, 50, 5000])))
        assert [bucket.start for bucket in buckets] == [
            0,
            *(bucket.stop for bucket in buckets[:-1]),
        ]
        assert buckets[-1].stop == len(lengths)
        assert len(buckets) <= MAX_BUCKETS
        assert all(lengths[b.start : b.stop].max() == b.width for b in buckets)


def test_a_split_must_pay_for_its_call() -> None:
    lengths = np.array([10] * 20 + [500])
    assert plan_buckets(lengths, 1e6) == [Bucket(0, 21, 500)]
    split = plan_buckets(lengths, 100.0)
    assert split == [Bucket(0, 20, 10), Bucket(20, 21, 500)]
    assert bucket_cost(split, 100.0) == 20 * 10 + 500 + 200


def test_long_rows_among_short_ones_are_put_in_buckets_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rollpacker.engines.embedded import decoder

    plans: list[list[Bucket]] = []

    def noted(lengths: np.ndarray, call_cost: float) -> list[Bucket]:
        plans.append(plan_buckets(lengths, call_cost))
        return plans[-1]

    monkeypatch.setattr(decoder, "CALL_COST_ELEMENTS", 10)
    monkeypatch.setattr(decoder, "plan_buckets", noted)
    model = tiny_model()
    # Long and short in turn, refilled, so that rows are sorted, moved and split again and again.
    requests = [
        request(
            row, prompt=[7 + row % 30] * (60 if row % 3 == 0 else 3), forced_length=4 + row % 17
        )
        for row in range(40)
    ]
    bucketed = generate(model, requests, max_slots=12)
    assert max(len(plan) for plan in plans) > 2
    plain = generate(model, requests, max_slots=12, width_buckets=False)
    assert [r.tokens for r in bucketed] == [r.tokens for r in plain]


def test_only_rows_of_another_bucket_move() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        lengths = rng.integers(1, 600, rng.integers(2, 40))
        order = np.argsort(lengths, kind="stable")
        buckets = plan_buckets(lengths[order], call_cost=float(rng.choice([0, 50])))
        source, target = least_moves(order, buckets)
        moved = lengths.copy()
        moved[target] = lengths[source]
        for start, stop, width, _ in buckets:
            assert sorted(moved[start:stop]) == sorted(lengths[order[start:stop]])
            assert moved[start:stop].max() == width
            inside = (source >= start) & (source < stop)
            assert not (inside & (target >= start) & (target < stop)).any()


def test_a_long_row_that_comes_changes_places_with_one_row_a_bucket() -> None:
    lengths = np.array([10, 12, 11, 50, 52, 51, 900])
    buckets = [Bucket(0, 3, 12), Bucket(3, 6, 52), Bucket(6, 7, 900)]
    lengths[[0, 6]] = lengths[[6, 0]]
    source, target = least_moves(np.argsort(lengths), buckets)
    assert (source.tolist(), target.tolist()) == ([6, 0], [0, 6])


def test_rows_share_a_span_where_that_is_cheaper_than_another_call() -> None:
    lengths, ends = np.array([5, 6, 200, 1]), np.array([100, 104, 900, 901])
    assert plan_spans(lengths, ends, 0.0) == [
        Span(row, row + 1, length, end)
        for row, (length, end) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True))
    ]
    assert plan_spans(lengths, ends, float("inf")) == [Span(0, 4, 200, 901)]
    assert plan_spans(lengths, ends, 5000.0) == [
        Span(0, 2, 6, 104),
        Span(2, 3, 200, 900),
        Span(3, 4, 1, 901),
    ]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("call_cost", [0.0, 60.0, float("inf")])
def test_an_extension_attends_as_a_pass_over_the_whole_row(
    window: int | None, call_cost: float
) -> None:
    torch.manual_seed(0)
    slots = _slots()
    slots.reserve(6, 23)
    rows, starts, lengths = np.array([0, 1, 3, 5]), np.array([9, 4, 0, 7]), np.array([3, 8, 8, 1])
    whole = []
    for row, start, length in zip(rows.tolist(), starts, lengths, strict=True):
        query, key, value = (torch.randn(1, heads, start + length, 4) for heads in (4, 2, 2))
        slots.keys[0][row, :, :start], slots.values[0][row, :, :start] = (
            part[0, :, :start] for part in (key, value)
        )
        output = causal_attention(query, key, value, 0.5, window)
        whole.append((start, query, key, value, output))
    new = [torch.cat([one[part][:, :, one[0] :] for one in whole], 2) for part in (1, 2, 3)]
    step = ExtendStep(slots, NewTokens(rows, starts, lengths), call_cost)
    found = step.attend(0, *new, Scores(0.5, window, None))
    wanted = torch.cat([one[4][:, :, one[0] :] for one in whole], 2).transpose(1, 2)
    torch.testing.assert_close(found, wanted)
    for row, one in zip(rows.tolist(), whole, strict=True):
        assert torch.equal(slots.keys[0][row, :, : one[2].shape[2]], one[2][0])
    assert not slots.keys[0][[2, 4]].any()


def _slots(budget_bytes: int = 2**20) -> KVSlots:
    shapes = [LayerShape(layer, 2, 4, 4) for layer in range(2)]
    return KVSlots(shapes, torch.float32, torch.device("cpu"), budget_bytes=budget_bytes)


def test_slots_keep_their_content_when_they_grow_and_move() -> None:
    slots = _slots()
    assert slots.reserve(3, 5)
    assert not slots.reserve(2, 4)
    rows = torch.arange(3.0)[:, None, None, None].expand(3, 2, 5, 4)
    slots.keys[1][:] = rows
    assert slots.reserve(6, 9)
    assert torch.equal(slots.keys[1][:3, :, :5], rows)
    assert not slots.keys[1][:, :, 5:].any()
    slots.move([1, 2], [4, 5], [5, 2])
    assert slots.keys[1][4:, 0, :5, 0].tolist() == [[1] * 5, [2, 2, 0, 0, 0]]
    slots.gather([5, 4], [4, 5], 2)
    assert slots.keys[1][4:, 0, :5, 0].tolist() == [[2, 2, 1, 1, 1], [1, 1, 0, 0, 0]]


def test_wider_slots_become_fewer_and_more_become_narrower_when_memory_is_short() -> None:
    slots = _slots(budget_bytes=10 * 8 * 128)
    assert slots.bytes_per_token == 128
    slots.reserve(10, 8)
    slots.reserve(3, 20)
    assert (slots.num_slots, slots.width) == (3, 20)
    slots.keys[0][2, :, :5] = 7
    slots.reserve(16, 5)
    assert (slots.num_slots, slots.width) == (16, 5)
    assert slots.keys[0][2].eq(7).all()
    slots.reserve(3, 20)
    assert slots.fits(4, 20)
    assert not slots.fits(4, 21)


def test_threads_are_chosen_by_time_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = torch.get_num_threads(), 0.0
    monkeypatch.setattr(policy, "time", SimpleNamespace(perf_counter=lambda: now))

    def takes(seconds: Callable[[int], float]) -> Callable[[], None]:
        def step() -> None:
            nonlocal now
            now += seconds(torch.get_num_threads())

        return step

    slower_with_more = takes(lambda count: 0.002 * count)
    assert measure_threads(slower_with_more, (2, 1)) == 1
    assert measure_threads(takes(lambda count: 0.004 / count), (1, 2)) == 2
    assert measure_threads(takes(lambda count: 0.0021 - 0.0001 * count), (1, 2)) == 1
    assert measure_threads(slower_with_more) == 1
    assert torch.get_num_threads() == before
    with pytest.raises(ValueError, match="at least 1"):
        measure_threads(slower_with_more, ())


def test_installed_attention_refuses_caches_and_can_be_taken_off_again() -> None:
    model = tiny_model()
    install_attention(model)
    install_attention(model)
    ids = torch.tensor([[7, 8, 9]])
    with pytest.raises(UnsupportedModelError, match="use_cache=False"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, eos_token_id=END)
    model.set_attn_implementation("sdpa")
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3)
    assert output.shape[1] > 3


@pytest.mark.parametrize(
    ("first_different", "most_passes"), [(4000, 4000 * 64 / 16_384 + 64), (10, 1)]
)
def test_a_wide_vocabulary_does_not_make_passes_short(
    monkeypatch: pytest.MonkeyPatch, first_different: int, most_passes: float
) -> None:
    """64 rows of 4,000 carried tokens, 151,936 tokens in the vocabulary, an accelerator's limits:
    logits are computed for few positions at a time, and the model runs for many. Rows that differ
    early cost one pass, of their first portion."""
    carried = Carried(tokens=(7,) * 4000, log_probs=(-1.0,) * 4000)
    sampling = SamplingParams(max_response_tokens=5000)
    prompt = PromptId("train", 0, 0)
    entries = [
        Pending(
            GenerationRequest(
                sample=SampleId(prompt, index, 0),
                prompt_tokens=(1,) * 100,
                sampling=sampling,
                carried=carried,
            ),
            index,
        )
        for index in range(64)
    ]
    monkeypatch.setattr(rows, "exponentials", lambda keys, first, count, size: first[:, None, None])
    table = rows.RowTable(torch.device("cpu"), 151_936)
    table.reserve(64)
    table.add(entries)
    table.begin(0, np.full(64, 7), np.zeros(64))
    passes: list[int] = []
    logits: list[int] = []

    class Fed:
        """Stands in for a decoder, and counts what goes through its model."""

        can_part_logits, width_buckets = True, False
        model = SimpleNamespace(
            config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_attention_heads=32))
        )
        slots = SimpleNamespace(
            layers=[SimpleNamespace(num_kv_heads=8)], width=5100, device=torch.device("meta")
        )
        rows = table

        def extend(self, tokens: np.ndarray, step: object) -> Callable[[slice], Tensor]:
            passes.append(len(tokens))
            return lambda part: torch.zeros(part.stop - part.start, 0)

    def draw(scores: Tensor, places: Tensor, *settings: object) -> tuple[Tensor, Tensor]:
        logits.append(len(places))
        tokens = torch.where(places[:, 0] < first_different, 7, 8)
        return tokens, torch.zeros(len(places))

    class Endless:
        def among(self, table: object, rows: np.ndarray, drawn: np.ndarray, said: object) -> object:
            return np.zeros(drawn.shape, bool)

        def num_until_end(self, *args: object) -> None:
            return None

    monkeypatch.setattr(extend, "draw", draw)
    monkeypatch.setattr(extend.Extender, "_step", lambda self, *args: None)
    extend.Extender(Fed(), Endless()).take_up(0)  # type: ignore[arg-type]
    assert table.host_column("num_kept").tolist() == [first_different] * 64
    assert len(passes) <= most_passes
    assert max(logits) * 151_936 <= extend.DRAW_LOGITS
    if first_different == 10:
        assert sum(passes) <= 64 * (1 + extend.FIRST_PORTION)
