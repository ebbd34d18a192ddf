"""Sentences, printed below a table, on how far a simulation lies outside of what its constants were
fitted to. A scenario is compared with the set-ups of the calibration; a recorded run's simulation
is compared with the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollpacker.config.schema import RunConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.sim.hardware import GPUS, GpuSpec
from rollpacker.sim.latency import Calibration
from rollpacker.sim.presets import LENGTH_LAWS
from rollpacker.sim.result import SystemResult
from rollpacker.sim.scenario import CarrySpec, Scenario
from rollpacker.sim.simulate import machine_of
from rollpacker.sim.whatif import RunModel

FITTED = "Qwen2.5 of 7B, 14B and 32B, 16 to 128 H800s, caps of 8k to 32k"
FITTED_PARAMS = (7.6e9, 14.8e9, 32.8e9)
PARAMS_SLACK = 0.1
"""Share by which a model's number of parameters may differ from that of a fitted model."""
FITTED_NUM_GPUS = (16, 128)
FITTED_CAPS = (8 * 1024, 32 * 1024)
OUR_PRESET = "rollpacker"
OUTSIDE_STEPS = 20
"""Steps for which a plan's best setting is simulated, to name what the run did not measure."""
LEAST = 0.005
"""A simulation with more tokens in a step than any measured step has is said to be outside of the
measured range if training on the surplus takes at least this share of a step's time."""


def outside_of_scenario(scenario: Scenario, *, step_s: float, whose: str, given: str = "") -> str:
    """Returns sentences to print below a scenario's table: what lies outside of the fitted range,
    and how many of a step's `step_s` seconds come from power laws of the parameters, where the file
    gives no measured constants. `whose` names that step in the text. `given`, which comes first, is
    a sentence on constants that the file gives, or empty."""
    places = [*_places(scenario)]
    if places:
        where = f"Outside of what the constants were fitted to ({FITTED}): {', '.join(places)}."
    else:
        where = (
            f"Model, GPUs and cap are inside of what the constants were fitted to ({FITTED}); how "
            "far off the fit is there is told in docs/simulation.md."
        )
    latency = machine_of(scenario, Calibration()).latency
    laws = {}
    if scenario.train.fixed_s is None:
        laws["train.fixed_s"] = latency.train_fixed_s
    if scenario.sync_s is None:
        laws["sync_s"] = latency.sync_s
    extrapolated = ""
    if laws:
        listed = " and ".join(f"{_s(seconds)} of {key}" for key, seconds in laws.items())
        extrapolated = (
            f"{_s(sum(laws.values()))} of the {_s(step_s)} of {whose} come from power laws of the "
            f"parameters, whatever the number of GPUs: {listed}."
        )
    return " ".join(filter(None, (given, where, extrapolated)))


def _places(scenario: Scenario) -> Iterator[str]:
    """Yields a few words on each part of the scenario that the constants were not fitted to."""
    shape, cluster = scenario.shape, scenario.cluster
    cap = scenario.rollout.max_response_tokens
    if not any(abs(shape.params / params - 1) <= PARAMS_SLACK for params in FITTED_PARAMS):
        name = scenario.model if isinstance(scenario.model, str) else "a model of its own"
        yield f"{name} with {shape.params / 1e9:.1f}e9 parameters"
    elif isinstance(scenario.model, str) and not scenario.model.startswith("qwen2.5"):
        yield f"{scenario.model}, a size that was fitted in another shape"
    if not _is_fitted(cluster.gpu_spec):
        yield f"the GPU ({cluster.gpu if isinstance(cluster.gpu, str) else 'its own'})"
    elif not _is_fitted(cluster.trainer_gpu_spec):
        own = cluster.train_gpu if isinstance(cluster.train_gpu, str) else "its own"
        yield f"the trainer's GPU ({own})"
    for gpus in dict.fromkeys((cluster.gpus, cluster.trainer_gpus)):
        if not FITTED_NUM_GPUS[0] <= gpus <= FITTED_NUM_GPUS[1]:
            yield f"{gpus} GPUs"
    if not FITTED_CAPS[0] <= cap <= FITTED_CAPS[1]:
        yield f"a cap of {cap:,} tokens"
    presets = {scenario.law_of(stage).preset for stage in scenario.stages} - {None}
    known = max((max(LENGTH_LAWS[name].values()) for name in presets if name), default=cap)
    if cap > known:
        yield f"lengths, of which the presets know nothing beyond {known:,} tokens"


def _is_fitted(gpu: GpuSpec) -> bool:
    fitted = GPUS["h800"]
    return (gpu.bandwidth_tb_s, gpu.tflops) == (fitted.bandwidth_tb_s, fitted.tflops)


def assumed(scenarios: Mapping[str, Scenario], results: Mapping[str, SystemResult]) -> str:
    """Returns sentences to print below a table of simulated systems, by name in `scenarios` and
    `results`, on what was assumed and never fitted. Empty: nothing was."""
    told = []
    carrying = [
        name
        for name, one in scenarios.items()
        if one.tail_batching.carries and one.carry == CarrySpec()
    ]
    if carrying:
        told.append(
            f"Of {' and '.join(carrying)} it is assumed that no carried token changes under newer "
            "weights (carry.mismatch=0), which was never fitted: set what a run of yours measured "
            "(carry/mismatch_per_token)."
        )
    tail = scenarios[OUR_PRESET].tail_batching if OUR_PRESET in scenarios else None
    if tail is not None and tail.enabled and not tail.chooses:
        ours, default = (
            f"a {one.stragglers} at factor {one.factors.prompts:g}"
            for one in (tail, TailBatchingConfig())
        )
        if ours != default:
            told.append(
                f"{OUR_PRESET} is {ours} here; rollpacker train takes {default} by default."
            )
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


def outside_of_run(model: RunModel, config: RunConfig, predicted: SystemResult) -> str:
    """Returns sentences to print below a table, on what a recorded run did not measure. `model` was
    fitted to the run; `config` was simulated with `model`, with the result `predicted`."""
    told = "; ".join(_beyond_the_run(model, config, predicted))
    if told:
        text = f"Outside of what the run measured: {told}."
    else:
        text = "Nothing simulated here lies outside of what the run measured on its machine."
    if model.fitted.drafted:
        text += (
            " Its engine drafted, so that the seconds of a token are averages over its own rounds: "
            f"{_s(predicted.mean['rollout_s'])} of a step hang on drafts coming true as often."
        )
    return text


def _beyond_the_run(model: RunModel, config: RunConfig, predicted: SystemResult) -> Iterator[str]:
    """Yields a few words on each part of the simulation of `config` that the recorded run, to which
    `model` was fitted, did not measure."""
    own = model.config
    engines, before = config.rollout.engines, own.rollout.engines
    if engines != before:
        yield (
            f"{engines} engine{'s' * (engines > 1)}, {before} measured (each is taken to be as "
            "fast as one was there, on a device of its own)"
        )
    at_once, before = _most_at_once(config), _most_at_once(own)
    if at_once > before:
        yield (
            f"{at_once} samples decoded at once, {before} were measured (a decode step is taken "
            "to go on as a straight line)"
        )
    most = max(step.tokens_trained for step in model.measured().steps)
    beyond = sum(max(0, step.tokens_trained - most) for step in predicted.steps)
    more_s = model.fitted.train.per_token_s * beyond / len(predicted.steps)
    if more_s > LEAST * predicted.mean["total_s"]:
        yield f"steps of more than the {most:,} trained tokens ({_s(more_s)} of a step on average)"
    samples, before = _launched(config)[1], _launched(own)[1]
    if samples > before:
        yield (
            f"{samples} responses of a prompt, {before} were recorded (the others' lengths are "
            "draws from what prompts like it showed)"
        )
    if config.tail_batching.carries and not own.tail_batching.carries:
        yield (
            "tokens are carried, which the run did not do (mismatches are taken as "
            f"{model.mismatch:g} per token and update)"
        )
    if config.stream_trainer.enabled and not own.stream_trainer.enabled:
        yield (
            "gradients before the round's end, which the run did not take (each batch of them is "
            f"taken to cost its tokens only: the fixed {_s(model.fitted.train.fixed_s)} come once "
            "a step)"
        )


def _launched(config: RunConfig) -> tuple[int, int]:
    """Number of prompts that a round of generation launches, and of samples of each prompt."""
    prompts, samples = config.rollout.prompts_per_step, config.rollout.samples_per_prompt
    factors = config.tail_batching.factors
    if not config.tail_batching.enabled:
        return prompts, samples
    return factors.num_prompts(prompts), factors.num_samples(samples)


def _most_at_once(config: RunConfig) -> int:
    """Most samples that one engine decodes at once, if all engines have equal shares of a round."""
    prompts, samples = _launched(config)
    launched = -(-prompts * samples // config.rollout.engines)
    return min(launched, config.rollout.engine.max_slots or launched)


def _s(seconds: float) -> str:
    digits = 1 if seconds >= 10 else 2 if seconds >= 1 else 3
    return f"{seconds:,.{digits}f} s"
