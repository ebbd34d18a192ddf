"""A run that never was: the entries of an event log with tail batching, made from drawn lengths."""

from __future__ import annotations

import math
import random
from pathlib import Path

from rollpacker.core.commands import (
    Abort,
    Commit,
    Defer,
    Drop,
    FetchPrompts,
    Finish,
    Launch,
    RoundKind,
    Score,
    SyncWeights,
    TrainOn,
)
from rollpacker.core.events import (
    Committed,
    PromptsFetched,
    RunStarted,
    SampleAborted,
    SampleGenerated,
    SampleScored,
    Trained,
    WeightsSynced,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Note, Record, Session, encode


class FakeRun:
    """`steps` steps; one decode step takes `token_s` and every record costs `cost_s`."""

    def __init__(
        self, seed: int = 0, *, tail_batching: bool = True, p0: int = 8, r0: int = 8, cap: int = 384
    ) -> None:
        self.random = random.Random(seed)
        self.tail_batching, self.p0, self.r0, self.cap = tail_batching, p0, r0, cap
        self.now, self.row, self.token_s, self.cost_s = 0.0, 0, 0.0005, 0.00005
        self.queue: list[PromptId] = []
        self.entries: list[Entry] = []

    def record(self, event, *commands) -> None:
        self.entries.append(
            Record(time_s=self.now, event=event, commands=commands, cost_s=self.cost_s)
        )
        self.now += self.cost_s

    def length(self) -> int:
        return max(1, min(self.cap, int(12 * math.exp(1.1 * self.random.gauss(0, 1)))))

    def run(self, steps: int) -> list[Entry]:
        self.entries.append(
            Session(started_at="2026-01-01T00:00:00+00:00", time_s=0.0, step=0, job={})
        )
        self.now += 1.5
        self.entries.append(Note(time_s=self.now, name="startup", seconds=1.5, step=0))
        self.evaluate(0)
        for step in range(1, steps + 1):
            self.step(step, steps)
        return self.entries

    def evaluate(self, step: int) -> None:
        self.now += 0.3
        metrics = {"eval/pass@1": 0.2 + 0.01 * step, "eval/reward": 0.25 + 0.01 * step}
        self.entries.append(
            Note(time_s=self.now, name="evaluation", seconds=0.3, step=step, metrics=metrics)
        )

    def begin(self, step: int, *commands) -> None:
        """The answer to the commit before (or to the start) leads into this step."""
        if step == 1:
            self.record(RunStarted(time_s=self.now), *commands)
        else:
            self.record(Committed(time_s=self.now, step=step - 1, checkpointed=True), *commands)

    def step(self, step: int, steps: int) -> None:
        long = len(self.queue) >= self.p0
        if long:
            prompts, self.queue = self.queue[: self.p0], self.queue[self.p0 :]
            kind, num_samples, attempt = RoundKind.LONG, self.r0, 1
        else:
            factor = 1.25 if self.tail_batching else 1.0
            count = math.ceil(factor * self.p0)
            prompts = [PromptId("fake", 0, self.row + i) for i in range(count)]
            self.row += count
            kind = RoundKind.SHORT if self.tail_batching else RoundKind.PLAIN
            num_samples, attempt = math.ceil(factor * self.r0), 0
        samples = tuple(SampleId(p, i, attempt) for p in prompts for i in range(num_samples))
        launch = Launch(round=step, kind=kind, samples=samples, version=step - 1)
        if long:
            self.begin(step, launch)
        else:
            self.begin(step, FetchPrompts(count=len(prompts)))
            fetched = PromptsFetched(time_s=self.now, prompts=tuple(prompts), epoch_ended=False)
            self.record(fetched, launch)
        kept = self.rollout(samples, race=self.tail_batching and not long)
        self.learn(step, kept, last=step == steps)

    def rollout(self, samples: tuple[SampleId, ...], *, race: bool) -> list[list[SampleId]]:
        start, left = self.now, {s: self.length() for s in samples}
        done: dict[PromptId, list[SampleId]] = {s.prompt: [] for s in samples}
        full: list[PromptId] = []
        for sample in sorted(samples, key=lambda s: (left[s], s)):
            if sample not in left:
                continue
            num_tokens = left.pop(sample)
            self.now = max(self.now, start + num_tokens * self.token_s)
            reason = "length" if num_tokens == self.cap else "stop"
            done[sample.prompt].append(sample)
            commands: list = [Score(sample=sample)]
            stop: list[SampleId] = []
            if race and len(done[sample.prompt]) == self.r0:
                full.append(sample.prompt)
                over = len(full) == self.p0
                stop = [s for s in left if over or s.prompt == sample.prompt]
                late = tuple(p for p in done if p not in full) if over else ()
                self.queue.extend(late)
                commands += [Abort(samples=tuple(stop))] if stop else []
                commands += [Defer(prompts=late)] if late else []
            generated = SampleGenerated(
                time_s=self.now,
                sample=sample,
                num_tokens=num_tokens,
                finish_reason=reason,
                version=0,
            )
            self.record(generated, *commands)
            for other in stop:
                del left[other]
                self.record(SampleAborted(time_s=self.now, sample=other, num_tokens=num_tokens))
            value = float(self.random.random() < 0.5)
            self.record(
                SampleScored(time_s=self.now, sample=sample, value=value, parts={"exact": value})
            )
        return [sorted(group) for p, group in done.items() if not race or p in full]

    def learn(self, step: int, groups: list[list[SampleId]], *, last: bool) -> None:
        self.now += 0.004
        prompt = groups.pop()[0].prompt if step % 4 == 0 else None
        drops = [Drop(prompt=prompt, reason="fewer than two verdicts")] if prompt else []
        scored = SampleScored(time_s=self.now, sample=groups[0][0], value=1.0, parts={"exact": 1.0})
        self.record(scored, *drops, TrainOn(step=step, groups=tuple(map(tuple, groups))))
        self.now += 0.03
        trained = Trained(
            time_s=self.now, step=step, version=step, metrics={"actor/grad_norm": 0.5}
        )
        self.record(trained, SyncWeights(version=step))
        self.now += 0.001
        self.record(WeightsSynced(time_s=self.now, version=step), Commit(step=step, last=last))
        if step % 5 == 0:
            self.evaluate(step)
        self.now += 0.002
        if last:
            self.record(
                Committed(time_s=self.now, step=step, checkpointed=True), Finish(reason="done")
            )


def write(entries: list[Entry], path: Path) -> Path:
    path.write_text("".join(encode(entry) + "\n" for entry in entries))
    return path
