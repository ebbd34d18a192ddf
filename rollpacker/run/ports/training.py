"""The trainer's port: carries out `StartGradients` and `TrainOn`, and answers with `Trained`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from rollpacker.bus import Routes
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import StartGradients, TrainOn
from rollpacker.core.events import Trained
from rollpacker.core.ids import SampleId
from rollpacker.core.rounds.dynamic_sampling import updates_of
from rollpacker.rewards.reward import Reward
from rollpacker.run.errors import BuildSamples
from rollpacker.run.folder.sample_rows import SampleRows
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.shared import Shared
from rollpacker.run.ports.shared_devices import SharedDevices
from rollpacker.trainer.trainer import (
    NonFiniteError,
    ScoreRequest,
    TokenScores,
    Trainer,
    TrainSample,
)
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Training:
    """The trainer's port: trains on the main task (which does slow work). Groups of samples whose
    gradients may begin before the step is complete are noted when the command comes, under the
    bus's lock."""

    shared: Shared
    _: KW_ONLY
    config: RunConfig
    devices: SharedDevices
    engines: Engines
    """The engines, of which only the status is asked."""
    reward: Reward
    asked: Sequence[Callable[[], Mapping[str, float]]]
    """Functions that return other ports' metrics of the step. Called under the bus's lock."""
    build_samples: BuildSamples
    rows: SampleRows | None
    """Makes the rows of samples for parquet files. None if samples are not kept."""
    _to_stream: list[tuple[SampleId, ...]] = field(default_factory=list, init=False)
    """Groups of samples that the core has allowed to be trained on before the step is complete, and
    whose gradients have not begun."""
    _devices: tuple[int, ...] = field(default=(), init=False)
    """Devices for gradients that begin before the step is complete. Engines have released them.
    Empty for all devices."""
    _rows_of: int = field(default=0, init=False)
    """The last step whose rows of samples were made. The step may be trained again if the trainer
    is lost, and makes no rows then."""
    _warn_once: WarnOnce = field(default_factory=lambda: WarnOnce(logger), init=False)

    @property
    def trainer(self) -> Trainer:
        return self.devices.trainer

    def routes(self) -> Routes:
        return {StartGradients: self._on_start_gradients, TrainOn: self._on_train_on}

    def _on_start_gradients(self, command: StartGradients) -> None:
        self._to_stream += command.groups
        self._devices = command.devices
        self.shared.main.later(partial(self._start_gradients, command.step))

    def _on_train_on(self, command: TrainOn) -> None:
        self._to_stream.clear()  # the whole step is due: large batches are quicker
        self.shared.main.later(partial(self._train, command))

    async def _start_gradients(self, step: int) -> None:
        """Begin the gradients of groups that the step is sure to train on, while rewards of others
        are awaited. Loss weights are provisional, as the step's total is not known yet."""
        while self._to_stream:  # else an earlier call took them along, or the whole step is due
            devices = self._devices
            if self.config.train.colocate:
                await self.devices.to_replicas(devices)
            else:
                self._check_idle()
            with self.shared.bus.lock:
                groups = self._next_groups(devices)
            if groups:
                await self._begin_gradients(step, groups, self.devices.replicas_of(devices))

    def _next_groups(self, devices: Sequence[int]) -> list[tuple[SampleId, ...]]:
        """Take groups whose gradients may begin before the step is complete: all, as large batches
        are faster. If only some devices are free, take about one micro-batch per device, so that
        they are soon free again."""
        chosen, self._to_stream = self._to_stream, []
        if devices:
            budget, size = self.config.train.most_micro_batch_tokens() * len(devices), 0
            while size < len(chosen) and budget > 0:
                responses = [self.shared.desk[sample].response for sample in chosen[size]]
                budget -= sum(response.num_in_rows for response in responses)
                size += 1
            chosen, self._to_stream = chosen[:size], chosen[size:]
        return chosen

    def _check_idle(self) -> None:
        status = self.engines.status()
        busy = status.num_running + status.num_waiting
        apart = self.config.trainer_apart
        assert apart or not busy, f"gradients on the engine's device, where {busy} samples run"

    async def _begin_gradients(
        self, step: int, groups: Sequence[tuple[SampleId, ...]], replicas: Sequence[int] | None
    ) -> None:
        began = self.shared.bus.clock.now()
        with _diverging(step):
            scores = await self._ask_scores(groups, replicas)
            scored = self.shared.desk.scored_groups(groups)
            samples, _ = self.build_samples(
                scored,
                scores=scores,
                partial=True,
                reward_parts=self.shared.desk.reward_parts(groups),
                turn_rewards=self.shared.desk.turn_rewards(groups),
            )
            await self.shared.watch.by(
                "train_s",
                self.trainer.accumulate(samples, replicas),
                f"the first gradients of step {step}",
            )
        for sample in samples:
            self.shared.desk[sample.sample].streamed = sample
        seconds = self.shared.bus.clock.now() - began
        self.shared.bus.note("gradients", seconds, step, {"groups": len(groups)})

    async def _train(self, command: TrainOn) -> None:
        if command.num_missing:
            self._warn_of_missing(command)
        trainer = self.trainer
        await self.devices.to_replicas()
        updates = updates_of(len(command.groups), self.config.train.updates_per_round)
        with _diverging(command.step):
            scores = await self._ask_scores(command.groups)
            samples, metrics = self.build_samples(
                self.shared.desk.scored_groups(command.groups),
                weights=command.weights,
                scores=scores | await self._ask_old(command.groups, updates),
                updates=updates,
                reward_parts=self.shared.desk.reward_parts(command.groups),
                turn_rewards=self.shared.desk.turn_rewards(command.groups),
            )
            parts = _parts_of(samples, command.groups, updates)
            training = asyncio.ensure_future(self._accumulate(parts[0]))
            await asyncio.sleep(0)  # the trainer's thread begins
            if self.rows is not None and self._rows_of != command.step:
                self.rows.add(command, samples)
                self._rows_of = command.step
            await self.shared.watch.by("train_s", training)
            metrics.update(metrics_of_updates(await self._update(parts)))
        if metrics.get("critic/zero_advantages") == 1.0:
            self._warn_once(
                "step %d: every advantage is 0, so it teaches nothing: all rewards of a group are"
                " equal (critic/zero_advantages has each step's share). Easier or harder prompts,"
                " or rollout.dynamic_sampling, would help",
                command.step,
            )
        counts = self.reward.metrics()
        metrics.update({f"perf/rewards/{name}": value for name, value in counts.items()})
        metrics.update(self.devices.take_seconds())
        with self.shared.bus.lock:
            for numbers in self.asked:
                metrics.update(numbers())
            metrics = {**self.shared.desk.logged(command.groups), **metrics}
        self.shared.bus.take(
            Trained(time_s=0.0, step=command.step, version=trainer.version, metrics=metrics)
        )

    async def _update(self, parts: Sequence[Sequence[TrainSample]]) -> list[Mapping[str, float]]:
        """Do all optimizer updates of the step; the first one's gradient is accumulated already.
        Returns each update's metrics."""
        metrics = []
        try:
            for part in parts[1:]:
                metrics.append(await self.shared.watch.by("train_s", self.trainer.update()))
                await self.shared.watch.by("train_s", self.trainer.accumulate(part))
            metrics.append(await self.shared.watch.by("train_s", self.trainer.apply()))
        except NonFiniteError as error:
            if not metrics:
                raise
            number = f"update {len(metrics) + 1} of {len(parts)}"
            raise NonFiniteError(f"{number}: {error}") from error
        return metrics

    async def _accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Accumulate the gradient of these samples. What was accumulated before the step was
        complete, with provisional loss weights, is scaled to the final ones."""
        streamed = self.shared.desk.streamed()
        if not streamed:
            await self.trainer.accumulate(samples)
            return
        rest = [sample for sample in samples if sample.sample not in streamed]
        assert len(rest) + len(streamed) == len(samples), "streamed, and not trained on"
        await self.trainer.rescale(common_factor(samples, streamed))
        if rest:
            await self.trainer.accumulate(rest)

    async def _ask_scores(
        self, groups: Sequence[Sequence[SampleId]], replicas: Sequence[int] | None = None
    ) -> dict[SampleId, TokenScores]:
        """Returns log-probs and values of these samples' tokens by other models, such as a
        reference model; each sample is scored once. Empty if the algorithm needs none."""
        if not self.config.algorithm.needs_scores:
            return {}
        return await self._ask(groups, replicas)

    async def _ask_old(
        self, groups: Sequence[Sequence[SampleId]], updates: Sequence[int]
    ) -> dict[SampleId, TokenScores]:
        """Returns the trainer's log-probs, before any update, of the samples that the second and
        later updates train on. Empty if the algorithm uses the engines' log-probs."""
        if self.config.algorithm.old_logprobs == "rollout":
            return {}
        return await self._ask([g for g, u in zip(groups, updates, strict=True) if u > 0])

    async def _ask(
        self, groups: Sequence[Sequence[SampleId]], replicas: Sequence[int] | None = None
    ) -> dict[SampleId, TokenScores]:
        known = [self.shared.desk[sample] for group in groups for sample in group]
        unasked = [one for one in known if one.scores is None]
        requests = [
            ScoreRequest(
                sample=one.response.sample,
                prompt_tokens=one.response.prompt_tokens,
                response_tokens=one.response.tokens,
                given=one.response.given,
                rewritten=one.response.rewritten,
            )
            for one in unasked
        ]
        if requests:
            found = await self.shared.watch.by("train_s", self.trainer.score(requests, replicas))
            for one, scores in zip(unasked, found, strict=True):
                one.scores = scores
        return {one.response.sample: one.scores for one in known if one.scores is not None}

    def _warn_of_missing(self, command: TrainOn) -> None:
        self._warn_once(
            "step %d trains on %d groups instead of %d: the others had no signal or no"
            " verdicts, and refilling found no more (at most"
            " rollout.dynamic_sampling.max_refills=%d rounds, none while the queue is emptied);"
            " further such steps are in the log alone",
            command.step,
            len(command.groups),
            len(command.groups) + command.num_missing,
            self.config.rollout.dynamic_sampling.max_refills,
        )


@contextlib.contextmanager
def _diverging(step: int) -> Iterator[None]:
    """A context in which a `NonFiniteError` is given the step's number and advice for the user."""
    try:
        yield
    except NonFiniteError as error:
        applied = "" if "no update" in str(error) else "; no update was applied"
        raise NonFiniteError(
            f"step {step}: {error}{applied}. --resume goes on from the last "
            "checkpoint; a lower train.learning_rate may help"
        ) from error


def _parts_of(
    samples: Sequence[TrainSample], groups: Sequence[Sequence[SampleId]], updates: Sequence[int]
) -> list[list[TrainSample]]:
    """Returns the samples of each of the step's optimizer updates. `updates`: for each group, the
    number of the update that trains on it, from 0. `samples` are in the order of `groups`."""
    of_sample = [u for u, group in zip(updates, groups, strict=True) for _ in group]
    parts: list[list[TrainSample]] = [[] for _ in range(max(updates, default=0) + 1)]
    for sample, update in zip(samples, of_sample, strict=True):
        parts[update].append(sample)
    return parts


def _check_same_advantage(early: TrainSample, whole: TrainSample) -> None:
    """Raise `ValueError` if a sample's advantage differs between `early`, computed from its group
    alone, and `whole`, computed from all groups of the step. Rounding is ignored."""
    pair = [
        sample.advantage if isinstance(sample.advantage, tuple) else (sample.advantage,)
        for sample in (early, whole)
    ]
    if len(pair[0]) != len(pair[1]) or not all(
        math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(*pair, strict=True)
    ):
        raise ValueError(
            f"sample {whole.sample} has another advantage in the whole step than in its group "
            "alone, by which its gradient was begun: algorithm.advantage_function compares groups "
            "or is not repeatable. Switch stream_trainer.enabled off"
        )


def common_factor(
    samples: Sequence[TrainSample], streamed: Mapping[SampleId, TrainSample]
) -> float:
    """Returns the factor from provisional loss weights (of `streamed`, samples whose gradients
    began early) to the weights of the whole step. 1.0 if there are none, or all are 0."""
    factors = []
    for sample in samples:
        early = streamed.get(sample.sample)
        if early is not None:
            _check_same_advantage(early, sample)
            if early.token_weight == 0:  # left out of the loss, whatever the denominator
                assert sample.token_weight == 0, f"{sample.sample} changed its weight"
            else:
                factors.append(sample.token_weight / early.token_weight)
    factor = factors[0] if factors else 1.0
    assert all(math.isclose(factor, other, rel_tol=1e-9) for other in factors)
    return factor


_SUMS = (
    *("train/response_tokens", "train/tokens", "train/padded_tokens", "train/micro_batches"),
    "train/recomputed_micro_batches",
)
"""Metrics that count something: a step's value is the sum over its optimizer updates."""
_OF_EACH = ("actor/ppo_kl", "actor/ratio/mean", "actor/clip_ratio_low", "actor/clip_ratio_high")
"""Metrics of how far the policy is from the one that generated, which each update enlarges. Besides
the mean, a step has the value of each update, as NAME/update_1 and so on."""
_LAST = ("train/lora_merge_loss", "perf/pipeline/host_links")
_LAST_ENDINGS = ("/layers", "/slow")
"""Ends of names of metrics of the trainer's state: a step has the last update's value."""

_FIRST = ("sampling/sampling_logp_difference/", "sampling/importance_sampling_ratio/")
"""Beginnings of names of metrics that compare engine and trainer. The first update's value counts,
as only then both have the same weights."""


def metrics_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns a step's metrics from those of its updates; a single update's are kept. Counts are
    added up, comparisons of engine and trainer are the first update's, extremes stay extremes, and
    all others are means over the updates."""
    if len(updates) == 1:
        return dict(updates[0])
    names = dict.fromkeys(name for update in updates for name in update)
    found = {name: _over_updates(name, [u[name] for u in updates if name in u]) for name in names}
    for name in _OF_EACH:
        for number, update in enumerate(updates, start=1):
            if name in update:
                found[f"{name}/update_{number}"] = update[name]
    found["train/updates"] = float(len(updates))
    return found


def _over_updates(name: str, values: Sequence[float]) -> float:
    if name in _SUMS or name.endswith("/busy_s"):
        return sum(values)
    if name.startswith(_FIRST):
        return values[0]
    if name in _LAST or name.endswith(_LAST_ENDINGS):
        return values[-1]
    if name.endswith("/max") or "peak" in name:
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return sum(values) / len(values)
