"""Evaluation of a run's policy on held-out prompts, with pass@1 and the unbiased pass@k."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field

from rollpacker.bus import Bus
from rollpacker.config.schema import RunConfig
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import EVALUATION_ROLLOUT
from rollpacker.data.dataset import TRAIN, PromptRow, PromptSet
from rollpacker.engines.engine import GenerationRequest, Response, SamplingParams
from rollpacker.environments.environment import Episode
from rollpacker.rewards.reward import Cause, Failed, Progress, Reward, RewardInput, Scored
from rollpacker.run.errors import Decode
from rollpacker.run.folder.sample_rows import EvaluationRows
from rollpacker.run.ports.audience import Audience
from rollpacker.run.ports.player import Player
from rollpacker.run.ports.playing import Generate, StopKeeping, play_all
from rollpacker.run.ports.pools import Pools
from rollpacker.run.ports.watch import Watch
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)

JUDGED_AT_ONCE = 32
"""Number of samples that an evaluation gives the rewards in one call. The deadline `reward_s`
begins anew whenever a call has ended."""

Judge = Callable[[Sequence[RewardInput]], Awaitable[Sequence[Scored | Failed]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    metrics: Mapping[str, float]
    """The metrics: `eval/pass@1`, `eval/pass@k`, `eval/stderr/pass@1`, `eval/reward`,
    `eval/rewards/NAME/mean`, `eval/response_length`, `eval/samples`, `eval/no_verdict`."""
    passed: Mapping[int, tuple[int, int]]
    """For each prompt, by the number of its data row: how many responses passed, and how many got a
    verdict."""
    judged: Sequence[tuple[Response, str, Scored | Failed]]
    """Each response with its text and the rewards' verdict, in the order of samples."""
    episodes: Mapping[SampleId, Episode] = field(default_factory=dict)
    """Messages and rewards of samples with several turns, by sample. Empty for single responses."""

    def few_judged(self) -> str | None:
        """Returns a warning if most responses have no verdict, so that the metrics cover the others
        only; else None."""
        failed = [verdict for _, _, verdict in self.judged if isinstance(verdict, Failed)]
        total = len(self.judged)
        if 2 * len(failed) <= total:
            return None
        (reason, _), *_ = Counter(one.reason for one in failed).most_common(1)
        shown = "".join(one if one.isprintable() else "\ufffd" for one in reason)
        return (
            f"pass@1 and rewards are over {total - len(failed)} of {total} samples, the others got"
            f" no verdict (most often: {shown})"
        )

    def out_of_reach(self, threshold: float) -> str | None:
        """Returns a warning if the largest reward was above 0 and below the pass threshold, so that
        nothing passed; else None."""
        values = [v.value for _, _, v in self.judged if isinstance(v, Scored)]
        largest = max(values, default=0.0)
        if largest <= 0 or largest >= threshold:
            return None
        return (
            f"no response of the evaluation reached eval.pass_threshold={threshold:g}; the largest"
            f" reward was {largest:.4g}. If none can be larger, lower the threshold"
        )


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates a run's policy on held-out prompts, while no other samples are generated."""

    bus: Bus
    watch: Watch
    _: KW_ONLY
    config: RunConfig
    num_steps: int
    """Number of steps of the whole run."""
    prompts: PromptSet | None
    """The held-out prompts. None if the run has nothing to evaluate on."""
    generate: Generate
    let_go: StopKeeping
    reward: Reward
    decode: Decode
    audience: Audience
    pools: Pools
    player: Player | None = None
    rows: EvaluationRows | None = None
    """Writes the samples of evaluations to parquet files. None if samples are not kept."""
    warn_once: WarnOnce = field(default_factory=lambda: WarnOnce(logger))

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy after step `step`. Metrics go to the event log, samples to a file.
        Does nothing without held-out prompts."""
        if self.prompts is None:
            return
        clock, generated_s = self.bus.clock, 0.0
        began, waited_s = clock.now(), self.pools.waited_s

        @asynccontextmanager
        async def drawing() -> AsyncIterator[None]:
            nonlocal generated_s
            async with self.pools.borrowed("rollout", "evaluation"):
                since_s = clock.now()
                yield
                generated_s = clock.now() - since_s

        result = await evaluate(
            self.config,
            self.prompts,
            generate=self.generate,
            drawing=drawing(),
            let_go=self.let_go,
            score=self._judge,
            decode=self.decode,
            progress=Progress(step, self.num_steps),
            player=self.player,
        )
        told = result.out_of_reach(self.config.eval.pass_threshold)
        if told is not None:
            self.warn_once("%s", told)
        few = result.few_judged()
        if few is not None:
            logger.warning("the evaluation after step %d: %s", step, few)
        if self.rows is not None:
            self.rows.write(step, result.judged, result.episodes)
        logged = await self.audience.evaluated(step, result.metrics)
        seconds = clock.now() - began - (self.pools.waited_s - waited_s)
        metrics = {**result.metrics, EVALUATION_ROLLOUT: generated_s, **logged}
        self.bus.note("evaluation", seconds, step, metrics)

    async def _judge(self, inputs: Sequence[RewardInput]) -> list[Scored | Failed]:
        """Returns the rewards' verdicts, in the order of `inputs`. Calls have the time limits of
        training. A response whose verdict was lost by an infrastructure fault is judged again."""
        limit_of = self.bus.job.rewards.timeout_s
        limits = [limit_of(one.task or "") or limit_of(TRAIN) for one in inputs]
        verdicts: dict[int, Scored | Failed] = {}
        num_seen = 0

        async def judge(places: Sequence[int], retries: int) -> None:
            batch = [inputs[place] for place in places]
            found = await self.reward.score(batch, timeout_s=limits[places[0]])
            self.watch.check_rewards()
            verdicts.update(zip(places, found, strict=True))
            lost = [place for place in places if _was_lost(verdicts[place])]
            if lost and retries:
                await judge(lost, retries - 1)

        def lives() -> bool:
            nonlocal num_seen
            grown, num_seen = len(verdicts) > num_seen, len(verdicts)
            return grown or self.watch.rewards_wait()

        same = [[n for n, s in enumerate(limits) if s == limit] for limit in dict.fromkeys(limits)]
        batches = [
            places[start : start + JUDGED_AT_ONCE]
            for places in same
            for start in range(0, len(places), JUDGED_AT_ONCE)
        ]
        retries = self.config.reward_scheduler.max_retries
        judging = asyncio.gather(*(judge(places, retries) for places in batches))
        await self.watch.by("reward_s", judging, "the rewards of an evaluation", lives)
        return [verdicts[place] for place in range(len(inputs))]


async def evaluate(
    config: RunConfig,
    prompts: PromptSet,
    *,
    generate: Generate,
    let_go: StopKeeping,
    score: Judge,
    decode: Decode,
    progress: Progress,
    player: Player | None = None,
    drawing: AbstractAsyncContextManager[None] | None = None,
) -> EvalResult:
    """Generate responses to the prompts and judge them, as `config.eval` says. `generate`: has
    engines answer requests. `let_go`: is told of samples whose caches engines need not keep.
    `score`: the rewards. `progress`: step and number of steps, for rewards. `player`: plays samples
    of several turns; None for single responses. `drawing`: context around the generation; None: no
    context. Random numbers depend on seed, row and sample only, so that evaluations in a run differ
    by their weights alone. Samples without a verdict are left out, and counted."""
    settings, sampling = config.eval, config.eval_sampling
    rows = prompts.rows[: settings.max_prompts]
    requests = _requests(rows, settings.samples_per_prompt, sampling)
    episodes: dict[SampleId, Episode] = {}
    async with drawing or nullcontext():
        if player is None:
            drawn = await generate(requests)
        else:
            asked = [(request.sample, rows[request.sample.prompt.row]) for request in requests]
            drawn, episodes = await play_all(player, asked, generate, sampling, let_go)
    responses = sorted(drawn, key=lambda response: response.sample)
    inputs = [
        reward_input(rows[r.sample.prompt.row], r, decode, progress, episodes.get(r.sample))
        for r in responses
    ]
    verdicts = await score(inputs)
    values: dict[int, list[float]] = {}
    for response, verdict in zip(responses, verdicts, strict=True):
        if isinstance(verdict, Scored):
            values.setdefault(response.sample.prompt.row, []).append(verdict.value)
    passed = {
        row: (sum(value >= settings.pass_threshold for value in of_row), len(of_row))
        for row, of_row in values.items()
    }
    scored = [value for of_row in values.values() for value in of_row]
    metrics = {**pass_at_k(passed, settings.samples_per_prompt), **standard_error(passed)}
    if scored:
        metrics["eval/reward"] = sum(scored) / len(scored)
    metrics.update(_means_by_reward(verdicts))
    if responses:
        metrics["eval/response_length"] = statistics.fmean(one.num_drawn for one in responses)
    metrics["eval/samples"] = float(len(requests))
    metrics["eval/no_verdict"] = float(len(requests) - len(scored))
    texts = [one.completion for one in inputs]
    judged = tuple(zip(responses, texts, verdicts, strict=True))
    return EvalResult(metrics=metrics, passed=passed, judged=judged, episodes=episodes)


def _requests(
    rows: Sequence[PromptRow], samples_per_prompt: int, sampling: SamplingParams
) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            sample=SampleId(PromptId("eval", 0, number), index, 0),
            prompt_tokens=row.tokens,
            sampling=sampling,
        )
        for number, row in enumerate(rows)
        for index in range(samples_per_prompt)
    ]


def _was_lost(verdict: Scored | Failed) -> bool:
    """Whether the rewards gave no verdict because of an infrastructure fault (not because of the
    response), so that asking them again may help."""
    return isinstance(verdict, Failed) and verdict.cause is Cause.INFRASTRUCTURE


def _means_by_reward(verdicts: Sequence[Scored | Failed]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for verdict in verdicts:
        if isinstance(verdict, Scored):
            for name, value in verdict.parts.items():
                if value is not None:
                    values.setdefault(name, []).append(value)
    return {f"eval/rewards/{name}/mean": sum(of) / len(of) for name, of in values.items()}


def reward_input(
    row: PromptRow,
    response: Response,
    decode: Decode,
    progress: Progress,
    episode: Episode | None = None,
) -> RewardInput:
    """Returns a reward's input for a response. `episode`: its turns; None for a single response."""
    last = response.last_turn
    said = None if episode is None or episode.prompt is None else [*map(dict, episode.prompt)]
    return RewardInput(
        prompt=said or row.prompt,
        completion=decode(last),
        completion_tokens=last,
        finish_reason=response.finish_reason,
        columns=row.columns,
        task=row.task,
        messages=said or row.messages,
        progress=progress,
        episode=episode,
    )


def pass_at_k(passed: Mapping[int, tuple[int, int]], most: int) -> dict[str, float]:
    """Returns `eval/pass@k` for k = 1, 2, 4, ... and `most`: the chance that one of k responses
    passes. For a prompt with c passes in n verdicts it is 1 - C(n - c, k) / C(n, k); the metric is
    the mean over prompts with at least k verdicts (Chen et al. 2021, arXiv 2107.03374). `passed`
    has (c, n) by prompt."""
    wanted = sorted({1, most} | {2**power for power in range(1, most.bit_length())})
    metrics = {}
    for k in wanted:
        chances = [1 - math.comb(n - c, k) / math.comb(n, k) for c, n in passed.values() if n >= k]
        if chances:
            metrics[f"eval/pass@{k}"] = sum(chances) / len(chances)
    return metrics


def standard_error(passed: Mapping[int, tuple[int, int]]) -> dict[str, float]:
    """Returns the metric of the standard error of pass@1, over the prompts with a verdict
    (responses to one prompt are not independent). Empty for fewer than two prompts."""
    shares = [c / n for c, n in passed.values() if n]
    if len(shares) < 2:
        return {}
    return {"eval/stderr/pass@1": statistics.stdev(shares) / math.sqrt(len(shares))}
