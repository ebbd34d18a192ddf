"""What a log tells of carried tokens, against an engine that knows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.core.commands import RoundKind
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Session
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines.engine import GenerationRequest
from rollpacker.report.accounting import Accounting
from rollpacker.report.carrying import add_up
from rollpacker.report.metrics import step_metrics
from rollpacker.report.step_history import CarriedInto, End, RoundHistory, SampleHistory
from rollpacker.report.step_summary import StepSummary
from rollpacker.report.summary import summarize_entries
from rollpacker.report.summary_table import render
from rollpacker.report.token_clock import stretches
from tests.run.fakes import FakeEngine, drive, make, run_config

QUEUE = TailBatchingConfig(prompt_factor=1.5, stragglers="queue")
POOL = TailBatchingConfig(prompt_factor=1.5, stragglers="pool")


class DriftingEngine(FakeEngine):
    """Every update changes a token of some responses. It remembers which weights drew what."""

    def __init__(self) -> None:
        super().__init__()
        self.verified: Counter[int] = Counter()
        self.mismatches: Counter[int] = Counter()
        self.drawn_by: dict[tuple[int, SampleId], int] = {}
        """Version, by how often the sample's prompt was launched before, and noise."""

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        row, index = noise.prompt.row, noise.index
        length = 1 + (7 * row + 3 * index) % 9
        return tuple(
            position + 100 * ((row + index + position + self.version) // 8)
            for position in range(length)
        )

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            noise = request.noise or request.sample
            attempt, carried = request.sample.attempt, request.carried
            if carried is not None:
                age = self.version - self.drawn_by[attempt - 1, noise]
                whole = self.draw(noise)
                pairs = zip(carried.tokens, whole, strict=False)
                differs = [place for place, (one, new) in enumerate(pairs) if one != new]
                self.verified[age] += differs[0] + 1 if differs else len(carried.tokens)
                self.mismatches[age] += bool(differs)
            self.drawn_by[attempt, noise] = self.version
        super().submit(requests)


class LongTailedEngine(FakeEngine):
    def draw(self, noise: SampleId) -> tuple[int, ...]:
        chance = hash((noise.prompt.row, noise.index, noise.prompt.epoch)) % 1000 / 1000
        return (7,) * min(9, int(1 + 0.6 / (1.03 - chance)))


def run(
    folder: Path, tail: TailBatchingConfig, engine: FakeEngine, steps: int = 30
) -> tuple[list[StepSummary], list[object]]:
    config = replace(
        run_config(steps=steps),
        tail_batching=tail,
        algorithm=AlgorithmConfig(mismatch_correction="token-truncate"),
    )
    controller, recorder = make(folder, config, engine=engine, evaluates=False)
    drive(controller)
    accounting = Accounting()
    return [s for s in map(accounting.feed, recorder.entries) if s is not None], recorder.entries


@pytest.mark.parametrize("tail", [QUEUE, POOL], ids=["queue", "pool"])
def test_mismatches_are_counted_as_the_engine_saw_them(
    tmp_path: Path, tail: TailBatchingConfig
) -> None:
    engine = DriftingEngine()
    summaries, entries = run(tmp_path, tail, engine)
    counts = add_up(summary.carry for summary in summaries)
    assert +counts.verified == +engine.verified
    assert +counts.mismatches == +engine.mismatches and counts.mismatches.total() > 5
    assert max(counts.verified) > 1
    assert counts.largest_age == max(engine.verified)
    assert sum(summary.tokens.generated for summary in summaries) == engine.num_drawn
    assert counts.looked_at == counts.tokens > counts.kept > 0
    told = summarize_entries(entries)["carrying"]
    assert told["mismatch_per_token"] == pytest.approx(
        engine.mismatches.total() / engine.verified.total()
    )
    rows = [step_metrics(summary) for summary in summaries]
    assert sum(row.get("carry/tokens_kept", 0) for row in rows) == counts.kept
    assert any("carry/mismatch_per_token/age_1" in row for row in rows)
    assert any(row["carry/bytes"] > 0 for row in rows)


def test_without_updates_nothing_differs_and_lengths_are_the_policys_own(tmp_path: Path) -> None:
    """A launch that goes on with the same responses is no second draw of them: counted as one, they
    would seem 7 % longer than they are."""
    summaries, _ = run(tmp_path, POOL, LongTailedEngine(), steps=60)
    counts = add_up(summary.carry for summary in summaries)
    assert counts.mismatch_per_token == 0 and counts.kept_ratio == 1
    trained = sum(summary.tokens.trained for summary in summaries)
    assert sum(summary.tokens.generated for summary in summaries) == trained
    assert summaries[-1].lengths.bias["length/shift"] == pytest.approx(0, abs=0.02)


def test_weighted_carrying_is_marked_in_every_row_and_table(tmp_path: Path) -> None:
    summaries, entries = run(tmp_path, replace(POOL, carry="weighted"), DriftingEngine())
    marked = [
        structs.replace(entry, marks=("weighted_carrying",))
        if isinstance(entry, Session)
        else entry
        for entry in entries
    ]
    summary = summarize_entries(marked)
    assert summary["weighted_carrying"] is True
    assert summary["carrying"]["mismatch_per_token"] is None and summary["carrying"]["tokens"] > 0
    assert "weighted carrying: not exact" in _text(summary)
    assert "weighted carrying" not in _text(summarize_entries(entries))
    accounting = Accounting()
    rows = [step_metrics(s) for s in map(accounting.feed, marked) if s is not None]
    assert rows and all(row["weighted_carrying"] == 1 for row in rows)
    assert (
        sum(s.tokens.generated for s in summaries) < sum(s.tokens.trained for s in summaries) * 1.1
    )


def test_the_table_tells_what_came_out_differently(tmp_path: Path) -> None:
    _, entries = run(tmp_path, QUEUE, DriftingEngine())
    text = _text(summarize_entries(entries))
    for words in ("tokens carried into a later launch", "kept, of those looked at", "(age 2)"):
        assert words in text


def _text(summary: dict) -> str:
    from rich.console import Console

    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(render(summary))
    return capture.get()


def test_the_token_clock_begins_where_a_sample_was_taken_up() -> None:
    """One that is new, one that goes on after 3 tokens, one whose 4 tokens were all there, and one
    that was stopped before it had a slot."""
    prompt = PromptId("train", 0, 0)
    new, longer, whole, unseen = (SampleId(prompt, index, 1) for index in range(4))
    ends = [
        SampleHistory(unseen, 0.0, CarriedInto(9, True, 0), None),
        SampleHistory(whole, 0.0, CarriedInto(4, True, 0), 4),
        SampleHistory(longer, 0.0, CarriedInto(3, False, 0), 3),
        SampleHistory(new, 0.0),
    ]
    for end, seconds, tokens in zip(ends, (1.0, 1.0, 3.0, 5.0), (9, 4, 6, 5), strict=True):
        end.end_s, end.num_tokens, end.end = seconds, tokens, End.FINISHED
    ends[0].end = End.STOPPED
    round_ = RoundHistory(
        number=1,
        kind=RoundKind.SHORT,
        version=1,
        tensor_parallel=1,
        samples=(new, longer, whole, unseen),
        start_s=0.0,
        slots=3,
        ends=ends,
    )
    found = stretches(round_, slots=3)
    assert [stretch.steps for stretch in found] == [0, 2, 2]
    assert [stretch.running for stretch in found] == [3, 2, 1]
    assert [stretch.cached for stretch in found] == [1 + 4 + 4, 1 + 4, 3]
    assert math.fsum(stretch.seconds for stretch in found) == 5.0
