"""Ideas that a plan can try on a scenario or a recorded run, each a few config keys set together.
The search (`sim/plan.py`) knows a system only by `Base` and `Evaluate`, so that both kinds are
planned by the same code. Every idea is a setting of real runs too, keeps training on-policy, and
fits a config."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from rollpacker.config.check import Checker
from rollpacker.config.document import ConfigError, dotted
from rollpacker.config.load import to_plain
from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.plan_shared import PoolPrices
from rollpacker.sim.presets import SYSTEMS
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import Scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.whatif import RunModel
from rollpacker.sim.workload import Workload

Config = TypeVar("Config")

FULLER_SHARE = 0.95
"""Largest share of a step's samples whose gradients are computed during generation, in the idea
"fuller streaming": all samples but those that finish last."""
EVERY_KIND = ["plain", "short", "cascade", "long", "flush"]
"""Every kind of round (one batch of generation), as a config lists the kinds."""
FACTORS = "factors"
"""The slot (group of ideas that exclude one another) of ideas on how many more prompts and samples
a round launches than it needs."""


@dataclass(frozen=True, slots=True)
class Idea:
    """A few config keys that a plan changes together."""

    name: str
    """Words that name the idea in tables."""
    slot: str
    """Name of what the idea sets. Ideas with the same slot exclude one another."""
    changes: Mapping[str, Any]
    """Mapping from dotted config keys to their new values, given as in a config file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The current settings, changed by some ideas; unchanged without ideas."""

    ideas: tuple[Idea, ...] = ()

    @property
    def changes(self) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for idea in self.ideas:
            merged |= idea.changes
        return merged

    @property
    def key(self) -> str:
        """A text that is equal for candidates with equal changes of the config."""
        return json.dumps(self.changes, sort_keys=True)

    @property
    def name(self) -> str:
        return ", ".join(idea.name for idea in self.ideas) or "current"

    @property
    def num_switches(self) -> int:
        """Number of the candidate's ideas, the one on factors of tail batching not counted."""
        return sum(idea.slot != FACTORS for idea in self.ideas)

    def with_idea(self, idea: Idea) -> Candidate:
        """The candidate with this idea, in place of its idea of the same slot (group of ideas that
        exclude one another) if it has one."""
        kept = tuple(other for other in self.ideas if other.slot != idea.slot)
        return Candidate(ideas=(*kept, idea))

    def without(self, idea: Idea) -> Candidate:
        return Candidate(ideas=tuple(other for other in self.ideas if other != idea))


class Evaluate(Protocol):
    """Type of a function that simulates a run with a candidate's settings for `steps` steps. It
    must be picklable, since it is sent to other processes."""

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What a search starts from: the settings of a scenario or a run, and what may change them."""

    prompts_per_step: int
    samples_per_prompt: int
    tail_batching: TailBatchingConfig
    """The current settings of tail batching."""
    ideas: tuple[Idea, ...]
    """Ideas that the search tries, besides those on the factors of tail batching."""
    oracle: Candidate | None = None
    """Changes that make an oracle, which knows all lengths beforehand. None: not simulated."""
    oracle_period: int = 1
    """The oracle (which knows all lengths) is simulated for a multiple of this number of steps."""
    seed: int = 0
    """First seed of the simulations; further seeds count on from this one."""
    mismatch: float = 0.0
    """Chance per token and weight update that a token, kept of an unfinished response, comes out
    differently when the response's prompt is launched again."""
    mismatch_band: tuple[float, ...] = ()
    """Lowest and highest value that `mismatch` may really have. Empty: `mismatch` is exact."""
    has_turns: bool = False
    """Whether samples are trajectories. For these the plan does not vary the rule
    `tail_batching.complement` (unbiased lengths of continued responses), which has no effect."""
    capped_share: float | None = None
    """Share of the policy's own responses that reach the cap of tokens. None: not known."""
    trust: float | None = None
    """Share by which a simulated step's seconds differ from a measured step's. A setting must gain
    more than that in trained tokens per second. None: not known."""
    measured_shift: float | None = None
    """Mean trained length over the policy's own, minus 1, as measured in a run with the current
    settings. None: the search uses the simulated value."""
    prices: PoolPrices | None = None
    """Prices of devices in pools shared by jobs, by which settings are compared. None: settings are
    compared by a step's seconds."""

    @property
    def order_only(self) -> bool:
        """Whether the search may change only the order in which responses are trained on, since the
        current settings drop no response."""
        return self.tail_batching.selection == "none"

    def tail_of(self, candidate: Candidate) -> TailBatchingConfig:
        """The settings of tail batching after the candidate's changes."""
        changes: dict[str, Any] = {}
        for key, value in candidate.changes.items():
            section, _, name = key.partition(".")
            if section == "tail_batching":
                changes |= {name: value} if name else value
        if "tiers" in changes:
            changes["tiers"] = tuple(Tier(**tier) for tier in changes["tiers"])
        return dataclasses.replace(self.tail_batching, **changes)


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """A copy of the config with dotted keys set to new values, given as in a config file. Raises
    `ConfigError` if the config's checks refuse the result."""
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
    """Simulates a scenario with a candidate's changes; an `Evaluate`."""

    scenario: Scenario

    def __call__(self, candidate: Candidate, seed: int, steps: int) -> SystemResult:
        scenario = changed(self.scenario, candidate.changes)
        return simulate(dataclasses.replace(scenario, seed=seed, steps=steps))


def plan_base(scenario: Scenario) -> Base:
    """The starting point of a search for this scenario's settings, with all ideas to be tried."""
    rollout, scheduler = scenario.rollout, scenario.reward_scheduler
    ideas = _tail_and_stream_ideas(scenario)
    if scheduler.order != "closest" and scenario.rewards:
        name = "checks first of the prompt closest to its quota"
        ideas.append(Idea(name, "order", {"reward_scheduler.order": "closest"}))
    if not scheduler.overlap and scenario.rewards:
        ideas.append(
            Idea("checks beside the rollout", "overlap", {"reward_scheduler.overlap": True})
        )
    if not scheduler.adaptive_timeout and any(stage.limit_s for stage in scenario.stages):
        changes = {"reward_scheduler.adaptive_timeout": True}
        ideas.append(Idea("adaptive time limit of checks", "timeout", changes))
    ideas += _degree_ideas(scenario)
    if rollout.speculation is not None:
        ideas += [
            Idea(
                "speculation in every round",
                "speculation",
                {"rollout.speculation.kinds": EVERY_KIND},
            ),
            Idea("no speculation", "speculation", {"rollout.speculation": None}),
        ]
    return Base(
        prompts_per_step=rollout.prompts_per_step,
        samples_per_prompt=rollout.samples_per_prompt,
        tail_batching=scenario.tail_batching,
        ideas=tuple(idea for idea in ideas if _is_possible(scenario, idea)),
        oracle=_oracle(scenario),
        oracle_period=SYSTEMS["oracle"]["oracle"]["reorder_window"],
        seed=scenario.seed,
        mismatch=scenario.carry.mismatch,
        mismatch_band=scenario.carry.mismatch_band or (),
        has_turns=scenario.turns is not None,
        capped_share=Workload.of(scenario).capped_share(),
    )


def _oracle(scenario: Scenario) -> Candidate:
    """A candidate that turns the scenario's system into the oracle, which knows all lengths."""
    switches = {
        name: {**to_plain(getattr(scenario, name)), **switch}
        for name, switch in SYSTEMS["oracle"].items()
    }
    switches["tail_batching"]["debias"] = "none"  # it selects nothing, and it streams
    if scenario.cluster.is_apart:
        switches["stream_trainer"]["enabled"] = False
    return Candidate(ideas=(Idea("oracle", "oracle", switches),))


def plan_base_of_run(config: RunConfig, model: RunModel) -> Base:
    """The `Base` (starting point) of a search for better settings of a recorded run, with every
    idea that can be tried on it. `model`, fitted to the run, gives the rate of mismatches and the
    share of responses that reach the cap."""
    ideas = _tail_and_stream_ideas(config)
    return Base(
        prompts_per_step=config.rollout.prompts_per_step,
        samples_per_prompt=config.rollout.samples_per_prompt,
        tail_batching=config.tail_batching,
        ideas=tuple(idea for idea in ideas if _is_possible(config, idea)),
        mismatch=model.mismatch,
        capped_share=model.capped_share,
    )


def _tail_and_stream_ideas(config: Scenario | RunConfig) -> list[Idea]:
    """Ideas that set keys of `tail_batching` and `stream_trainer`, which both configs have."""
    tail, stream = config.tail_batching, config.stream_trainer
    on = {} if stream.enabled else {"stream_trainer.enabled": True}
    ideas = []
    if tail.enabled and tail.race != "generated":
        changes: dict[str, Any] = {"tail_batching.race": "generated"}
        ideas.append(Idea("race on generated responses", "race", changes))
    if not stream.enabled:
        ideas.append(Idea("gradients before the round's end", "stream", on))
    if not (stream.enabled and stream.reward_wait):
        changes = {**on, "stream_trainer.reward_wait": True}
        ideas.append(Idea("training in the reward wait", "reward_wait", changes))
    if stream.max_share < FULLER_SHARE:
        changes = {**on, "stream_trainer.max_share": FULLER_SHARE}
        ideas.append(Idea(f"fuller streaming (up to {FULLER_SHARE:.0%})", "max_share", changes))
    if set(stream.kinds) != set(EVERY_KIND):
        changes = {**on, "stream_trainer.kinds": EVERY_KIND}
        ideas.append(Idea("devices released in every kind of round", "kinds", changes))
    return ideas


def _degree_ideas(scenario: Scenario) -> list[Idea]:
    """Ideas that set another degree of tensor parallelism (half or twice the present one), or let
    the parallelism planner choose the degree during the run."""
    own, planner = scenario.rollout.tensor_parallel, scenario.parallelism_planner.enabled
    ideas = []
    if not planner:
        changes: dict[str, Any] = {"parallelism_planner.enabled": True}
        ideas.append(Idea("parallelism planner", "degree", changes))
    for degree in (own // 2, own, 2 * own):
        if degree < 1 or (degree == own and not planner):
            continue
        changes = {"rollout.tensor_parallel": degree, "parallelism_planner.enabled": False}
        ideas.append(Idea(f"tensor parallel {degree}", "degree", changes))
    return ideas


def _is_possible(config: Scenario | RunConfig, idea: Idea) -> bool:
    try:
        changed(config, idea.changes)
    except ConfigError:
        return False
    return True


def factors_idea(factors: tuple[float, float], *tiers: tuple[float, float]) -> Idea:
    """The idea to use tail batching with `factors`: by how many times a short round launches more
    prompts and more samples of each than it needs. Each of `tiers` is such a pair for further short
    rounds, of the prompts that earlier ones put off."""
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


def order_idea(
    factor: float,
    *,
    carry: str = "exact",
    stragglers: str = "pool",
    max_deferrals: int = 4,
    complement: bool = True,
) -> Idea:
    """The idea to use tail batching that drops no response but changes the order of training. A
    round launches `factor` times the prompts that it needs. The other arguments, settings of
    `tail_batching`, say what happens to deferred prompts."""
    treated = ["drawn from scratch" if carry == "none" else "tokens carried"]
    if stragglers == "pool":
        treated.append(f"awaited after {max_deferrals}")
    if carry != "none" and not complement:
        treated.append("no complement rule")
    return Idea(
        name=f"{stragglers} {factor:g} ({', '.join(treated)})",
        slot=FACTORS,
        changes={
            "tail_batching.enabled": True,
            "tail_batching.prompt_factor": factor,
            "tail_batching.tiers": [],
            "tail_batching.carry": carry,
            "tail_batching.stragglers": stragglers,
            "tail_batching.max_deferrals": max_deferrals,
            "tail_batching.complement": complement,
        },
    )


OFF = Idea(
    name="no tail batching",
    slot=FACTORS,
    changes={"tail_batching.enabled": False, "tail_batching.tiers": []},
)


def factor_grid(base: Base, *, fine: bool) -> list[Idea]:
    """Ideas on tail batching to try, the last of which turns it off. Each sets how many more
    prompts than needed a round launches, and either how many more samples or, where only the order
    of training may change, where deferred prompts wait. `fine`: try more of them."""
    return [*(_order_grid if base.order_only else _published_grid)(base, fine), OFF]


def _order_grid(base: Base, fine: bool) -> list[Idea]:
    pools = (1.125, 1.25, 1.5, 1.75, 2.0, 2.5) if fine else (1.25, 1.5, 2.0)
    waits = (1, 2, 4, 8, 16) if fine else (4, 16)
    rules = (True, False) if base.mismatch and not base.has_turns else (True,)
    return [
        *(
            order_idea(factor, max_deferrals=wait, complement=rule)
            for factor in pools
            for wait in waits
            for rule in rules
        ),
        *(
            order_idea(factor, stragglers="queue", complement=rule)
            for factor in pools[:4]
            for rule in rules
        ),
        *(order_idea(factor, stragglers="queue", carry="none") for factor in pools[:3]),
    ]


def _published_grid(base: Base, fine: bool) -> list[Idea]:
    """Ideas with one kind of short round, and with a second for prompts put off by the first.
    Sample factors are such that a prompt gets a whole number of samples."""
    num_samples = base.samples_per_prompt
    samples = [(num_samples + more) / num_samples for more in (0, 1, 2, 4)]
    few = samples[:3] if fine else samples[1:3]
    single = (1.0625, 1.125, 1.1875, 1.25, 1.375, 1.5) if fine else (1.125, 1.25, 1.5)
    second = (1.125, 1.25, 1.5) if fine else (1.25,)
    ideas = [factors_idea((p, s)) for p in single for s in samples[: 4 if fine else 3]]
    return ideas + [
        factors_idea((p, s), (q, t)) for p in (1.25, 1.5) for s in few for q in second for t in few
    ]


def neighbours(base: Base, candidate: Candidate) -> list[Idea]:
    """Ideas like the candidate's on tail batching, with one number a little larger or smaller.
    Empty without tail batching, or if these numbers are chosen during the run."""
    tail = base.tail_of(candidate)
    if not tail.enabled or tail.chooses:
        return []
    if base.order_only:
        return _order_neighbours(tail)
    races = [tail.factors, *(tier.factors for tier in tail.tiers)]
    found = []
    for index, (prompts, samples) in enumerate(races):
        for moved in (
            (prompts - 0.03125, samples),
            (prompts + 0.0625, samples),
            (prompts, samples - 1 / base.samples_per_prompt),
            (prompts, samples + 1 / base.samples_per_prompt),
        ):
            if moved[0] > 1 and moved[1] >= 1:
                found.append(factors_idea(*races[:index], moved, *races[index + 1 :]))
    return found


def _order_neighbours(tail: TailBatchingConfig) -> list[Idea]:
    factor, wait = tail.factors.prompts, tail.max_deferrals
    assert tail.carry is not None
    return [
        order_idea(
            moved,
            carry=tail.carry,
            stragglers=tail.stragglers,
            max_deferrals=deferrals,
            complement=tail.complement,
        )
        for moved, deferrals in (
            (factor - 0.125, wait),
            (factor + 0.25, wait),
            *(((factor, wait // 2), (factor, 2 * wait)) if tail.pooled else ()),
        )
        if moved > 1 and deferrals >= 1
    ]


STREAMING = "stream_trainer."


def on_shared_pools(base: Base, prices: PoolPrices) -> Base:
    """The base, changed so that settings are compared by the price of the devices, in pools shared
    by jobs, that a step holds. Ideas that train during generation are left out: no job holds
    devices of both kinds, for generation and for training, at once."""
    ideas = tuple(
        idea for idea in base.ideas if not any(key.startswith(STREAMING) for key in idea.changes)
    )
    return dataclasses.replace(base, ideas=ideas, prices=prices)
