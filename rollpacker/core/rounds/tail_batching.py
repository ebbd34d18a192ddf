"""The settings of tail batching: how much more a race (a round that keeps the first to finish)
launches than it needs.

A race launches ceil(eta_p * P) prompts where it needs P, and ceil(eta_r * R0) samples of each where
it needs R0, by the factors eta_p (`prompt_factor`) and eta_r (`sample_factor`). Short rounds race
at these factors, or at those that the run chooses ("auto"); each tier (further race for prompts
left unfinished) has its own. docs/tail-batching.md has the whole picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from rollpacker.bounds import check_at_least, check_within
from rollpacker.codec import OMIT_DEFAULT, absent
from rollpacker.core.ids import SampleId

Selection = Literal["none", "published"]
Carry = Literal["none", "exact", "auto", "weighted"]
Stragglers = Literal["queue", "pool"]
DebiasMethod = Literal["none", "moments"]
Race = Literal["generated", "scored"]
Factor = float | Literal["auto"]


class Factors(NamedTuple):
    """How much more a round launches than it needs: launched prompts per needed prompt, and
    launched samples per needed sample."""

    prompts: float
    """eta_p: number of prompts launched per prompt needed."""
    samples: float
    """eta_r: number of samples launched per sample needed, of each prompt."""

    def num_prompts(self, needed: int) -> int:
        """Number of prompts that a round launches to keep the first `needed` of them."""
        return times(self.prompts, needed)

    def num_samples(self, samples_per_prompt: int) -> int:
        """Number of samples that a round launches per prompt to keep `samples_per_prompt`."""
        return times(self.samples, samples_per_prompt)


AUTO_START = Factors(1.25, 1.125)
"""Factors of the first short rounds with "auto", until the run knows its responses' lengths."""
NO_RACE = Factors(1.0, 1.0)
"""Factors of a round that launches nothing beyond what is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Factors of one further round for prompts that the round before left unfinished, which again
    keeps the first to finish (`tail_batching.tiers`)."""

    prompt_factor: float = 1.25
    """Number of prompts that the round launches, as a multiple of those that a step trains on."""
    sample_factor: float | None = None
    """Samples launched per prompt, as a multiple of `samples_per_prompt`. None: 1 with
    selection=none, 1.25 with selection=published, as in the short rounds."""

    def __post_init__(self) -> None:
        _check_factor("prompt_factor", self.prompt_factor)
        if self.sample_factor is not None:
            _check_factor("sample_factor", self.sample_factor)

    @property
    def factors(self) -> Factors:
        assert self.sample_factor is not None, "the tier is not part of a TailBatchingConfig"
        return Factors(self.prompt_factor, self.sample_factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class TailBatchingConfig:
    """Launch more than needed, keep the first to finish, and gather the rest in later rounds."""

    enabled: bool = True
    """Whether rounds launch more than needed and keep the first to finish. False: none does."""
    selection: Selection = field(default="none", metadata=absent("published"))
    """Whether rounds select which responses are trained on. none: no response is thrown away, and
    only the order of training changes; a sample keeps its random numbers when its prompt is
    deferred (left for a later round). published: as in the RollPacker paper, surplus samples are
    thrown away and deferred prompts are sampled afresh, which favours short responses."""
    prompt_factor: Factor | None = None
    """eta_p: for a step of P0 prompts a short round launches ceil(prompt_factor * P0). "auto": the
    run chooses the factor by its own lengths and measured seconds, again and again, so it does not
    repeat bit by bit; only with selection=published, and sample_factor must be "auto" too. None:
    1.5, or 1.25 with selection=published."""
    sample_factor: Factor | None = None
    """eta_r: where R0 samples of each prompt are needed, a short round launches ceil(sample_factor
    * R0). None: 1, the only value with selection=none, or 1.25 with selection=published."""
    carry: Carry | None = field(default=None, metadata=absent("none"))
    """What becomes of the tokens of a deferred prompt. exact: its next launch samples all of them
    anew in one pass, with the same random numbers, keeps those before the first that differs, and
    goes on from there: token for token what generation from scratch gives, at a fraction of the
    cost. auto: the same responses; only so many tokens of each are looked at in passes as pay, by
    how often tokens came out differently so far, and those behind are generated. weighted: all are
    kept as they are, and training weighs each by a clipped importance ratio; not exact. none: they
    are dropped. Not set (None): exact, or none with selection=published."""
    stragglers: Stragglers = field(default="queue", metadata=OMIT_DEFAULT)
    """Where deferred prompts (left unfinished by a round) wait. queue: until they fill a long
    round, which waits for all of them. pool: they join the next short round, which starts fewer
    fresh prompts; faster where the policy changes so little between rounds that tokens of an
    earlier launch are sampled again as they were."""
    look_ahead: float = field(default=0.0, metadata=OMIT_DEFAULT)
    """While a round ends, prompts of the next step are begun in slots that stand empty, so that as
    many responses are under way as this share of those that the round began with. Nobody selects
    among them: the next step begins with these prompts, however long they are, and its weights
    verify the tokens. 0: none are begun early; 1: all slots stay in use."""
    max_deferrals: int = field(default=16, metadata=absent(16))
    """With stragglers=pool: after so many deferrals of a prompt its next round waits for it."""
    complement: bool = field(default=True, metadata=absent(True))
    """Whether carry=exact keeps lengths unbiased: otherwise each deferral would be another chance
    to be short, or to be long. Under newer weights, a response that had been cut off must not end
    before that length, and one that had ended before its siblings were cut off must not grow beyond
    their length; a response that would is sampled once more."""
    tiers: tuple[Tier, ...] = ()
    """Further races: prompts that the short round leaves unfinished race again with these factors,
    and only those left by the last race wait for a long round. There are then fewer long rounds,
    which pays where lengths vary by chance."""
    race: Race = "generated"
    """When a sample has finished, in rounds that keep the first to finish. generated: its response
    is complete. scored: its verdict is there, as in the published code; a slow reward can then push
    a prompt into a long round, and runs are no longer repeatable bit by bit."""
    balance_sources: bool = False
    """Whether each source of prompts (`PromptId.source`) keeps its share of the step's prompts, so
    that slow rewards or long answers do not leave it out where the first to finish are kept."""
    debias: DebiasMethod = "none"
    """Loss weights of samples, so that training sees the policy's own response lengths where the
    first to finish are kept. none: all weights are 1. moments: weights that depend on the length
    and restore the mean length."""
    max_length_shift: float | None = None
    """Bound on the factors where the run chooses them ("auto"): trained responses may be shorter,
    on average, than the policy's own by at most this share. With debias there is no bound, since
    loss weights undo the shift. None: 0.02 with selection=none, 0.35 with selection=published."""
    flush_each_epoch: bool = True
    """Whether unfinished prompts are trained on at the end of every epoch, not only of the run."""

    def __post_init__(self) -> None:
        selects = self.selection == "published"
        if self.sample_factor is None:
            surplus = "auto" if self.prompt_factor == "auto" else 1.25
            self._set("sample_factor", surplus if selects else 1.0)
        if self.carry is None:
            self._set("carry", "none" if selects else "exact")
        if self.prompt_factor is None:
            self._set("prompt_factor", 1.25 if selects else 1.5)
        if self.max_length_shift is None:
            self._set("max_length_shift", 0.35 if selects else 0.02)
        default = 1.25 if selects else 1.0
        self._set(
            "tiers",
            tuple(
                replace(tier, sample_factor=default) if tier.sample_factor is None else tier
                for tier in self.tiers
            ),
        )
        self._check_factors()
        self._check_order_only()

    def _set(self, name: str, value: object) -> None:
        """Sets a key that the user left at None to the value that None means, so that a saved
        configuration shows that value."""
        object.__setattr__(self, name, value)

    def _check_factors(self) -> None:
        for name in ("prompt_factor", "sample_factor"):
            value = getattr(self, name)
            if value != "auto":
                _check_factor(name, value)
        if self.debias not in get_args(DebiasMethod):
            raise ValueError(
                f"tail_batching.debias={self.debias} is no method of this version: set it to "
                "moments"
            )
        if self.chooses and self.selection == "none":
            raise ValueError(
                "prompt_factor=auto goes with selection=published: with selection=none give a "
                "number; `rollpacker plan` finds the fastest"
            )
        if self.chooses or self.sample_factor == "auto":
            if self.selection == "published" and self.prompt_factor != self.sample_factor:
                raise ValueError("prompt_factor and sample_factor must both be auto, or neither")
            if self.tiers or self.race == "scored":
                raise ValueError('prompt_factor=auto goes with race="generated" and no tiers')
        check_within(self, "(0, 1]", "max_length_shift")
        check_at_least(self, 1, "max_deferrals")

    def _check_order_only(self) -> None:
        """Raises `ValueError` if selection, sample factors, carry and stragglers do not agree."""
        if self.selection == "none":
            for factor in (self.sample_factor, *(tier.sample_factor for tier in self.tiers)):
                if factor != 1:
                    raise ValueError(
                        "sample_factor must be 1 with selection=none, which throws no response "
                        f"away, not {factor}: leave it out, or set selection=published"
                    )
        elif self.carry != "none":
            raise ValueError(
                f"carry={self.carry} goes with selection=none, since selection=published draws "
                "deferred prompts afresh: set carry=none, or selection=none"
            )
        if not 0 <= self.look_ahead <= 1:
            raise ValueError(f"look_ahead must lie between 0 and 1, not {self.look_ahead}")
        if self.look_ahead and not (self.carries and self.verifies):
            raise ValueError(
                "look_ahead begins responses that newer weights verify: it goes with enabled=true "
                "and carry=exact or auto"
            )
        if self.stragglers == "pool" and self.tiers:
            raise ValueError("stragglers=pool has no tiers: a pool races every deferred prompt on")

    @property
    def chooses(self) -> bool:
        """Whether the run chooses by itself how much more short rounds launch ("auto")."""
        return self.enabled and self.prompt_factor == "auto"

    @property
    def carries(self) -> bool:
        """Whether tokens of prompts left unfinished by a round are kept for their next launch."""
        return self.enabled and self.carry != "none"

    @property
    def pooled(self) -> bool:
        """Whether prompts left unfinished by a round are part of the next, beside fresh ones."""
        return self.enabled and self.stragglers == "pool"

    @property
    def complements(self) -> bool:
        """Whether a response never ends before the place where an earlier launch had cut it off."""
        return self.carries and self.verifies and self.complement

    @property
    def verifies(self) -> bool:
        """Whether carried tokens (left by an earlier launch) are kept only as far as they are drawn
        again under the current weights, so that a response is as if generated from scratch."""
        return self.carry in ("exact", "auto")

    @property
    def awaited_after(self) -> int | None:
        """Number of times that a prompt may be left unfinished: the next round with it then waits
        for its samples. None: no limit."""
        return self.max_deferrals if self.pooled else None

    def noise_of(self, sample: SampleId) -> SampleId:
        """Returns the id of the sample whose random numbers this sample uses: that of the prompt's
        first launch with the same index or, with selection=published, the sample's own."""
        if self.selection == "published" or not sample.attempt:
            return sample
        return SampleId(sample.prompt, sample.index, 0)

    @property
    def factors(self) -> Factors:
        """Factors of short rounds (launched over needed numbers). Where the run chooses them, these
        are the first ones, and `Learned.factors` has the current ones."""
        if not self.enabled:
            return NO_RACE
        if self.prompt_factor == "auto" or self.sample_factor == "auto":
            samples = AUTO_START.samples if self.selection == "published" else 1.0
            return Factors(AUTO_START.prompts, samples)
        assert self.prompt_factor is not None and self.sample_factor is not None
        return Factors(self.prompt_factor, self.sample_factor)


def _check_factor(name: str, value: float) -> None:
    if not (math.isfinite(value) and 1 <= value <= 16):
        raise ValueError(f"{name} must lie between 1 and 16, not {value}")


def times(factor: float, count: int) -> int:
    """factor * count rounded up to a whole number; 1.1 * 10 is 11, not 12 by a rounding error."""
    return math.ceil(factor * count - 1e-9)
