"""What a plan can try: ideas, each a few config keys set together, on a scenario or a recorded run.

The search (`sim/plan.py`) knows a system only by `Base` and `Evaluate`, so that both are planned by
the same code. Everything here is in the core, on-policy, and can be written into a config.
"""

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
from rollpacker.core.tail_batching import TailBatchingConfig, Tier
from rollpacker.sim.presets import SYSTEMS
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import Scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.whatif import RunModel

Config = TypeVar("Config")

FULLER_SHARE = 0.95
"""A step's share of samples that fuller streaming hides under the rollout: all but what finishes
last."""
FACTORS = "factors"
"""The slot of the races' factors."""


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
        # Never the seed 0: a plan simulates few steps, which shall stand for the whole run.
        return self.model.simulate_config(config, seed=seed + 1, steps=steps)


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
    switches = {
        name: {**to_plain(getattr(scenario, name)), **switch}
        for name, switch in SYSTEMS["oracle"].items()
    }
    switches["tail_batching"]["debias"] = "none"  # it selects nothing, and it streams
    oracle = Idea(name="oracle", slot="oracle", changes=switches)
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


def neighbours(tail: TailBatchingConfig, samples_per_prompt: int) -> list[Idea]:
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
