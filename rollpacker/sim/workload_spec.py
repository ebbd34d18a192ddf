"""The part of a scenario that describes prompts: their responses' lengths, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollpacker.bounds import check_at_least, check_within
from rollpacker.sim.presets import LENGTH_LAWS, PROMPTS, REWARD_KINDS
from rollpacker.sim.scenario_checks import MAX_SECONDS, check_known, check_quantiles

OWN_PROMPTS = {
    "within_prompt_correlation": 0.05,
    "hard_prompts": 0.0,
    "hard_prompt_cap_probability": 0.15,
}
"""Defaults of fields of `LengthLaw` that say how much a response's length depends on its prompt,
for laws that are given by `quantiles` or `trace`. Presets have their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLaw:
    """Law of response lengths (`lengths.*`, `rewards.N.lengths.*`), given in one of three ways."""

    preset: str | None = None
    """Name of a length law that comes with the package. None: `quantiles` or `trace` is set."""
    quantiles: Mapping[float, int] | None = None
    """Mapping from quantile to tokens of a response. Between quantiles the logarithm of the tokens
    is interpolated linearly; below the lowest it falls to one token, above the highest it is
    constant. An override sets the whole mapping."""
    trace: str | None = None
    """Path of a JSONL file with {"length": n} per response, or {"prompt": id, "lengths": [n, ...]}
    per prompt. With the latter the prompts come in the file's order, and the other keys of
    `lengths` have no effect. The path is relative to the folder that the command is run in."""
    within_prompt_correlation: float | None = None
    """How much lengths of responses to one prompt are alike (correlation of normal scores): at 0 a
    length is all luck, at 1 the prompt decides it. None: as fitted for a preset; else 0.05."""
    hard_prompts: float | None = None
    """Share of prompts that are hard: some responses to them run to the cap of tokens whatever the
    law says. None: as fitted for a preset; without a preset 0."""
    hard_prompt_cap_probability: float | None = None
    """Probability that a response to a hard prompt runs to the cap of tokens. None: as fitted for a
    preset; without a preset 0.15."""

    def __post_init__(self) -> None:
        given = [n for n in ("preset", "quantiles", "trace") if getattr(self, n) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"set exactly one of preset, quantiles and trace; set: {found}")
        if self.preset is not None:
            check_known("preset", self.preset, LENGTH_LAWS)
        if self.quantiles is not None:
            check_quantiles("quantiles", self.quantiles, smallest=1)
        if self.trace == "":
            raise ValueError("trace is empty: give the name of a JSONL file")
        for name in OWN_PROMPTS:
            if not 0 <= self.of_prompts(name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, not {getattr(self, name)}")

    @property
    def quantile_law(self) -> Mapping[float, int] | None:
        """Mapping from quantile to response tokens, as given or by preset; None for a trace."""
        return self.quantiles if self.preset is None else LENGTH_LAWS[self.preset]

    def of_prompts(self, name: str) -> float:
        """The value of the field `name`, a key of `OWN_PROMPTS`: as given, or else its default."""
        written: float | None = getattr(self, name)
        if written is not None:
            return written
        return (OWN_PROMPTS if self.preset is None else PROMPTS)[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStage:
    """The prompts that are checked in one way (`rewards.N.*`). Fields that are not set have the
    defaults of the `kind` (`presets.REWARD_KINDS`)."""

    kind: Literal["math", "code", "judge", "none"]
    """Kind of check: `math` and `code` have workers, `judge` is a model that answers calls. It
    gives the defaults of the fields below. none: there is no check."""
    share: float
    """Share of the prompts that are checked in this way."""
    seconds_quantiles: Mapping[float, float] | None = None
    """Mapping from quantile to seconds of one check (math, code); None: the default of the `kind`.
    Between quantiles the logarithm of the seconds is linear; beyond the ends it is constant."""
    workers: int | None = None
    """Number of checks that run at once (math, code). None: the default of the `kind`."""
    calls_per_s: float | None = None
    """Number of calls that a judge answers per second (judge). None: the kind's default."""
    slowest_correct_s: float | None = None
    """Seconds of a check beyond which no answer is correct (math, code). None: the default of the
    `kind`, or the kind's time limit if `seconds_quantiles` is set."""
    check_truncated: bool = True
    """Whether responses that were cut off at the cap are checked too. False: they are wrong at
    once, as a program without an end is."""
    lengths: LengthLaw | None = None
    """Law of these prompts' response lengths; None: the scenario's `lengths`."""

    def __post_init__(self) -> None:
        check_within(self, "(0, 1]", "share")
        pool = ("seconds_quantiles", "workers", "slowest_correct_s")
        meant = {"math": pool, "code": pool, "judge": ("calls_per_s",), "none": ()}[self.kind]
        for name in (*pool, "calls_per_s"):
            if getattr(self, name) is not None and name not in meant:
                takes = f"it takes {', '.join(meant)}" if meant else "it takes no time"
                raise ValueError(
                    f"{name} means nothing for kind={self.kind} ({takes}): leave it out"
                )
        check_at_least(self, 1, "workers")
        if self.seconds_quantiles is not None:
            check_quantiles(
                "seconds_quantiles", self.seconds_quantiles, smallest=0, largest=MAX_SECONDS
            )
        for name in ("calls_per_s", "slowest_correct_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= MAX_SECONDS:
                raise ValueError(
                    f"{name} must be more than 0 and at most {MAX_SECONDS:g}, not {value}"
                )

    @property
    def num_workers(self) -> int:
        """Number of checks that run at once; 0: nothing is checked. A judge counts as one worker
        whose check takes 1 / calls_per_s seconds."""
        if self.kind == "judge":
            return 1
        return self.workers or REWARD_KINDS[self.kind].workers or 0

    @property
    def seconds_law(self) -> Mapping[float, float] | None:
        """Mapping from quantile to a worker's seconds for a check; None: there is no check."""
        if self.kind == "judge":
            rate = self.calls_per_s or REWARD_KINDS["judge"].calls_per_s
            assert rate is not None
            return {0.5: 1 / rate}
        return self.seconds_quantiles or REWARD_KINDS[self.kind].seconds_quantiles

    @property
    def limit_s(self) -> float | None:
        """Most seconds that a check may take, even if a deadline is later; None: no limit."""
        return REWARD_KINDS[self.kind].limit_s

    @property
    def correct_within_s(self) -> float:
        """Seconds of a check beyond which no response is correct; infinite without such a limit."""
        kind = REWARD_KINDS[self.kind]
        known = kind.slowest_correct_s if self.seconds_quantiles is None else None
        return self.slowest_correct_s or known or kind.limit_s or math.inf
