"""What the RollPacker paper (arXiv 2509.21009) publishes, and what the simulator says of it.

Every published number that the simulator can be asked for, as a `Fact`: where it is printed, which
simulations it needs and what is read off them. `sim_calibration.py` fits the constants to them;
this prints the facts with the constants that are shipped, the error factor of every group, and what
stands beside the speed-ups. Numbers were read off figures where the paper prints none.

    python benchmarks/sim_published.py
    python benchmarks/sim_published.py --jobs 2
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lab import PUBLISHED, ROOT, bench

from rollpacker.core.commands import TrainOn
from rollpacker.core.events import SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Entry, Record
from rollpacker.sim import presets
from rollpacker.sim.latency import Calibration
from rollpacker.sim.result import StepResult, SystemResult
from rollpacker.sim.scenario import Scenario, load_scenario
from rollpacker.sim.simulate import simulate
from rollpacker.sim.workload_spec import RewardStage

SET_UPS = ("7b-8k", "14b-16k", "32b-32k")
SEEDS = (0, 1)

# -- the fitted constants ----------------------------------------------------------------

Constants = dict[str, float]
"""Values of the fitted constants, by name."""
MACHINE = ("launch_layer_s", "per_sequence_s", "train_utilization", "synchronous_judge_share")
"""Fitted constants that are fields of `Calibration`."""


def shipped() -> Constants:
    """The fitted constants as they are shipped."""
    calibration = Calibration()
    fixed = {name: load(name).train.fixed_s or 0.0 for name in SET_UPS}
    return {
        **{name: getattr(calibration, name) for name in MACHINE},
        **{f"train_fixed_s {name}": seconds for name, seconds in fixed.items()},
        "judge_calls_per_s": presets.REWARD_KINDS["judge"].calls_per_s or 0.0,
        "streamed_share": presets.STREAMED_SHARE,
        "sandbox_workers": float(presets.REWARD_KINDS["code"].workers or 0),
        "longer_share": presets.LONGER_SHARE,
        "lucky_share": presets.LUCKY_SHARE,
        **presets.PROMPTS,
    }


def load(set_up: str, *overrides: str) -> Scenario:
    return load_scenario(ROOT / f"configs/scenarios/{set_up}.yaml", overrides)


def with_constants(scenario: Scenario, set_up: str, constants: Constants) -> Scenario:
    """The scenario with these constants wherever it leaves one to its preset. The length laws of
    this process become theirs, too."""
    laws = presets.length_laws(constants["longer_share"], constants["lucky_share"])
    presets.LENGTH_LAWS.update(laws)
    presets.PROMPTS.update({name: constants[name] for name in presets.PROMPTS})
    stream = scenario.stream_trainer
    if stream.enabled and stream.max_share == presets.STREAMED_SHARE:
        stream = dataclasses.replace(stream, max_share=constants["streamed_share"])
    train = dataclasses.replace(scenario.train, fixed_s=constants[f"train_fixed_s {set_up}"])
    return dataclasses.replace(
        scenario,
        rewards=tuple(_stage(stage, constants) for stage in scenario.rewards),
        stream_trainer=stream,
        train=train,
    )


def _stage(stage: RewardStage, constants: Constants) -> RewardStage:
    if stage.kind == "judge" and stage.calls_per_s is None:
        return dataclasses.replace(stage, calls_per_s=constants["judge_calls_per_s"])
    if stage.kind == "code" and stage.workers is None:
        return dataclasses.replace(stage, workers=round(constants["sandbox_workers"]))
    return stage


# -- simulations -------------------------------------------------------------------------


@dataclass(frozen=True)
class Sim:
    """A simulation that facts need."""

    set_up: str
    overrides: tuple[str, ...]
    steps: int = 40
    fit_steps: int = 10
    """Whole periods, and few of them: while constants are searched for."""


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation over all its seeds."""

    results: tuple[SystemResult, ...]
    trained: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of every trained response by kind of round."""

    def mean(self, what: str, kind: str | None = None) -> float:
        """Of a number of `StepResult`, over the steps of one kind of round if one is named."""
        return statistics.fmean(getattr(step, what) for step in self.steps(kind))

    def steps(self, kind: str | None = None) -> list[StepResult]:
        return [s for r in self.results for s in r.steps if kind is None or s.kind == kind]

    def told(self) -> dict[str, float]:
        """The step time, and what stands beside every speed-up."""
        generated = sum(r.tokens_generated for r in self.results)
        return {
            "step_s": round(self.mean("total_s"), 2),
            "length_shift": round(statistics.fmean(r.length_shift for r in self.results), 4),
            "tail_trained_share": round(
                statistics.fmean(r.tail_trained_share for r in self.results), 4
            ),
            "generated_per_trained": round(
                generated / sum(r.tokens_trained for r in self.results), 3
            ),
        }


Outcomes = Mapping[Sim, Outcome]


class _Trained:
    """Gathers the tokens of every trained response by the kind of its step."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self._generated: dict[SampleId, int] = {}

    def __call__(self, record: Entry) -> None:
        if not isinstance(record, Record):
            return
        if isinstance(record.event, SampleGenerated):
            self._generated[record.event.sample] = record.event.num_tokens
        for command in record.commands:
            if isinstance(command, TrainOn):
                samples = [sample for group in command.groups for sample in group]
                self.tokens.append([self._generated[sample] for sample in samples])
                self._generated.clear()


def run(job: tuple[Sim, Constants, Sequence[int], bool]) -> Outcome:
    """The simulation with these constants and seeds, short for a fit or in full."""
    sim, constants, seeds, fitting = job
    calibration = Calibration(**{name: constants[name] for name in MACHINE})
    results: list[SystemResult] = []
    trained: dict[str, list[int]] = {"short": [], "long": [], "plain": [], "flush": []}
    for seed in seeds:
        steps = sim.fit_steps if fitting else sim.steps
        scenario = load(sim.set_up, *sim.overrides, f"steps={steps}", f"seed={seed}")
        scenario = with_constants(scenario, sim.set_up, constants)
        observe = _Trained() if sim.overrides[:1] == CODE_ONLY else None
        result = simulate(scenario, calibration=calibration, observe=observe)
        results.append(result)
        for step, tokens in zip(result.steps, observe.tokens if observe else (), strict=False):
            trained[step.kind] += tokens
    return Outcome(tuple(results), trained)


def run_all(
    pool: ProcessPoolExecutor,
    sims: Iterable[Sim],
    constants: Constants,
    *,
    seeds: Sequence[int] = SEEDS,
    fitting: bool = False,
) -> dict[Sim, Outcome]:
    unique = list(dict.fromkeys(sims))
    jobs = [(sim, constants, seeds, fitting) for sim in unique]
    return dict(zip(unique, pool.map(run, jobs, chunksize=2), strict=True))


# -- systems and switches ----------------------------------------------------------------

INSTANT_REWARDS = (
    *("rewards.0.seconds_quantiles={0.5: 1.0e-9}", "rewards.0.workers=100000"),
    *("rewards.1.seconds_quantiles={0.5: 1.0e-9}", "rewards.1.workers=100000"),
    "rewards.2.calls_per_s=1.0e+9",
)
"""Every verdict is there at once; the mix of prompts and their lengths stay."""
CODE_ONLY = ("rewards=[{kind: code, share: 1.0, lengths: {preset: rollpacker-code}}]",)
MATH_ONLY = ("rewards=[{kind: math, share: 1.0, lengths: {preset: rollpacker-math}}]",)

VERL, ROLLPACKER = ("system=verl",), ("system=rollpacker-published",)
TAIL_BATCHING = (
    *("tail_batching.enabled=true", "tail_batching.selection=published"),
    "tail_batching.balance_sources=true",
)
GENERATED, SCORED = ("tail_batching.race=generated",), ("tail_batching.race=scored",)
PLANNER = ("parallelism_planner.enabled=true",)
OVERLAP = ("reward_scheduler.overlap=true",)
SCHEDULER = (*OVERLAP, "reward_scheduler.adaptive_timeout=true")
NO_STREAM = ("stream_trainer.enabled=false",)
NO_TIMEOUT = ("reward_scheduler.adaptive_timeout=false",)
TAIL_ONLY = (*VERL, *TAIL_BATCHING, *GENERATED)
TAIL_SCORED = (*VERL, *TAIL_BATCHING, *SCORED, *SCHEDULER)
SYSTEMS: Mapping[str, tuple[str, ...]] = {
    **{"verl": VERL, "rlhfuse": ("system=rlhfuse",)},
    **{"rollpacker": ROLLPACKER, "oracle": ("system=oracle",)},
}
"""Systems as the paper names them; the oracle is ours."""
ADDED: Mapping[str, tuple[str, ...]] = {
    "+ tail batching": TAIL_ONLY,
    "+ reward scheduler": TAIL_SCORED,
    "+ parallelism planner": (*TAIL_SCORED, *PLANNER),
    "+ stream trainer": ROLLPACKER,
}
"""Parts of RollPacker added to verl one by one, in the order of Table 2. The race is on generated
responses as long as rewards are synchronous."""
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "- tail batching": (
        *ROLLPACKER,
        "tail_batching.enabled=false",
        "stream_trainer.kinds=[plain]",
    ),
    "- parallelism planner": (*ROLLPACKER, "parallelism_planner.enabled=false"),
    "- reward scheduler": (*ROLLPACKER, *GENERATED, "reward_scheduler.overlap=false", *NO_TIMEOUT),
    "- adaptive timeout": (*ROLLPACKER, *NO_TIMEOUT),
    "- judge on the same GPUs": (*ROLLPACKER, "reward_scheduler.colocated_judge=false"),
    "- stream trainer": (*ROLLPACKER, *NO_STREAM),
}
ROLLOUT_ALONE = (*INSTANT_REWARDS, "parallelism_planner.enabled=false", *NO_STREAM)

# -- published ---------------------------------------------------------------------------

HELD = PUBLISHED["rollpacker"]
MEANS, SPLITS, ABLATION, OVERLAP_ALONE, SCALING = (
    HELD[name] for name in ("means", "splits", "ablation", "overlap_alone", "scaling")
)
SENSITIVITY = {(prompts, samples): tuple(s) for prompts, samples, *s in HELD["sensitivity"]}


# -- facts -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fact:
    """A published number, and how it is simulated."""

    group: str
    name: str
    source: str
    published: float
    needs: tuple[Sim, ...]
    value: Callable[[Sequence[Outcome]], float]

    def simulated(self, outcomes: Outcomes) -> float:
        return self.value([outcomes[sim] for sim in self.needs])


def _of(what: str, kind: str | None = None) -> Callable[[Sequence[Outcome]], float]:
    return lambda found: found[0].mean(what, kind)


def _waited(kind: str | None = None) -> Callable[[Sequence[Outcome]], float]:
    """Rollout and the wait for rewards after it."""
    return lambda found: found[0].mean("rollout_s", kind) + found[0].mean("reward_s", kind)


def _speedup(found: Sequence[Outcome]) -> float:
    return found[0].mean("total_s") / found[1].mean("total_s")


def _mean_facts() -> Iterable[Fact]:
    for set_up, published in MEANS.items():
        for what, seconds in published.items():
            kind = what if what in ("short", "long") else None
            sim = Sim(set_up, ROLLPACKER if kind else SYSTEMS[what])
            name = f"{set_up}, rollpacker, {kind} rounds" if kind else f"{set_up}, {what}"
            yield Fact("step times", name, "Fig. 9", seconds, (sim,), _of("total_s", kind))


def _split_facts() -> Iterable[Fact]:
    for name, (_, rollout_s, reward_s, train_s) in SPLITS.items():
        set_up, kind = name.split()
        sims, told = (Sim(set_up, ROLLPACKER),), f"{set_up}, {kind} round"
        waited_s = rollout_s + reward_s
        yield Fact(
            "breakdown", f"{told}: rollout and reward, s", "Fig. 10c", waited_s, sims, _waited(kind)
        )
        yield Fact(
            "breakdown", f"{told}: training, s", "Fig. 10c", train_s, sims, _of("train_s", kind)
        )


def _ablation_facts() -> Iterable[Fact]:
    for set_up, place in zip(SET_UPS, range(3), strict=True):
        for name, published in ABLATION.items():
            sims = (Sim(set_up, VERL), Sim(set_up, ADDED[name]))
            yield Fact("ablation", f"{set_up}, {name}", "Table 2", published[place], sims, _speedup)
    for set_up, speedup in OVERLAP_ALONE.items():
        sims = (Sim(set_up, VERL), Sim(set_up, (*VERL, *OVERLAP)))
        name = f"{set_up}, asynchronous rewards alone"
        yield Fact("ablation", name, "section 6.5", speedup, sims, _speedup)


def sensitivity_sim(factors: tuple[float, float], set_up: str) -> Sim:
    own = zip(("prompt_factor", "sample_factor"), factors, strict=True)
    overrides = (*ROLLPACKER, *ROLLOUT_ALONE, *(f"tail_batching.{n}={v}" for n, v in own))
    # Whole periods of 9, 5 and 3 steps.
    fit_steps = {1.0: 10, 1.125: 18, 1.25: 15, 1.5: 15}[factors[0]]
    return Sim(set_up, overrides, steps=45, fit_steps=fit_steps)


def _sensitivity_facts() -> Iterable[Fact]:
    for factors, published in SENSITIVITY.items():
        for set_up, seconds in zip(SET_UPS, published, strict=True):
            name = f"{set_up}, factors ({factors[0]:g}, {factors[1]:g}), s"
            sims = (sensitivity_sim(factors, set_up),)
            yield Fact("sensitivity", name, "Fig. 11", seconds, sims, _of("rollout_s"))


def scaling_sim(system: str, gpus: int, prompts: int) -> Sim:
    overrides = (f"cluster.gpus={gpus}", f"rollout.prompts_per_step={prompts}")
    return Sim("14b-16k", (*SYSTEMS[system], *overrides) if gpus > 32 else SYSTEMS[system])


def _scaling_facts() -> Iterable[Fact]:
    base = scaling_sim("verl", 32, 128)
    for gpus, published in SCALING.items():
        for system, throughput in zip(("verl", "rollpacker"), published, strict=True):
            if (gpus, system) == (32, "verl"):
                continue
            sims = (base, scaling_sim(system, gpus, 4 * gpus))
            name = f"{system}, {gpus} GPUs, over verl on 32"
            yield Fact("scaling", name, "Fig. 14", throughput, sims, _throughput(gpus / 32))


def _throughput(batch: float) -> Callable[[Sequence[Outcome]], float]:
    return lambda found: batch * _speedup(found)


def _code_facts() -> Iterable[Fact]:
    """14B on code alone, and how long its responses are."""
    verl, tail = (Sim("14b-16k", (*CODE_ONLY, *system)) for system in (VERL, TAIL_ONLY))
    sims = {"verl": verl, "tail batching": tail}
    for system, kind, what, seconds in HELD["code"]:
        name = f"14B code, {system}: {f'{kind} ' if kind else ''}{what}, s"
        needs = (sims[system],)
        yield Fact("code alone", name, "Fig. 4b", seconds, needs, _of(f"{what}_s", kind))
    for kind, quartile, own, base in HELD["quartiles"]:
        name = f"14B code, {kind} rounds' quartile {quartile} of length over verl's"
        yield Fact(
            *("lengths", name, "Fig. 4a", round(own / base, 3), (tail, verl)),
            _quartile(kind, quartile),
        )
    yield Fact(
        *("lengths", "14B code, short rounds, longest, tokens", "Fig. 4a", 2078),
        *((tail,), _of("max_response_tokens", "short")),
    )
    yield Fact(
        *("lengths", "14B code, verl, responses at the cap, %", "Fig. 2a, 4a", 0.62),
        *((verl,), _capped),
    )


def _quartile(kind: str, quartile: int) -> Callable[[Sequence[Outcome]], float]:
    def value(found: Sequence[Outcome]) -> float:
        own, base = found[0].trained[kind], found[1].trained["plain"]
        cuts = [statistics.quantiles(lengths, n=4)[quartile - 1] for lengths in (own, base)]
        return cuts[0] / cuts[1]

    return value


def _capped(found: Sequence[Outcome]) -> float:
    lengths = found[0].trained["plain"]
    return 100 * sum(tokens >= 16384 for tokens in lengths) / len(lengths)


def _rollout_32b_facts() -> Iterable[Fact]:
    verl, own = (Sim("32b-32k", system) for system in (VERL, ROLLPACKER))
    for name, sim, kind, seconds in (
        ("verl", verl, None, 567.4),
        ("rollpacker, short", own, "short", 75.4),
        ("rollpacker, long", own, "long", 574.3),
        ("rollpacker, mean", own, None, 175.2),
    ):
        yield Fact(
            *("32B rollout", f"32B rollout, {name}, s", "Fig. 10b", seconds, (sim,)),
            _of("rollout_s", kind),
        )
    yield Fact(
        *("32B rollout", "32B, short rounds, longest, tokens", "Fig. 10a", 1439, (own,)),
        _of("max_response_tokens", "short"),
    )


def _reward_and_stream_facts() -> Iterable[Fact]:
    on = Sim("7b-8k", (*CODE_ONLY, *ROLLPACKER, *NO_STREAM))
    off = Sim("7b-8k", (*on.overrides, *NO_TIMEOUT))
    for told, sim, kind, seconds in (
        *(("on", on, "short", 31.8), ("on", on, "long", 82.0)),
        *(("off", off, "short", 55.9), ("off", off, "long", 79.7)),
    ):
        name = f"7B code, adaptive timeout {told}, {kind}, s"
        yield Fact("adaptive timeout", name, "Fig. 13c", seconds, (sim,), _waited(kind))
    stream = Sim("7b-8k", (*MATH_ONLY, *ROLLPACKER))
    alone = Sim("7b-8k", (*stream.overrides, *NO_STREAM))
    for name, sim, seconds in (("without", alone, 124.2), ("with", stream, 115.2)):
        told = f"7B math, long step {name} stream trainer, s"
        yield Fact("stream trainer", told, "Table 3", seconds, (sim,), _of("total_s", "long"))


def facts() -> list[Fact]:
    return [
        *_mean_facts(),
        *_split_facts(),
        *_ablation_facts(),
        *_sensitivity_facts(),
        *_scaling_facts(),
        *_code_facts(),
        *_rollout_32b_facts(),
        *_reward_and_stream_facts(),
    ]


def unfitted_facts() -> list[Fact]:
    """What has no constant in the model, and counts, which must be exact."""
    own = (Sim("14b-16k", ROLLPACKER),)
    verl = {set_up: Sim(set_up, VERL) for set_up in SET_UPS}

    def period(found: Sequence[Outcome]) -> float:
        kinds = [step.kind for step in found[0].results[0].steps]
        longs = [place for place, kind in enumerate(kinds) if kind == "long"]
        (gap,) = {after - before for before, after in itertools.pairwise(longs)}
        return gap

    def extreme(choose: Callable[[Iterable[float]], float]) -> Callable[[Sequence[Outcome]], float]:
        return lambda found: choose(step.total_s for step in found[0].steps())

    def first(found: Sequence[Outcome]) -> float:
        return statistics.fmean(result.steps[0].total_s for result in found[0].results)

    def slower(found: Sequence[Outcome]) -> float:
        return found[0].mean("rollout_s") / found[1].mean("rollout_s")

    counts = [
        ("steps from one long round to the next", "section 3, Fig. 9", 5, period),
        ("samples trained in a short round", "section 3", 1024, _of("num_trained", "short")),
    ]
    return [
        *(Fact("counts", name, source, value, own, of) for name, source, value, of in counts),
        Fact("spread", "7B verl, fastest step, s", "Fig. 9", 175, (verl["7b-8k"],), extreme(min)),
        Fact("spread", "7B verl, slowest step, s", "Fig. 9", 348, (verl["7b-8k"],), extreme(max)),
        Fact("spread", "14B verl, first step, s", "Fig. 9", 504, (verl["14b-16k"],), first),
        *(
            Fact(
                group="release",
                name=f"{set_up}, rollout with a release over one without",
                source="section 4.4: at most",
                published=1.01,
                needs=(Sim(set_up, SYSTEMS["rlhfuse"]), sim),
                value=slower,
            )
            for set_up, sim in verl.items()
        ),
    ]


def sims_of(chosen: Iterable[Fact]) -> list[Sim]:
    return list(dict.fromkeys(sim for fact in chosen for sim in fact.needs))


def error_factor(errors: Iterable[float]) -> float:
    """By what factor one is off on average: 1.1 is 10 % too high or too low."""
    return math.exp(statistics.fmean(map(abs, errors)))


def by_group(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Error factor of every group of rows with `published` and `simulated`, and of all."""
    errors: dict[str, list[float]] = {}
    for row in rows:
        error = math.log(row["simulated"] / row["published"])
        errors.setdefault(row["group"], []).append(error)
    every = [error for group in errors.values() for error in group]
    return {g: round(error_factor(e), 3) for g, e in {**errors, "all": every}.items()}


def table(chosen: Iterable[Fact], outcomes: Outcomes) -> list[dict[str, Any]]:
    return [
        {
            **{"group": fact.group, "fact": fact.name, "source": fact.source},
            **{"published": fact.published, "simulated": float(f"{found:.4g}")},
        }
        for fact in chosen
        for found in [fact.simulated(outcomes)]
    ]


# -- beside the facts --------------------------------------------------------------------

SCALES = {"same batch": False, "batch grows with the GPUs": True}


def beside_sims() -> list[Sim]:
    systems = [*SYSTEMS.values(), *ADDED.values(), *LEFT_OUT.values(), (*VERL, *OVERLAP)]
    return [
        *(Sim(set_up, overrides) for set_up in SET_UPS for overrides in systems),
        *(
            scaling_sim(system, gpus, 4 * gpus if grown else 128)
            for grown in SCALES.values()
            for gpus in SCALING
            for system in SYSTEMS
        ),
    ]


def systems_told(outcomes: Outcomes) -> dict[str, Any]:
    """Every system and every part left out, with its cost, by set-up."""
    named = {**SYSTEMS, **ADDED, **LEFT_OUT, "verl + asynchronous rewards": (*VERL, *OVERLAP)}
    found: dict[str, Any] = {}
    for set_up in SET_UPS:
        rows = {name: outcomes[Sim(set_up, o)].told() for name, o in named.items()}
        for row in rows.values():
            row["speedup_over_verl"] = round(rows["verl"]["step_s"] / row["step_s"], 3)
        found[set_up] = rows
    return found


def splits(outcomes: Outcomes) -> dict[str, Any]:
    """Seconds of every stage, by set-up and system and kind of round."""
    stages = ("rollout_s", "reward_s", "train_s", "sync_s", "total_s")
    return {
        f"{set_up} {system}": {
            kind: {stage: round(found.mean(stage, kind), 2) for stage in stages}
            for kind in ("plain", "short", "long")
            if found.steps(kind)
        }
        for set_up in SET_UPS
        for system, overrides in SYSTEMS.items()
        for found in [outcomes[Sim(set_up, overrides)]]
    }


def scaling(outcomes: Outcomes) -> dict[str, list[dict[str, Any]]]:
    """Step seconds of all systems, 14B."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, grown in SCALES.items():
        for gpus in SCALING:
            prompts = 4 * gpus if grown else 128
            seconds = {
                system: round(outcomes[scaling_sim(system, gpus, prompts)].mean("total_s"), 1)
                for system in SYSTEMS
            }
            row = {"gpus": gpus, "prompts_per_step": prompts, **seconds}
            found.setdefault(name, []).append(row)
    return found


def main(jobs: int = 1) -> dict[str, Any]:
    fitted, others = facts(), unfitted_facts()
    with ProcessPoolExecutor(jobs) as pool:
        outcomes = run_all(pool, [*sims_of([*fitted, *others]), *beside_sims()], shipped())
    rows = table(fitted, outcomes)
    return {
        "seeds": list(SEEDS),
        **{"constants": shipped(), "facts": rows, "unfitted": table(others, outcomes)},
        **{"error_factors": by_group(rows), "systems": systems_told(outcomes)},
        **{"splits": splits(outcomes), "scaling": scaling(outcomes)},
    }


if __name__ == "__main__":
    bench(main)
