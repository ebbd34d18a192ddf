"""What of a simulation lies outside of what its constants were fitted to, and what hangs on it.

A sentence or two for below a table. A scenario is compared with the set-ups of the calibration, a
recorded run's simulation with the run. Of a constant that is extrapolated the seconds of a step
that are it are named, or what a quarter more of it would add to the table's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.hardware import GPUS, GpuSpec
from rollpacker.sim.latency import Calibration, DatasheetModel
from rollpacker.sim.presets import LENGTH_LAWS
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import CarrySpec, Scenario
from rollpacker.sim.simulate import machine_of, simulate
from rollpacker.sim.whatif import RunModel

FITTED = "Qwen2.5 of 7B, 14B and 32B, 16 to 128 H800s, caps of 8k to 32k"
FITTED_PARAMS = (7.6e9, 14.8e9, 32.8e9)
PARAMS_SLACK = 0.1
"""A model this near to one of them is one of its size."""
FITTED_GPU = GPUS["h800"]
FITTED_NUM_GPUS = (16, 128)
FITTED_CAPS = (8 * 1024, 32 * 1024)
QUARTER = 1.25
SENSITIVITY_STEPS = 16
"""Steps that are simulated to see by which share a constant moves a step."""
SLOWER = {
    "launch_layer_s": QUARTER,
    "per_sequence_s": QUARTER,
    "bandwidth_share": 1 / QUARTER,
    "train_utilization": 1 / QUARTER,
}
"""Constants of a machine that nobody measured, and by what each makes it a quarter slower."""
OUTSIDE_STEPS = 20
"""Of a plan's best setting, simulated once more for its sentence."""
ASSUMED_MISMATCH = 1e-3
"""Per token and update: of a policy that learns fast."""
CARRY = CarrySpec()
OUR_PRESET = "rollpacker"
LEAST = 0.005
"""Of a step: what moves less is not named."""


def outside_of_scenario(
    scenario: Scenario, *, step_s: float | None = None, whose: str = "a step", given: str = ""
) -> str:
    """For below the table of a scenario: `step_s` are the seconds of `whose` step there, which what
    is said holds of (None: as they are simulated here). `given`: what became of constants that the
    scenario's file gives for another model (`sim.given_constants`)."""
    places, laws = _places(scenario), _power_laws(scenario)
    if step_s is None and (places or laws):
        step_s = _step_s(scenario, Calibration())
    told = list(filter(None, [given]))
    if not places:
        told.append(
            f"Model, GPUs and cap are inside of what the constants were fitted to ({FITTED}); how "
            "far off the fit is there is told in docs/simulation.md."
        )
        if laws:
            assert step_s is not None
            told.append(
                f"{_s(sum(laws.values()))} of the {_s(step_s)} of {whose} come from power laws of "
                f"the parameters, whatever the number of GPUs: {_listed(laws)}. At the three "
                "models that of the weight sync is off by up to 20 %, the other one by 1 %."
            )
        return " ".join(told)
    assert step_s is not None
    told.append(f"Outside of what the constants were fitted to ({FITTED}): {', '.join(places)}.")
    if laws:
        told.append(
            f"{_s(sum(laws.values()))} of the {_s(step_s)} of {whose} are extrapolated by power "
            f"laws of the parameters, whatever the number of GPUs: {_listed(laws)}."
        )
    moved = _moved(scenario)
    if moved:
        worse = ", ".join(f"{_s(share * step_s)} ({share:+.0%}, {key})" for share, key in moved)
        told.append(
            f"Were one constant a quarter worse, {whose} of {_s(step_s)} would take longer by "
            f"{worse}."
        )
    return " ".join([*told, *_beyond_the_lengths(scenario)])


def assumed(scenarios: Mapping[str, Scenario], results: Mapping[str, SystemResult]) -> str:
    """For below the table of these systems: what of it nobody fitted, whatever the machine."""
    told = [*_carried(scenarios), *_preset(scenarios)]
    for name, result in results.items():
        num = sum(step.preemptions for step in result.steps)
        if num:
            least = min(step.tensor_parallel for step in result.steps)
            told.append(
                f"{num:,} preemptions of {name} are outside of what was fitted, where there were "
                f"none: fix the degree with rollout.tensor_parallel above {least} and "
                "parallelism_planner.enabled=false."
            )
    return " ".join(told)


def _carried(scenarios: Mapping[str, Scenario]) -> list[str]:
    names = [
        name for name, one in scenarios.items() if one.tail_batching.carries and one.carry == CARRY
    ]
    if not names:
        return []
    return [
        f"Of {' and '.join(names)} it is assumed that no carried token changes under newer weights "
        "(carry.mismatch=0), which was never fitted: set what a run of yours measured "
        "(carry/mismatch_per_token)."
    ]


def _preset(scenarios: Mapping[str, Scenario]) -> list[str]:
    """Where the preset of our name is not what a run does that sets nothing."""
    name, default = OUR_PRESET, TailBatchingConfig()
    tail = None if name not in scenarios else scenarios[name].tail_batching
    if tail is None or not tail.enabled or tail.chooses:
        return []
    ours, theirs = (f"a {t.stragglers} at factor {t.factors.prompts:g}" for t in (tail, default))
    if ours == theirs:
        return []
    return [f"{name} is {ours} here; rollpacker train takes {theirs} by default."]


def _places(scenario: Scenario) -> list[str]:
    shape, cluster = scenario.shape, scenario.cluster
    cap = scenario.rollout.max_response_tokens
    found = []
    if not any(abs(shape.params / params - 1) <= PARAMS_SLACK for params in FITTED_PARAMS):
        name = scenario.model if isinstance(scenario.model, str) else "a model of its own"
        found.append(f"{name} with {shape.params / 1e9:.1f}e9 parameters")
    elif isinstance(scenario.model, str) and not scenario.model.startswith("qwen2.5"):
        found.append(f"{scenario.model}, a size that was fitted in another shape")
    if not _is_fitted(cluster.gpu_spec):
        found.append(f"the GPU ({cluster.gpu if isinstance(cluster.gpu, str) else 'its own'})")
    elif not _is_fitted(cluster.trainer_gpu_spec):
        own = cluster.train_gpu if isinstance(cluster.train_gpu, str) else "its own"
        found.append(f"the trainer's GPU ({own})")
    for gpus in dict.fromkeys((cluster.gpus, cluster.trainer_gpus)):
        if not FITTED_NUM_GPUS[0] <= gpus <= FITTED_NUM_GPUS[1]:
            found.append(f"{gpus} GPUs")
    if not FITTED_CAPS[0] <= cap <= FITTED_CAPS[1]:
        found.append(f"a cap of {cap:,} tokens")
    return found


def _is_fitted(gpu: GpuSpec) -> bool:
    return (gpu.bandwidth_tb_s, gpu.tflops) == (FITTED_GPU.bandwidth_tb_s, FITTED_GPU.tflops)


def _power_laws(scenario: Scenario) -> dict[str, float]:
    """Constants that come from a power law of the parameters, with their seconds of a step."""
    latency = machine_of(scenario, Calibration()).latency
    found = {}
    if scenario.train.fixed_s is None:
        found["train.fixed_s"] = latency.train_fixed_s
    if scenario.sync_s is None:
        found["sync_s"] = latency.sync_s
    return found


def _listed(laws: Mapping[str, float]) -> str:
    return " and ".join(f"{_s(seconds)} of {key}" for key, seconds in laws.items())


def _moved(scenario: Scenario) -> list[tuple[float, str]]:
    """The constants that matter, by what a quarter worse of each adds to a step, as a share."""
    base = _step_s(scenario, Calibration())
    found = []
    for name, factor in SLOWER.items():
        constant = min(1.0, getattr(Calibration(), name) * factor)
        found.append((_step_s(scenario, replace(Calibration(), **{name: constant})), name))
    found += [(_step_s(other, Calibration()), key) for key, other in _slower(scenario)]
    shares = [(seconds / base - 1, key) for seconds, key in found]
    return sorted((found for found in shares if found[0] > LEAST), reverse=True)


def _slower(scenario: Scenario) -> Iterator[tuple[str, Scenario]]:
    """The scenario with one of its own constants a quarter worse, whether it is written in its file
    or comes from a law or a preset."""
    latency = machine_of(scenario, Calibration()).latency
    fixed_s, sync_s = latency.train_fixed_s * QUARTER, latency.sync_s * QUARTER
    yield "train.fixed_s", replace(scenario, train=replace(scenario.train, fixed_s=fixed_s))
    yield "sync_s", replace(scenario, sync_s=sync_s)
    for index, stage in enumerate(scenario.rewards):
        law = stage.seconds_law
        if law is None:
            continue
        if stage.kind == "judge":
            key, slower = "calls_per_s", replace(stage, calls_per_s=1 / (law[0.5] * QUARTER))
        else:
            quantiles = {q: seconds * QUARTER for q, seconds in law.items()}
            key, slower = "seconds_quantiles", replace(stage, seconds_quantiles=quantiles)
        rewards = (*scenario.rewards[:index], slower, *scenario.rewards[index + 1 :])
        yield f"{key} of {stage.kind}", replace(scenario, rewards=rewards)


def _step_s(scenario: Scenario, calibration: Calibration) -> float:
    """Mean seconds of the later half of a few steps: in the first ones the pool still fills."""
    steps = min(scenario.steps, SENSITIVITY_STEPS)
    found = simulate(replace(scenario, steps=steps), calibration=calibration).steps[steps // 2 :]
    return sum(step.total_s for step in found) / len(found)


def _beyond_the_lengths(scenario: Scenario) -> list[str]:
    """Length presets end where the figure that they are read off ends, doubled once."""
    cap = scenario.rollout.max_response_tokens
    laws = [scenario.law_of(stage) for stage in scenario.stages]
    presets = {law.preset for law in laws if law.preset is not None}
    known = max((max(LENGTH_LAWS[name].values()) for name in presets), default=cap)
    if cap <= known:
        return []
    latency = machine_of(scenario, Calibration()).latency
    assert isinstance(latency, DatasheetModel)
    cost = latency.step_cost(scenario.rollout.tensor_parallel)
    more_s = (cap - known) * cost.step_s(1, known)
    return [
        f"The length presets know nothing beyond {known:,} tokens: a response that went on to the "
        f"cap would make a round that awaits it up to {_s(more_s)} longer."
    ]


# -- a recorded run ----------------------------------------------------------------


def outside_of_run(model: RunModel, config: RunConfig, predicted: SystemResult) -> str:
    """For below the table of a run's simulation: `config` is what was simulated, with what
    outcome."""
    told = [
        *_other_engines(model, config),
        *_more_at_once(model, config, predicted),
        *_more_trained(model, predicted),
        *_more_responses(model, config),
        *_other_carrying(model, config, predicted),
        *_streams_anew(model, config),
    ]
    drafted = (
        "Its engine drafted, so that the seconds of a token are averages over its own rounds: "
        f"{_s(predicted.mean['rollout_s'])} of a step hang on drafts coming true as often."
        if model.fitted.drafted
        else ""
    )
    if told:
        text = f"Outside of what the run measured: {'; '.join(told)}."
    else:
        text = "Nothing simulated here lies outside of what the run measured on its machine."
    return " ".join(filter(None, (text, drafted)))


def _other_engines(model: RunModel, config: RunConfig) -> Sequence[str]:
    before, now = model.config.rollout.engines, config.rollout.engines
    if now == before:
        return []
    return [
        f"{_engines(now)}, {_engines(before)} measured (each is taken to be as fast "
        "as one was there, on a device of its own)"
    ]


def _engines(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'}"


def _most_at_once(config: RunConfig) -> int:
    """Samples that an engine decodes at once, at most, where each has its share."""
    rollout = config.rollout
    prompts, samples = rollout.prompts_per_step, rollout.samples_per_prompt
    tail = config.tail_batching
    if tail.enabled:
        prompts = tail.factors.num_prompts(prompts)
        samples = tail.factors.num_samples(samples)
    launched = -(-prompts * samples // rollout.engines)
    slots = rollout.engine.max_slots
    return launched if slots is None else min(slots, launched)


def _more_at_once(model: RunModel, config: RunConfig, predicted: SystemResult) -> Sequence[str]:
    before, now = _most_at_once(model.config), _most_at_once(config)
    if now <= before:
        return []
    cost = model.latency().step_cost(1)
    share = 1 - cost.step_s(before, 0) / cost.step_s(now, 0)
    hang = f"up to {_s(share * predicted.mean['rollout_s'])} of a step hang on that"
    return [
        f"{now} samples decoded at once, {before} were measured (a decode step is taken to go on "
        f"as a straight line{f': {hang}' if share > LEAST else ', which is flat there'})"
    ]


def _more_trained(model: RunModel, predicted: SystemResult) -> Sequence[str]:
    most = max(step.tokens_trained for step in model.measured().steps)
    beyond = [max(0, step.tokens_trained - most) for step in predicted.steps]
    more_s = model.fitted.train.per_token_s * sum(beyond) / len(beyond)
    if more_s <= LEAST * predicted.mean["total_s"]:
        return []
    return [f"steps of more than the {most:,} trained tokens ({_s(more_s)} of a step on average)"]


def _more_responses(model: RunModel, config: RunConfig) -> Sequence[str]:
    before, now = (
        c.tail_batching.factors.num_samples(c.rollout.samples_per_prompt)
        if c.tail_batching.enabled
        else c.rollout.samples_per_prompt
        for c in (model.config, config)
    )
    if now <= before:
        return []
    return [
        f"{now} responses of a prompt, {before} were recorded (the others' lengths are draws from "
        "what prompts like it showed)"
    ]


def _other_carrying(model: RunModel, config: RunConfig, predicted: SystemResult) -> Sequence[str]:
    if not config.tail_batching.carries or model.config.tail_batching.carries:
        return []
    steps = min(SENSITIVITY_STEPS, len(predicted.steps))
    one, other = (
        model.simulate_config(config, steps=steps, mismatch=rate).mean["total_s"]
        for rate in (model.mismatch, ASSUMED_MISMATCH)
    )
    return [
        "tokens are carried, which the run did not do (mismatches are taken as "
        f"{model.mismatch:g} per token and update; at {ASSUMED_MISMATCH:g} a step would take "
        f"{_s(other - one, sign=True)})"
    ]


def _streams_anew(model: RunModel, config: RunConfig) -> Sequence[str]:
    if not config.stream_trainer.enabled or model.config.stream_trainer.enabled:
        return []
    hidden_s = model.fitted.train.fixed_s
    return [
        "gradients before the round's end, which the run did not take (each batch of them is "
        f"taken to cost its tokens only: the fixed {_s(hidden_s)} come once a step)"
    ]


def _s(seconds: float, *, sign: bool = False) -> str:
    digits = 1 if abs(seconds) >= 10 else 2 if abs(seconds) >= 1 else 3
    return f"{seconds:{'+' if sign else ''},.{digits}f} s"
