"""Simulates a recorded run, with its lengths and timings, under other settings.

The event log of a run says how long every response was and what the machine took for it
(`report.fit`). That is all a simulation needs: no datasheet, no assumed lengths. The run's own
settings are simulated too, so that a user sees how well the fit does on what is known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rollpacker.config.document import ConfigError
from rollpacker.config.load import differences, load_config, to_plain
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.core.job.config import JobConfig
from rollpacker.core.lengths.counts import PromptLengths
from rollpacker.core.lengths.fit import choose_length_model
from rollpacker.core.lengths.model import LengthModel
from rollpacker.core.portable import dot, exps, logs, total
from rollpacker.core.records import LogError
from rollpacker.report.accounting import Accounting
from rollpacker.report.carrying import add_up, step_carrying
from rollpacker.report.fit import fit_run
from rollpacker.report.fitted_run import FittedRun
from rollpacker.report.history import iterate_steps
from rollpacker.report.log import EventLog, events_path
from rollpacker.report.step_summary import StepSummary
from rollpacker.sim.latency import MeasuredModel, StepCost
from rollpacker.sim.machine import Machine
from rollpacker.sim.recorded_checks import RecordedChecks
from rollpacker.sim.result import BUBBLE_CAUSES, StepResult, SystemResult
from rollpacker.sim.simulation import Simulation
from rollpacker.sim.workload import Workload

CONFIG_FILE = "config.yaml"
MODELLED = (
    *("rollout.prompts_per_step", "rollout.samples_per_prompt", "rollout.max_response_tokens"),
    *("rollout.engine.max_slots", "rollout.engines", "rollout.routing"),
    *("tail_batching", "stream_trainer", "train.steps"),
)
"""Keys of a run's config that may be changed in a simulation, which takes account of them."""
COLOCATED = ("train.colocate", "train.processes", "train.replicas")
"""Further keys that may be changed in a simulation if engines and the trainer share devices."""
SHORTEST_STEP_S = 1e-6
NUM_AGAIN = 64
"""Number of response lengths that are drawn for every row of the data, besides its recorded ones,
since a simulation may need more responses than the run had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A recorded run, and its simulations with the same and with other settings."""

    measured: SystemResult
    """Measured result of the recorded run itself."""
    predicted_same: SystemResult
    """Result of simulating the run's own settings, to see how close the fit is to `measured`."""
    predicted: SystemResult
    """Result of a simulation of the run with the overrides."""
    fit_text: str
    """Table of the constants that were fitted to the run."""
    model: RunModel
    """The recorded run with its fitted constants, from which the simulations were made."""
    config: RunConfig
    """The run's config, changed by the overrides."""
    scenario: Mapping[str, Any]
    """`config` as plain values (dicts and lists)."""


@dataclass(frozen=True)
class RunModel:
    """A recorded run with its config and fitted constants, which can be simulated and pickled."""

    folder: Path
    config: RunConfig
    fitted: FittedRun

    def with_overrides(self, overrides: Sequence[str]) -> RunConfig:
        """The run's config, changed by these overrides. Raises `ConfigError` for a key that a
        simulation does not take account of, and for a higher cap of tokens than the run's."""
        config = load_config(self.folder / CONFIG_FILE, overrides, RunConfig)
        modelled = MODELLED + (COLOCATED if config.train.colocate else ())
        for key, _, _ in differences(to_plain(self.config), to_plain(config)):
            if not any(key == known or key.startswith(f"{known}.") for known in modelled):
                raise ConfigError(
                    f"{key} changes nothing that is simulated. What can be changed here: "
                    f"{', '.join(modelled)}"
                )
        cap = self.fitted.workload.max_response_tokens
        if cap is not None and config.rollout.max_response_tokens > cap:
            raise ConfigError(
                f"rollout.max_response_tokens is {config.rollout.max_response_tokens}, but the run "
                f"cut responses at {cap} tokens: how long those would have become is not known. "
                f"Take {cap} or less, or record a run with a higher cap"
            )
        return config

    def simulate(
        self,
        overrides: Sequence[str] = (),
        *,
        steps: int | None = None,
        seed: int = 0,
    ) -> SystemResult:
        """Simulate `steps` steps (None: as many as the run had) of the run with these overrides."""
        return self.simulate_config(self.with_overrides(overrides), steps=steps, seed=seed)

    def simulate_config(
        self,
        config: RunConfig,
        *,
        steps: int | None = None,
        seed: int = 0,
        mismatch: float | None = None,
        in_order: bool = False,
        every: int = 1,
    ) -> SystemResult:
        """Simulate `steps` steps (None: as many as the run had) with this config. With seed 0 or
        `in_order`, prompts come in the recorded order; else in a random one, so that a few steps
        are typical of the whole run. `every`: use only each `every`-th row of the data. `mismatch`:
        chance per token and weight update that a token of a deferred response comes out
        differently; None: the run's own."""
        rollout = config.rollout
        in_order = in_order or not seed
        rows = list(self._pools)[::every]
        if not in_order:
            np.random.Generator(np.random.Philox(seed)).shuffle(rows)
        pools = {row: self._pools[row] for row in rows}
        workload = Workload.from_pools(
            pools,
            max_response_tokens=rollout.max_response_tokens,
            samples_per_prompt=rollout.samples_per_prompt,
            source=self.fitted.workload.source,
            seed=seed,
        )
        kinds = self._kinds
        job = replace(config.job(reward_kinds=kinds), max_steps=None)
        checks = RecordedChecks(
            self.fitted.checks,
            None if self.fitted.workload.source in kinds else self.fitted.calls,
            warm=not in_order,
        )
        slots = rollout.engine.max_slots
        # Each engine has a device like one of the run's; the trainer has one of them, or all.
        latency, engines = self.latency(), rollout.engines
        was_shared = self.config.rollout.engines if self.config.train.colocate else 1
        in_turn = was_shared if config.train.colocate else engines
        machine = Machine(
            latency=replace(latency, train_token_s=latency.train_token_s * in_turn),
            gpus=engines,
            prompt_tokens=0,
            max_running=self.fitted.slots if slots is None else slots,
            checks=checks,
            mismatch=self.mismatch if mismatch is None else mismatch,
            migration_s=0.0,
        )
        return Simulation(job, machine, workload).run(steps or self.fitted.num_steps)

    def measured(self) -> SystemResult:
        """Returns the recorded run's measured result, in the form of a simulated one."""
        accounting, engines = Accounting(), self.config.rollout.engines
        steps: list[StepResult] = []
        trained: list[int] = []
        for entry in EventLog(events_path(self.folder)):
            step = accounting.history.step
            summary = accounting.feed(entry)
            if summary is not None and summary.samples.trained:
                steps.append(_step_result(summary))
                trained += [sample.num_tokens for sample in step.trained_samples()]
        own = np.concatenate([np.asarray(pool) for pool in self._pools.values()])
        p95 = float(np.quantile(own, 0.95))
        bubble = dict.fromkeys(BUBBLE_CAUSES, 0.0)
        seconds = accounting.seconds()
        bubble |= {
            "tail": engines * (seconds["tail_idle"] + seconds["imbalance"]),
            "reward_wait": engines * seconds["reward_wait"],
            "sync": engines * seconds["sync"],
        }
        return SystemResult(
            steps=tuple(steps),
            tokens_generated=sum(step.tokens_generated for step in steps),
            tokens_trained=sum(step.tokens_trained for step in steps),
            trained_length_mean=float(np.mean(trained)),
            policy_length_mean=float(own.mean()),
            policy_length_p95=p95,
            tail_trained_share=float(np.mean(np.asarray(trained) > p95)),
            bubble=bubble,
            device_seconds=engines * sum(step.total_s for step in steps),
            num_releases=0,
        )

    @cached_property
    def mismatch(self) -> float:
        """Chance per token and weight update that a token kept from an earlier launch came out
        differently in this run; 0 if no tokens were kept."""
        return add_up(
            map(step_carrying, iterate_steps(EventLog(events_path(self.folder))))
        ).mismatch_per_update

    @cached_property
    def capped_share(self) -> float:
        """Share of recorded responses that ran to the cap of tokens, aborted ones not counted."""
        pools = self.fitted.workload.pools.values()
        lengths = [tokens for pool in pools for tokens in pool]
        cap = self.config.rollout.max_response_tokens
        return sum(tokens >= cap for tokens in lengths) / len(lengths) if lengths else 0.0

    @property
    def _kinds(self) -> Mapping[str, RewardKindConfig]:
        """Mapping from each source of prompts to the workers and the deadline of its checks in the
        run. Empty: the run's log does not tell them."""
        job = self.fitted.job
        return JobConfig.from_plain(job).rewards.kinds if "rewards" in job else {}

    def latency(self) -> MeasuredModel:
        """Times of the machine of the run, as fitted to its event log."""
        fitted, step = self.fitted, self.fitted.step
        return MeasuredModel(
            step=StepCost(
                launch_s=step.launch_s,
                bytes_s=step.bytes_s,
                per_cached_token_s=step.per_cached_token_s,
                per_sequence_s=step.per_sequence_s,
                knots=tuple((n, max(s, SHORTEST_STEP_S)) for n, s in step.knots),
            ),
            prefill_sample_s=step.per_admitted_s,
            prefill_token_s=step.per_sequence_s,  # at most what a token of a decode step costs
            train_fixed_s=fitted.train.fixed_s,
            train_token_s=fitted.train.per_token_s,
            sync_s=fitted.sync_s,
            stop_s=fitted.stop_s,
            commit_s=fitted.between_s + fitted.commit_s,
        )

    @cached_property
    def _pools(self) -> Mapping[int, tuple[int, ...]]:
        """Mapping from each row of the data to lengths of responses: the recorded ones (none if the
        run aborted any response), then `NUM_AGAIN` drawn ones. Long recorded lengths are partly
        luck, so the further ones are drawn from a fitted class of similar prompts."""
        work = self.fitted.workload
        recorded = [
            PromptLengths(finished=work.pools.get(row, ()), stopped=work.stopped.get(row, ()))
            for row in work.rows
        ]
        model = choose_length_model(recorded, cap=self.config.rollout.max_response_tokens)
        rng = np.random.Generator(np.random.Philox(0))
        more = _again(model, recorded, rng)
        any_stopped = any(prompt.stopped for prompt in recorded)
        return {
            row: tuple(lengths) if any_stopped else (*prompt.finished, *lengths)
            for row, prompt, lengths in zip(work.rows, recorded, more, strict=True)
        }


def _again(
    model: LengthModel, prompts: Sequence[PromptLengths], rng: np.random.Generator
) -> list[list[int]]:
    """Draws `NUM_AGAIN` further response lengths for each of the prompts, from one of the classes
    of prompts of `model`, chosen by chance after the prompt's recorded lengths."""
    tiny = 1e-300
    densities = model.class_densities
    # A stopped response ends beyond the bin in which it was stopped, or in the half of it ahead.
    survival = np.cumsum(densities[:, ::-1], axis=1)[:, ::-1] - densities / 2
    log_density, log_survival = logs(densities + tiny), logs(survival + tiny)
    cumulative = np.cumsum(densities, axis=1)
    cumulative /= cumulative[:, -1:]
    edges = np.append(model.starts, model.cap + 1)
    again = []
    for prompt in prompts:
        log_odds = logs(model.class_weights + tiny)
        log_odds = log_odds + dot(log_density, model.counts(prompt.finished))
        log_odds += dot(log_survival, model.counts(prompt.stopped))
        odds = exps(log_odds - log_odds.max())
        chosen = rng.choice(odds.size, p=odds / total(odds))
        bins = np.searchsorted(cumulative[chosen], rng.random(NUM_AGAIN), side="right")
        inside = rng.random(NUM_AGAIN) * (edges[bins + 1] - edges[bins])
        again.append((edges[bins] + inside.astype(np.int64)).tolist())
    return again


def _step_result(step: StepSummary) -> StepResult:
    seconds = step.seconds
    return StepResult(
        kind=str(step.kind),
        rollout_s=step.rollout_s,
        reward_s=seconds["reward_wait"],
        train_s=seconds["training"],
        sync_s=seconds["sync"] + seconds["checkpoint"] + seconds["controller"],
        total_s=step.step_s,
        tensor_parallel=1,
        preemptions=0,
        max_response_tokens=step.lengths.trained.max if step.lengths.trained else 0,
        tokens_generated=step.tokens.generated,
        tokens_trained=step.tokens.trained,
        num_trained=step.samples.trained,
        num_streamed=0,
    )


def load_run(run: str | Path) -> RunModel:
    """Read a run's folder and fit the simulator's constants to its event log. Raises `ValueError`
    (or its subclass `LogError` or `ConfigError`) that says what is missing, and what can be used.
    """
    if Path(run).name == CONFIG_FILE:
        raise ValueError(f"{run} is a run's config: give its folder, {Path(run).parent}")
    path = events_path(run)
    folder = path.parent
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(f"{folder} holds no {CONFIG_FILE}: give the whole folder of a run")
    config = load_config(folder / CONFIG_FILE, [], RunConfig)
    if config.parallelism_planner.of_several:
        raise ValueError(
            f"{folder} had engines of several devices each (parallelism_planner), and a machine is "
            "fitted to engines of one: record a run without that"
        )
    try:
        fitted = fit_run(EventLog(path), may_draft=config.rollout.engine.draft_tokens > 0)
    except LogError:
        raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return RunModel(folder=folder, config=config, fitted=fitted)


def asked_steps(model: RunModel, config: RunConfig) -> int | None:
    """Number of steps to simulate: `train.steps` of the config if it differs from the run's. None:
    as many steps as the run had, which may have been stopped before its end."""
    return None if config.train.steps == model.config.train.steps else config.train.steps


def what_if(run: str | Path, overrides: Sequence[str] = ()) -> WhatIf:
    """Returns a recorded run's measured result, and results of simulating it with its own settings
    and with overrides of its config."""
    model = load_run(run)
    config = model.with_overrides(overrides)
    predicted = model.simulate_config(config, steps=asked_steps(model, config))
    return WhatIf(
        measured=model.measured(),
        predicted_same=model.simulate(),
        predicted=predicted,
        fit_text=model.fitted.describe(),
        model=model,
        config=config,
        scenario=to_plain(config),
    )
