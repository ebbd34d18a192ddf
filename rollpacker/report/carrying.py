"""Counts carried tokens (tokens that an earlier launch of a sample generated and a later launch
keeps), and how many of them the current weights generate again. A launch is one submission of a
sample to an engine.

A carried token *agrees* if the current weights generate it again with the same random numbers. A
sample's tokens are verified up to the first that does not agree, so the mismatch per token is the
number of samples with such a token over the number of verified tokens, that token included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollpacker.core.checks.acting import Retracing
from rollpacker.core.commands import Launch, RoundKind
from rollpacker.core.events import SampleAborted, SampleGenerated
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.report.step_history import CarriedInto, SampleHistory, StepHistory


def carrying(job: Mapping[str, Any]) -> str:
    """Which tokens of prompts put off to a later round a run with the settings `job` keeps: "none",
    "exact" (those that newer weights draw again), "auto" (the same, where that pays) or "weighted"
    (all, weighted in the loss)."""
    tail = job.get("tail_batching") or {}
    return str(tail.get("carry", "none")) if tail.get("enabled", True) else "none"


def keeps_noise(job: Mapping[str, Any]) -> bool:
    """Whether a prompt that is launched again uses the same random numbers, and so continues the
    responses that it had, in a run with the settings `job`."""
    tail = job.get("tail_batching") or {}
    return bool(tail.get("selection", "published") == "none")


def complements(job: Mapping[str, Any]) -> bool:
    """Whether a run with the settings `job` demands of a response launched again that it ends no
    earlier than its former launch was cut off, and draws an earlier end again
    (`tail_batching.complement`)."""
    tail = job.get("tail_batching") or {}
    return carrying(job) in ("exact", "auto") and bool(tail.get("complement", True))


class CarryBook:
    """Follows which tokens are kept for prompts put off to a later round, while a log is read."""

    def __init__(self) -> None:
        self._carries = False
        self._had: dict[SampleId, CarriedInto] = {}
        """Tokens that the last launch of each sample generated. The key has attempt 0: a failed
        sample and those that replace it share one entry."""
        self._replaced: dict[SampleId, SampleId] = {}
        """For each sample of the current step that replaces a failed one, the sample that failed
        first (replacements may fail, too)."""
        self._takes_turns = False
        self._retracing: dict[SampleId, Retracing] = {}
        """For each multi-turn trajectory of the step that began with carried tokens: how many of
        these the current weights have drawn again so far, and how many came out the same."""

    def begin_session(self, job: Mapping[str, Any]) -> None:
        self._carries = carrying(job) != "none"
        self._takes_turns = job.get("acting") is not None
        self._retracing.clear()

    def launch(self, command: Launch, known: Mapping[SampleId, SampleHistory]) -> None:
        """Note a launch, and the carried tokens that its samples begin with. `known` has the record
        of every launched sample by the sample's id."""
        samples = command.samples
        for sample, failed in zip(samples, command.replaces, strict=False):
            self._replaced[sample] = self._replaced.get(failed, failed)
        for sample, num_tokens in zip(samples, command.carried, strict=False):
            if num_tokens:
                lost = CarriedInto(num_tokens, whole=False, version=command.version)
                known[sample].carried = had = self._had.get(self._place_of(sample), lost)
                known[sample].most_verified = command.most_verified
                if self._takes_turns:
                    self._retracing[sample] = Retracing(had.num_tokens)

    def drawn(self, sample: SampleHistory, event: SampleGenerated | SampleAborted) -> None:
        """Note that an engine has generated tokens of `sample` (of a multi-turn trajectory: one
        turn) or has been stopped at it, as `event` tells. Counts these tokens, and the carried ones
        that came out the same."""
        retracing = self._retracing.get(sample.sample)
        if retracing is None:
            sample.num_tokens += event.num_tokens
            sample.num_kept = event.num_kept
            return
        turn = (sample.num_tokens, event.num_tokens, event.num_kept)
        counts = True
        if isinstance(event, SampleAborted):
            counts = retracing.stopped(*turn) or retracing.kept is None
        else:
            retracing.drawn(*turn)
        sample.num_tokens += event.num_tokens if counts else 0
        sample.num_kept = retracing.kept

    def end(self, sample: SampleHistory, version: int) -> None:
        """Keep the tokens of a sample that an engine finished or stopped, for the sample's next
        launch. `version`: the version of the weights in use."""
        if not self._carries:
            return
        before, retracing = sample.carried, self._retracing.get(sample.sample)
        if sample.has_more_carried or (retracing is not None and retracing.goes_on):
            return  # so far it is what was left, and there is more
        if before is not None and sample.num_kept is None:
            if not sample.is_finished and sample.num_tokens == before.num_tokens:
                return  # it was not looked at
            version = before.version
        place = self._place_of(sample.sample)
        self._had[place] = CarriedInto(sample.num_tokens, sample.is_finished, version)

    def commit(self, waiting: Container[PromptId]) -> None:
        """End the step: forget the tokens of prompts that do not wait for a later round."""
        self._had = {place: had for place, had in self._had.items() if place.prompt in waiting}
        self._replaced.clear()
        self._retracing.clear()

    def _place_of(self, sample: SampleId) -> SampleId:
        drawn = self._replaced.get(sample, sample)
        return SampleId(drawn.prompt, drawn.index, 0)


@dataclass(slots=True)
class CarryCounts:
    """Counts of carried tokens (kept from an earlier launch of the sample) in the launches of one
    step, or of many steps."""

    prompts: int = 0
    """Number of prompts that were launched with carried tokens."""
    tokens: int = 0
    """Number of carried tokens that launches began with."""
    looked_at: int = 0
    """Number of carried tokens of the samples whose carried tokens newer weights have begun to draw
    again, those after the first difference included."""
    kept: int = 0
    """Number of carried tokens that newer weights drew again, and that came out the same."""
    redraws: int = 0
    """Number of times that a response ended before the place where its earlier launch was cut off,
    so that its end was drawn again (`tail_batching.complement`)."""
    most_verified: int | None = None
    """Most carried tokens of a response that the last launches verified in passes. None: all."""
    rounds: int = 0
    """Number of rounds of steps in which a run could stop racing (`tail_batching.carry: auto`)."""
    rounds_awaited: int = 0
    """Number of these rounds that waited for all responses, since racing did not pay."""
    largest_age: int = 0
    """Largest age of a carried token: the number of weight updates since it was generated."""
    verified: Counter[int] = field(default_factory=Counter)
    """Number of carried tokens that newer weights drew again to see whether they come out the same,
    by the number of weight updates since they were first drawn."""
    mismatches: Counter[int] = field(default_factory=Counter)
    """Number of samples of which a carried token came out differently, by the token's age (number
    of weight updates since it was first drawn)."""

    @property
    def kept_ratio(self) -> float | None:
        return self.kept / self.looked_at if self.looked_at else None

    @property
    def mismatch_per_token(self) -> float | None:
        verified = self.verified.total()
        return self.mismatches.total() / verified if verified else None

    @property
    def mismatch_per_update(self) -> float:
        """Chance, per carried token and weight update, that the token comes out differently. 0 if
        no token of older weights was drawn again."""
        looked_at = sum(age * num for age, num in self.verified.items())
        num = sum(num for age, num in self.mismatches.items() if age)
        return num / looked_at if looked_at else 0.0

    def by_age(self) -> dict[int, float]:
        """Mapping from an age in weight updates to the share of tokens of this age that came out
        differently, of those that newer weights drew again."""
        return {age: self.mismatches[age] / self.verified[age] for age in sorted(self.verified)}

    def plain(self) -> dict[str, Any]:
        """The counts as `summary.json` has them."""
        return {
            "prompts": self.prompts,
            "tokens": self.tokens,
            "tokens_verified": self.verified.total(),
            "tokens_kept": self.kept,
            "kept_ratio": self.kept_ratio,
            "mismatch_per_token": self.mismatch_per_token,
            "mismatch_per_token_by_age": {str(a): rate for a, rate in self.by_age().items()},
            "redraws": self.redraws,
            "largest_age": self.largest_age,
            "most_verified": self.most_verified,
            "rounds": self.rounds,
            "rounds_awaited": self.rounds_awaited,
        }


def why_awaited(carrying: Mapping[str, Any]) -> str | None:
    """A sentence on the rounds that did not race, for these counts as `CarryCounts.plain` has them.
    None if all rounds raced."""
    if not carrying["rounds_awaited"]:
        return None
    return (
        f"{carrying['rounds_awaited']:,} of {carrying['rounds']:,} rounds waited for all their "
        "responses (tail_batching.carry=auto): carried tokens came out differently so often, in "
        f"{carrying['mismatch_per_token'] or 0:.1e} of tokens, that racing took longer."
    )


def step_carrying(step: StepHistory) -> CarryCounts:
    """Counts of the carried tokens that the launches of this step began with."""
    counts = CarryCounts()
    prompts = set()
    follows = step.session is not None and carrying(step.session.job) == "auto"
    for round_ in step.rounds:
        counts.rounds += follows
        counts.rounds_awaited += follows and round_.kind is RoundKind.PLAIN
        for one in round_.samples:
            sample = step.samples[one]
            counts.redraws += sample.num_redraws
            carried = sample.carried
            if carried is None:
                continue
            prompts.add(one.prompt)
            counts.most_verified = sample.most_verified
            age = round_.version - carried.version
            counts.tokens += carried.num_tokens
            counts.largest_age = max(counts.largest_age, age)
            if sample.num_kept is None:
                continue
            counts.looked_at += carried.num_tokens
            counts.kept += sample.num_kept
            # A trajectory may have been stopped before all of it was looked at.
            num_there = min(carried.num_tokens, sample.num_tokens)
            counts.verified[age] += min(sample.num_kept + 1, num_there)
            counts.mismatches[age] += sample.num_kept < num_there
    counts.prompts = len(prompts)
    return counts


def add_up(steps: Iterable[CarryCounts]) -> CarryCounts:
    """The sum of the counts of several steps."""
    total = CarryCounts()
    for step in steps:
        for name in ("prompts", "tokens", "looked_at", "kept", "redraws", "rounds"):
            setattr(total, name, getattr(total, name) + getattr(step, name))
        total.rounds_awaited += step.rounds_awaited
        total.most_verified = step.most_verified if step.tokens else total.most_verified
        total.largest_age = max(total.largest_age, step.largest_age)
        total.verified.update(step.verified)
        total.mismatches.update(step.mismatches)
    return total


def carry_metrics(counts: CarryCounts) -> dict[str, float | None]:
    """Metrics of a step's carried tokens, by name (`carry/...`). Empty if no launch of the step
    began with carried tokens."""
    if not counts.tokens:
        return {}
    return {
        "carry/prompts": counts.prompts,
        "carry/tokens": counts.tokens,
        "carry/tokens_verified": counts.verified.total(),
        "carry/tokens_kept": counts.kept,
        "carry/kept_ratio": counts.kept_ratio,
        "carry/mismatch_per_token": counts.mismatch_per_token,
        **{f"carry/mismatch_per_token/age_{age}": rate for age, rate in counts.by_age().items()},
        "carry/redraws": counts.redraws,
        "carry/largest_age": counts.largest_age,
    }
