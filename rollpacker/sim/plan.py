"""Which settings make a step fast without training on shorter responses than allowed.

Searched is what the core has, all of it on-policy: ideas (`Idea`: a few config keys set together)
that can be switched on one by one, and the factors of the races. The search knows a system only by
`Evaluate`, so that a scenario and a recorded run are planned by the same code:

    each idea alone  ->  with all that may help: factors, few steps each  ->  the better ones, more
        steps, and their neighbours  ->  ideas that nobody misses left out  ->  finalists, on fresh
        seeds  ->  step by step and leave one out: what each idea is worth

Two settings are always compared on the same seeds, so that they differ by their decisions alone and
the uncertainty is that of the paired difference. What is compared is the *long-run* step time: the
mean of each kind of round, weighted by how often that kind comes round. A dozen steps hold too many
or too few long rounds by chance; the weights are known exactly.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from rollpacker.config.check import Checker
from rollpacker.config.document import ConfigError, dotted
from rollpacker.config.load import to_plain
from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds import TailBatchingConfig, Tier, times
from rollpacker.sim.presets import SYSTEMS
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import Scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.whatif import RunModel

Config = TypeVar("Config")
Progress = Callable[[str, int, int], None]
"""Called with the stage's name, and how many of its simulations are done of how many."""

MIN_GAIN = 0.005
"""An idea must shorten the step by more than this share, or the setting does without it."""
MAX_LOSS = 0.01
"""An idea that lengthens the step by less, tried alone, may still help together with others."""
NOISE_ERRORS = 3.0
"""A gain counts as one if it is more than so many standard errors."""
SCREEN_SLACK = 0.02
"""While few steps are simulated, a length shift may miss the bound by so much; not at the end."""
FINAL_MARGIN = 0.002
"""A finalist's length shift keeps the bound by this much, so that fresh seeds seldom refuse it."""
FULLER_SHARE = 0.95
"""A step's share of samples that fuller streaming hides under the rollout: all but what finishes
last."""
FINAL_SEED = 1000
"""Finalists are compared on seeds that the search has not seen."""
FACTORS = "factors"
"""The slot of the races' factors."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


# -- what is tried -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Idea:
    """Something to change."""

    name: str
    """In words."""
    slot: str
    """Of two ideas with the same slot only one can be taken."""
    changes: Mapping[str, Any]
    """Dotted keys of the config and their new values, as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The current settings with these ideas; none: as they are."""

    ideas: tuple[Idea, ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for idea in self.ideas:
            merged |= idea.changes
        return merged

    @property
    def key(self) -> str:
        """The same for candidates that change the same."""
        return json.dumps(self.changes, sort_keys=True)

    @property
    def name(self) -> str:
        return ", ".join(idea.name for idea in self.ideas) or "current"

    def with_idea(self, idea: Idea) -> Candidate:
        """With this one in its slot."""
        kept = tuple(other for other in self.ideas if other.slot != idea.slot)
        return Candidate(ideas=(*kept, idea))

    def without(self, idea: Idea) -> Candidate:
        return Candidate(ideas=tuple(other for other in self.ideas if other != idea))


class Evaluate(Protocol):
    """Simulates settings. Picklable: it is sent to other processes once."""

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What the search knows of a system."""

    prompts_per_step: int
    samples_per_prompt: int
    tail_batching: TailBatchingConfig
    """As it is now."""
    ideas: tuple[Idea, ...]
    """Switches worth a try, factors and tiers left out."""
    oracle: Candidate | None = None
    """A bound that knows all lengths; for comparison only."""
    oracle_period: int = 1
    """The oracle is simulated for whole multiples of so many steps."""
    seed: int = 0
    """Simulations use this seed and later ones."""

    def tail_of(self, candidate: Candidate) -> TailBatchingConfig:
        """`tail_batching` with the candidate's changes."""
        changes: dict[str, Any] = {}
        for key, value in candidate.changes.items():
            section, _, name = key.partition(".")
            if section == "tail_batching":
                changes |= {name: value} if name else value
        if "tiers" in changes:
            changes["tiers"] = tuple(Tier(**tier) for tier in changes["tiers"])
        return dataclasses.replace(self.tail_batching, **changes)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with dotted keys set to plain values. Raises `ConfigError` if that is refused."""
    tree = to_plain(config)
    for key, value in changes.items():
        *sections, name = key.split(".")
        at = tree
        for section in sections:
            at = at[section]
        at[name] = copy.deepcopy(value)
    checker = Checker({})
    made = checker.build(type(config), tree, ())
    if checker.problems:
        path, problem = checker.problems[0]
        raise ConfigError(f"{dotted(path)} {problem}" if path else problem)
    return cast(Config, made)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioEvaluate:
    """Simulates a scenario."""

    scenario: Scenario

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        scenario = changed(self.scenario, candidate.changes)
        return simulate(dataclasses.replace(scenario, seed=seed, steps=steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvaluate:
    """Simulates a recorded run."""

    model: RunModel
    config: RunConfig

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        config = changed(self.config, candidate.changes)
        return self.model.simulate_config(config, seed=seed, steps=steps)


def plan_base(scenario: Scenario) -> Base:
    """What can be tried on a scenario."""
    rollout, scheduler = scenario.rollout, scenario.reward_scheduler
    ideas = [
        *_tail_ideas(scenario.tail_batching),
        *_stream_ideas(scenario, max_share=scenario.stream_trainer.max_share),
    ]
    if scheduler.order != "closest" and scenario.rewards:
        ideas.append(
            Idea(
                name="checks first of the prompt closest to its quota",
                slot="order",
                changes={"reward_scheduler.order": "closest"},
            )
        )
    if not scheduler.overlap and scenario.rewards:
        ideas.append(
            Idea(
                name="checks beside the rollout",
                slot="overlap",
                changes={"reward_scheduler.overlap": True},
            )
        )
    if not scheduler.adaptive_timeout and any(stage.limit_s for stage in scenario.stages):
        ideas.append(
            Idea(
                name="adaptive time limit of checks",
                slot="timeout",
                changes={"reward_scheduler.adaptive_timeout": True},
            )
        )
    ideas += _degree_ideas(scenario)
    if rollout.speculation is not None:
        kinds = ["plain", "short", "cascade", "long", "flush"]
        ideas += [
            Idea(
                name="speculation in every round",
                slot="speculation",
                changes={"rollout.speculation.kinds": kinds},
            ),
            Idea(name="no speculation", slot="speculation", changes={"rollout.speculation": None}),
        ]
    oracle = Idea(
        name="oracle",
        slot="oracle",
        changes={
            name: {**to_plain(getattr(scenario, name)), **switch}
            for name, switch in SYSTEMS["oracle"].items()
        },
    )
    return Base(
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        tail_batching=scenario.tail_batching,
        ideas=tuple(idea for idea in ideas if _is_possible(scenario, idea)),
        oracle=Candidate(ideas=(oracle,)),
        oracle_period=SYSTEMS["oracle"]["oracle"]["reorder_window"],
        seed=scenario.seed,
    )


def plan_base_of_run(config: RunConfig) -> Base:
    """What can be tried on a recorded run."""
    ideas = [
        *_tail_ideas(config.tail_batching),
        *_stream_ideas(config, max_share=config.stream_trainer.max_share),
    ]
    return Base(
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        tail_batching=config.tail_batching,
        ideas=tuple(idea for idea in ideas if _is_possible(config, idea)),
    )


def _tail_ideas(tail: TailBatchingConfig) -> list[Idea]:
    if not tail.enabled or tail.race == "generated":
        return []
    changes = {"tail_batching.race": "generated"}
    return [Idea(name="race on generated responses", slot="race", changes=changes)]


def _stream_ideas(config: Scenario | RunConfig, *, max_share: float) -> list[Idea]:
    stream = config.stream_trainer
    section = "stream_trainer"
    enabling = {} if stream.enabled else {f"{section}.enabled": True}
    ideas = []
    if not stream.enabled:
        ideas.append(Idea(name="gradients before the round's end", slot="stream", changes=enabling))
    if not (stream.enabled and stream.reward_wait):
        ideas.append(
            Idea(
                name="training in the reward wait",
                slot="reward_wait",
                changes={**enabling, f"{section}.reward_wait": True},
            )
        )
    if max_share < FULLER_SHARE:
        ideas.append(
            Idea(
                name=f"fuller streaming (up to {FULLER_SHARE:.0%})",
                slot="max_share",
                changes={**enabling, f"{section}.max_share": FULLER_SHARE},
            )
        )
    every = ["plain", "short", "cascade", "long", "flush"]
    if set(stream.kinds) != set(every):
        ideas.append(
            Idea(
                name="devices released in every kind of round",
                slot="kinds",
                changes={**enabling, f"{section}.kinds": every},
            )
        )
    return ideas


def _degree_ideas(scenario: Scenario) -> list[Idea]:
    """Other degrees of tensor parallelism, and leaving them to the planner."""
    own, planner = scenario.rollout.tensor_parallel, scenario.parallelism_planner.enabled
    ideas = []
    if not planner:
        ideas.append(
            Idea(
                name="parallelism planner",
                slot="degree",
                changes={"parallelism_planner.enabled": True},
            )
        )
    for degree in (own // 2, own, 2 * own):
        if degree < 1 or (degree == own and not planner):
            continue
        changes = {"rollout.tensor_parallel": degree, "parallelism_planner.enabled": False}
        ideas.append(Idea(name=f"tensor parallel {degree}", slot="degree", changes=changes))
    return ideas


def _is_possible(config: Scenario | RunConfig, idea: Idea) -> bool:
    try:
        changed(config, idea.changes)
    except ConfigError:
        return False
    return True


def factors_idea(factors: tuple[float, float], *tiers: tuple[float, float]) -> Idea:
    """Tail batching at (prompt_factor, sample_factor), with further races at theirs."""
    return Idea(
        name="factors " + " then ".join(f"({p:g}, {s:g})" for p, s in (factors, *tiers)),
        slot=FACTORS,
        changes={
            "tail_batching.enabled": True,
            "tail_batching.prompt_factor": factors[0],
            "tail_batching.sample_factor": factors[1],
            "tail_batching.tiers": [
                {"prompt_factor": prompts, "sample_factor": samples} for prompts, samples in tiers
            ],
        },
    )


def factor_grid(samples_per_prompt: int, *, fine: bool) -> list[Idea]:
    """Factors of one and of two races. Sample factors are whole samples."""
    samples = [(samples_per_prompt + more) / samples_per_prompt for more in (0, 1, 2, 4)]
    few = samples[:3] if fine else samples[1:3]
    single = (1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5) if fine else (1.125, 1.25, 1.5)
    second = (1.125, 1.25, 1.5) if fine else (1.25,)
    ideas = [factors_idea((p, s)) for p in single for s in samples[: 4 if fine else 3]]
    ideas += [
        factors_idea((p, s), (q, t)) for p in (1.25, 1.5) for s in few for q in second for t in few
    ]
    off = {"tail_batching.enabled": False, "tail_batching.tiers": []}
    return [*ideas, Idea(name="no tail batching", slot=FACTORS, changes=off)]


def _neighbours(tail: TailBatchingConfig, samples_per_prompt: int) -> list[Idea]:
    """Factors a little off these, in one number each."""
    if not tail.enabled or tail.chooses:
        return []
    races = [tail.factors, *((tier.prompt_factor, tier.sample_factor) for tier in tail.tiers)]
    found = []
    for index, (prompts, samples) in enumerate(races):
        for moved in (
            (prompts - 0.03125, samples),
            (prompts + 0.0625, samples),
            (prompts, samples - 1 / samples_per_prompt),
            (prompts, samples + 1 / samples_per_prompt),
        ):
            if moved[0] > 1 and moved[1] >= 1:
                found.append(factors_idea(*races[:index], moved, *races[index + 1 :]))
    return found


# -- what it comes to --------------------------------------------------------------


def round_shares(tail: TailBatchingConfig, prompts_per_step: int) -> dict[str, float] | None:
    """How often each kind of round comes in the long run; None if factors change on the way.

    Every prompt that a round launches beyond what it trains on is launched again by the next race,
    or at last by a long round."""
    if not tail.enabled:
        return {"plain": 1.0}
    if tail.chooses:
        return None
    launched = tail.num_prompts(prompts_per_step)
    counts = {"short": 1.0, "cascade": 0.0}
    deferred = float(launched - prompts_per_step)
    for tier in tail.tiers:
        launched = times(tier.prompt_factor, prompts_per_step)
        races = deferred / launched
        counts["cascade"] += races
        deferred = races * (launched - prompts_per_step)
    counts["long"] = deferred / prompts_per_step
    total = sum(counts.values())
    return {kind: count / total for kind, count in counts.items() if count > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One simulation, boiled down."""

    step_s: float
    """Mean step time in the long run."""
    shift: float
    """Mean trained length over the policy's own, minus 1, likewise."""
    kinds_s: Mapping[str, float]
    """Mean step time by kind of round."""


def measure(result: SystemResult, shares: Mapping[str, float] | None) -> Measure:
    """A simulation's long-run means, given how often each kind of round comes. Without that, or if
    the simulation has not seen just these kinds, its plain means."""
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, float] = {}
    samples: dict[str, float] = {}
    for step in result.steps:
        seconds.setdefault(step.kind, []).append(step.total_s)
        tokens[step.kind] = tokens.get(step.kind, 0) + step.tokens_trained
        samples[step.kind] = samples.get(step.kind, 0) + step.num_trained
    kinds_s = {kind: statistics.fmean(values) for kind, values in seconds.items()}
    if shares is None or shares.keys() != kinds_s.keys():
        return Measure(step_s=result.mean["total_s"], shift=result.length_shift, kinds_s=kinds_s)
    trained = sum(share * tokens[kind] / samples[kind] for kind, share in shares.items())
    return Measure(
        step_s=sum(share * kinds_s[kind] for kind, share in shares.items()),
        shift=trained / result.policy_length_mean - 1,
        kinds_s=kinds_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A candidate on several seeds, against the current settings on the same ones."""

    candidate: Candidate
    step_s: float
    saved_s: float
    """Seconds a step that the current settings take longer."""
    saved_error_s: float
    """Standard error of that over the seeds; nan with one seed."""
    shift: float
    """Length shift."""
    shift_error: float
    """Standard error of its difference to that of the current settings; 0 with one seed."""
    kinds_s: Mapping[str, float]
    """Mean step time by kind of round."""

    @property
    def is_clear(self) -> bool:
        """It is faster by more than noise."""
        return self.saved_s > max(NOISE_ERRORS * self.saved_error_s, MIN_GAIN * self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What one idea is worth inside the best setting."""

    idea: Idea
    added_s: float
    """Seconds a step that it saves when it is added to those listed before it."""
    left_out_s: float
    """Seconds a step that are lost if the best setting goes without it."""
    left_out_error_s: float
    """Standard error of `left_out_s`."""
    left_out_shift: float
    """Length shift without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the search found."""

    current: Finding
    best: Finding
    """`current` if nothing is clearly faster within the bound."""
    ranked: tuple[Finding, ...]
    """The finalists that keep the bound, fastest first."""
    too_short: tuple[Finding, ...]
    """Finalists that do not keep it."""
    reasons: tuple[Reason, ...]
    """The best setting's ideas, in the order in which they were added."""
    rejected: tuple[tuple[Idea, float], ...]
    """Switches that were left out, with the share of a step's time that each saved by itself."""
    oracle: Finding | None
    max_shift: float | None
    """Trained responses may be shorter by this share; None: any (debias undoes it)."""
    num_seeds: int
    num_steps: int
    """Of each of the last simulations."""
    num_simulated: int
    """Steps, in all."""

    @property
    def stays(self) -> bool:
        return self.best.candidate == self.current.candidate

    @property
    def current_keeps(self) -> bool:
        """The current settings keep the bound themselves."""
        return self.max_shift is None or self.current.shift >= -self.max_shift

    def to_plain(self) -> dict[str, Any]:
        """As `rollpacker plan --json` prints it."""
        return {
            "current": _finding_to_plain(self.current),
            "best": _finding_to_plain(self.best),
            "stays": self.stays,
            "ranked": [_finding_to_plain(finding) for finding in self.ranked],
            "beyond_bound": [_finding_to_plain(finding) for finding in self.too_short],
            "oracle": None if self.oracle is None else _finding_to_plain(self.oracle),
            "reasons": [
                {
                    "name": reason.idea.name,
                    "changes": dict(reason.idea.changes),
                    "added_s": reason.added_s,
                    "left_out_s": reason.left_out_s,
                    "left_out_error_s": _finite(reason.left_out_error_s),
                    "left_out_shift": reason.left_out_shift,
                }
                for reason in self.reasons
            ],
            "rejected": [
                {"name": idea.name, "saved_share_alone": saved} for idea, saved in self.rejected
            ],
            "max_shift": self.max_shift,
            "seeds": self.num_seeds,
            "steps": self.num_steps,
            "simulated_steps": self.num_simulated,
        }


def _finding_to_plain(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.candidate.name,
        "changes": finding.candidate.changes,
        "step_s": finding.step_s,
        "saved_s": finding.saved_s,
        "saved_error_s": _finite(finding.saved_error_s),
        "length_shift": finding.shift,
        "rounds_s": dict(finding.kinds_s),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- the search --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How much is simulated."""

    fine: bool
    """The larger grid of factors."""
    screen_steps: int
    kept: int
    """Factors that pass the screen."""
    second_steps: int
    finalists: int
    seeds: int
    steps: int
    """Of each simulation of a finalist; more if long rounds are rare."""


BUDGETS = {
    "quick": Budget(
        fine=False, screen_steps=15, kept=4, second_steps=25, finalists=2, seeds=3, steps=20
    ),
    "normal": Budget(
        fine=True, screen_steps=20, kept=12, second_steps=40, finalists=4, seeds=4, steps=40
    ),
    "thorough": Budget(
        fine=True, screen_steps=40, kept=24, second_steps=100, finalists=8, seeds=8, steps=100
    ),
}
MAX_STRETCH = 4
"""To see one round of the rarest kind, a simulation may be so many times longer than asked for."""


def plan(
    base: Base,
    evaluate: Evaluate,
    *,
    budget: Budget,
    max_shift: float | None = None,
    jobs: int = 1,
    progress: Progress = lambda stage, done, total: None,
) -> Plan:
    """Search. `max_shift`: trained responses may be shorter than the policy's own by this share;
    None: by as much as at the current settings. With debias any shift is allowed: the weights undo
    it.

    The result does not depend on `jobs`, the processes that simulate.
    """
    if max_shift is not None and not 0 <= max_shift < 1:
        raise ValueError(f"--max-shift must be at least 0 and less than 1, not {max_shift}")
    with _workers(evaluate, jobs) as workers:
        return _Search(base, evaluate, budget, max_shift, workers, progress).run()


def compare(
    base: Base,
    evaluate: Evaluate,
    candidates: Sequence[Candidate],
    *,
    seeds: Sequence[int],
    steps: int,
    jobs: int = 1,
    progress: Progress = lambda stage, done, total: None,
) -> list[Finding]:
    """These candidates on the same seeds (counted from the base's own); savings are against the
    first. More steps are simulated where they are needed to see every kind of round."""
    with _workers(evaluate, jobs) as workers:
        search = _Search(base, evaluate, BUDGETS["quick"], None, workers, progress)
        return search.compare(candidates, seeds, steps, "comparison")


class _Search:
    def __init__(
        self,
        base: Base,
        evaluate: Evaluate,
        budget: Budget,
        max_shift: float | None,
        workers: Executor | None,
        progress: Progress,
    ) -> None:
        self._base = base
        self._evaluate = evaluate
        self._budget = budget
        self._wanted_shift = max_shift
        self._bound = -math.inf
        """Least shift allowed, a negative number; on the seeds at hand."""
        self._workers = workers
        self._progress = progress
        self._known: dict[tuple[str, int, int], Measure] = {}
        self._num_simulated = 0

    def run(self) -> Plan:
        budget, base = self._budget, self._base
        alone = self._try_alone()
        finalists = self._choose_factors(_together(alone, base.ideas))
        if finalists:
            needed = {idea.slot for idea in self._simplify(finalists[0]).ideas}
            finalists = [
                Candidate(ideas=tuple(idea for idea in c.ideas if idea.slot in needed | {FACTORS}))
                for c in finalists
            ]
        seeds = range(FINAL_SEED, FINAL_SEED + budget.seeds)
        now, found = self._finals(finalists, seeds)
        kept = [f for f in found if self._keeps(f)]
        best, reasons = now, tuple[Reason, ...]()
        if kept and (kept[0].is_clear or not self._keeps(now)):
            best = kept[0]
            reasons = self._explain(best, seeds)
        oracle = None
        if base.oracle is not None:
            steps = math.ceil(budget.steps / base.oracle_period) * base.oracle_period
            oracle = self.compare([Candidate(), base.oracle], seeds, steps, "oracle")[1]
        taken = {idea.slot: idea.name for idea in best.candidate.ideas}
        return Plan(
            current=now,
            best=best,
            ranked=tuple(kept),
            too_short=tuple(f for f in found if not self._keeps(f)),
            reasons=reasons,
            rejected=tuple((i, s) for i, s in alone if i.name != taken.get(i.slot)),
            oracle=oracle,
            max_shift=None if math.isinf(self._bound) else -self._bound,
            num_seeds=budget.seeds,
            num_steps=budget.steps,
            num_simulated=self._num_simulated,
        )

    def _finals(
        self, finalists: Sequence[Candidate], seeds: Sequence[int]
    ) -> tuple[Finding, list[Finding]]:
        """The current settings and so many finalists on fresh seeds, the fastest first; further
        ones as long as none keeps the bound."""
        budget, found = self._budget, list[Finding]()
        for start in range(0, max(len(finalists), 1), budget.finalists):
            some = finalists[start : start + budget.finalists]
            now, *more = self.compare([Candidate(), *some], seeds, budget.steps, "finalists")
            self._set_bound(now.shift)
            found += more
            if any(self._keeps(f) for f in more):
                break
        return now, sorted(found, key=lambda f: f.step_s)

    def _try_alone(self) -> list[tuple[Idea, float]]:
        """The share of a step's time that each idea saves by itself, most first."""
        ideas = self._base.ideas
        candidates = [Candidate(), *(Candidate(ideas=(idea,)) for idea in ideas)]
        found = self.compare(candidates, range(1), self._budget.screen_steps, "ideas alone")
        saved = [(f.candidate.ideas[0], f.saved_s / found[0].step_s) for f in found[1:]]
        return sorted(saved, key=lambda item: -item[1])

    def _choose_factors(self, chosen: Candidate) -> list[Candidate]:
        """The few fastest factors with these switches, by successive halving."""
        budget, num_samples = self._budget, self._base.samples_per_prompt
        grid = factor_grid(num_samples, fine=budget.fine)
        tried = [chosen, *(chosen.with_idea(idea) for idea in grid)]
        kept = self._fastest(tried, budget.screen_steps, budget.kept, "factors")
        for stage, slack in (("closer", SCREEN_SLACK / 4), ("closest", -FINAL_MARGIN)):
            around = [
                chosen.with_idea(near)
                for candidate in kept[: 2 if budget.fine else 1]
                for near in _neighbours(self._base.tail_of(candidate), num_samples)
            ]
            tried = _distinct([*kept, *around])
            kept = self._fastest(tried, budget.second_steps, budget.kept, stage, slack) or kept
        return kept

    def _fastest(
        self,
        tried: list[Candidate],
        steps: int,
        count: int,
        stage: str,
        slack: float = SCREEN_SLACK,
    ) -> list[Candidate]:
        """So many of them that keep the bound within `slack`, the fastest first."""
        seen = [c for c in tried if self._sees_all(c, steps)]
        found = self.compare([Candidate(), *seen], range(1), steps, stage)
        self._set_bound(found[0].shift)
        fit = [f for f in found[1:] if self._keeps(f, slack)]
        return [f.candidate for f in sorted(fit, key=lambda f: f.step_s)[:count]]

    def _simplify(self, candidate: Candidate) -> Candidate:
        """Without the ideas that nobody misses, one after the other, the last of the list first."""
        order = [*self._base.ideas]
        while True:
            ideas = [idea for idea in candidate.ideas if idea in order]
            without = [candidate.without(idea) for idea in ideas]
            steps = self._budget.second_steps
            found = self.compare(
                [Candidate(), candidate, *without], range(1), steps, "leave one out"
            )
            self._set_bound(found[0].shift)
            most_s = (1 + MIN_GAIN) * found[1].step_s
            needless = [
                idea
                for idea, finding in zip(ideas, found[2:], strict=True)
                if finding.step_s <= most_s and (self._keeps(finding) or not self._keeps(found[1]))
            ]
            if not needless:
                return candidate
            candidate = candidate.without(max(needless, key=order.index))

    def _explain(self, best: Finding, seeds: Sequence[int]) -> tuple[Reason, ...]:
        """What every idea of the best setting is worth."""
        steps, ideas = self._budget.steps, best.candidate.ideas
        path = [Candidate(ideas=ideas[:size]) for size in range(len(ideas) + 1)]
        without = [best.candidate.without(idea) for idea in ideas]
        found = self.compare([best.candidate, *path, *without], seeds, steps, "reasons")
        path_s = [f.step_s for f in found[1 : 1 + len(path)]]
        return tuple(
            Reason(
                idea=idea,
                added_s=path_s[index] - path_s[index + 1],
                left_out_s=-left_out.saved_s,
                left_out_error_s=left_out.saved_error_s,
                left_out_shift=left_out.shift,
            )
            for index, (idea, left_out) in enumerate(
                zip(ideas, found[1 + len(path) :], strict=True)
            )
        )

    def _set_bound(self, current_shift: float) -> None:
        """The bound on the seeds at hand: the current settings' own shift is measured on them."""
        if self._base.tail_batching.debias != "none":
            self._bound = -math.inf
        elif self._wanted_shift is None:
            self._bound = min(current_shift, 0.0)
        else:
            self._bound = -self._wanted_shift

    def _keeps(self, finding: Finding, slack: float = 0.0) -> bool:
        """Not by luck alone: the seeds' noise counts against it."""
        return finding.shift - finding.shift_error >= self._bound - slack

    # -- simulations -------------------------------------------------------------------

    def compare(
        self, candidates: Sequence[Candidate], seeds: Iterable[int], steps: int, stage: str
    ) -> list[Finding]:
        """All of them on the same seeds; savings are against the first."""
        seeds = [self._base.seed + seed for seed in seeds]
        wanted = {
            (candidate.key, seed, self._num_steps(candidate, steps)): candidate
            for candidate in candidates
            for seed in seeds
        }
        missing = {key: c for key, c in wanted.items() if key not in self._known}
        self._progress(stage, 0, len(missing))
        for done, (key, result) in enumerate(self._simulate(missing), start=1):
            self._known[key] = measure(result, self._shares(missing[key]))
            self._num_simulated += key[2]
            self._progress(stage, done, len(missing))
        rows = [
            [self._known[c.key, seed, self._num_steps(c, steps)] for seed in seeds]
            for c in candidates
        ]
        return [_finding(c, row, rows[0]) for c, row in zip(candidates, rows, strict=True)]

    def _num_steps(self, candidate: Candidate, steps: int) -> int:
        """So many, or as many as it takes to see a round of every kind."""
        return max(steps, self._least_steps(candidate))

    def _sees_all(self, candidate: Candidate, steps: int) -> bool:
        """No kind of round of this candidate is so rare that it would take too many steps."""
        return self._least_steps(candidate) <= MAX_STRETCH * steps

    def _least_steps(self, candidate: Candidate) -> int:
        return math.ceil(1 / min((self._shares(candidate) or {"": 1.0}).values())) + 2

    def _shares(self, candidate: Candidate) -> dict[str, float] | None:
        return round_shares(self._base.tail_of(candidate), self._base.prompts_per_step)

    def _simulate(
        self, missing: Mapping[tuple[str, int, int], Candidate]
    ) -> Iterator[tuple[tuple[str, int, int], SystemResult]]:
        if self._workers is None:
            for key, candidate in missing.items():
                yield key, self._evaluate(candidate, key[1], key[2])
            return
        tasks = {
            self._workers.submit(_work, candidate, key[1], key[2]): key
            for key, candidate in missing.items()
        }
        try:
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        finally:
            for task in tasks:
                task.cancel()


def _together(alone: Iterable[tuple[Idea, float]], order: Sequence[Idea]) -> Candidate:
    """Every idea that may help, the best of each slot, in this order. `alone` has the best ideas
    first."""
    best: dict[str, Idea] = {}
    for idea, saved in alone:
        if saved > -MAX_LOSS:
            best.setdefault(idea.slot, idea)
    return Candidate(ideas=tuple(idea for idea in order if best.get(idea.slot) is idea))


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    return list({candidate.key: candidate for candidate in candidates}.values())


def _finding(
    candidate: Candidate, measures: Sequence[Measure], against: Sequence[Measure]
) -> Finding:
    saved = [other.step_s - own.step_s for own, other in zip(measures, against, strict=True)]
    shifted = [other.shift - own.shift for own, other in zip(measures, against, strict=True)]
    is_known = len(saved) > 1
    kinds = {kind for m in measures for kind in m.kinds_s}
    return Finding(
        candidate=candidate,
        step_s=statistics.fmean(m.step_s for m in measures),
        saved_s=statistics.fmean(saved),
        saved_error_s=_standard_error(saved) if is_known else math.nan,
        shift=statistics.fmean(m.shift for m in measures),
        shift_error=_standard_error(shifted) if is_known else 0.0,
        kinds_s={
            kind: statistics.fmean(m.kinds_s[kind] for m in measures if kind in m.kinds_s)
            for kind in sorted(kinds)
        },
    )


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


# -- processes ---------------------------------------------------------------------

_evaluate: Evaluate | None = None
"""In a worker process: what it simulates with."""


def _receive(evaluate: Evaluate) -> None:
    global _evaluate
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    _evaluate = evaluate


def _work(candidate: Candidate, seed: int, steps: int) -> SystemResult:
    assert _evaluate is not None
    return _evaluate(candidate, seed, steps)


@contextmanager
def _workers(evaluate: Evaluate, jobs: int) -> Iterator[Executor | None]:
    """Processes of one thread each; none for one job."""
    if jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")
    if jobs == 1:
        yield None
        return
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    pool = ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=_receive, initargs=(evaluate,)
    )
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
