"""A run on a machine whose constants are known: an engine that takes one decode step at a time,
and what it did as the entries of an event log."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from rollpacker.core.commands import (
    Abort,
    Commit,
    Defer,
    FetchPrompts,
    Launch,
    RoundKind,
    Score,
    StartGradients,
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
from rollpacker.core.records import Entry, Note, Record, Session

TRAIN_FIXED_S, TRAIN_TOKEN_S, SYNC_S = 0.25, 1e-4, 0.04
COMMIT_S, CHECKPOINT_S, FETCH_S, REWARD_S, CHECK_S = 0.003, 0.5, 0.002, 0.02, 0.015


class CostedRun:
    """`step_s(n, K)` are the seconds of one decode step over n samples with K cached tokens.

    A stretch between two ends of samples takes up to `noise` (relative, normal) more or less;
    `stall_s` seconds are lost in every hundredth. `streamed`: half of each training step is done
    before the last verdict.
    """

    def __init__(
        self,
        step_s: Callable[[int, int], float],
        *,
        admission_s: float = 0.004,
        admitted_s: float = 2e-4,
        ended_s: float = 0.0,
        slots: int | None = None,
        race: bool = False,
        p0: int = 8,
        r0: int = 8,
        cap: int = 300,
        noise: float = 0.0,
        stall_s: float = 0.0,
        streamed: bool = False,
        seed: int = 0,
    ) -> None:
        self.step_s = step_s
        self.admission_s, self.admitted_s, self.ended_s = admission_s, admitted_s, ended_s
        self.slots, self.race, self.p0, self.r0, self.cap = slots, race, p0, r0, cap
        self.noise, self.stall_s, self.streamed = noise, stall_s, streamed
        self.random = random.Random(seed)
        self.now, self.row = 1.0, 0
        self.queue: list[PromptId] = []
        self.lengths: dict[SampleId, int] = {}
        self.entries: list[Entry] = [
            Session(started_at="2026-01-01", time_s=0.0, step=0, job={"a": 1}, slots=slots)
        ]
        self.note("startup", 1.0)

    def note(self, name: str, seconds: float, **metrics: float) -> None:
        note = Note(time_s=self.now, name=name, seconds=seconds, step=0, metrics=metrics)
        self.entries.append(note)

    def record(self, event, *commands) -> None:
        self.entries.append(Record(time_s=self.now, event=event, commands=commands, cost_s=0.0))

    def run(self, steps: int) -> list[Entry]:
        self.record(RunStarted(time_s=self.now), FetchPrompts(count=self.p0))
        for step in range(1, steps + 1):
            self.now += FETCH_S
            self.learn(step, self.rollout(step))
        return self.entries

    def rollout(self, step: int) -> list[SampleId]:
        long = len(self.queue) >= self.p0
        if long:
            prompts, self.queue = self.queue[: self.p0], self.queue[self.p0 :]
            kind = RoundKind.LONG
        else:
            count = self.p0 + self.p0 // 4 * self.race
            prompts = [PromptId("train", 0, self.row + i) for i in range(count)]
            self.row += count
            kind = RoundKind.SHORT if self.race else RoundKind.PLAIN
        race = self.race and not long
        samples = tuple(
            SampleId(p, i, int(long)) for p in prompts for i in range(self.r0 + 2 * race)
        )
        launch = Launch(round=step, kind=kind, samples=samples, version=step - 1)
        fetched = () if long else tuple(prompts)
        event = PromptsFetched(time_s=self.now, prompts=fetched, epoch_ended=False)
        self.record(event, launch)
        return self.generate(samples, race=race)

    def length(self) -> int:
        return max(1, min(self.cap, int(30 * math.exp(0.9 * self.random.gauss(0, 1)))))

    def generate(self, samples: tuple[SampleId, ...], *, race: bool) -> list[SampleId]:
        waiting = deque(samples)
        left = {sample: self.length() for sample in samples}
        count: dict[SampleId, int] = {}
        finished: dict[PromptId, list[SampleId]] = {s.prompt: [] for s in samples}
        spent = 0.0
        while waiting or count:
            num_new = 0
            while waiting and len(count) < (self.slots or len(samples)):
                count[waiting.popleft()] = 1
                num_new += 1
            if num_new:
                spent += self.admission_s + self.admitted_s * num_new
            ended = [s for s, n in count.items() if n == left[s]]
            if not ended:
                spent += self.step_s(len(count), sum(count.values()))
                for sample in count:
                    count[sample] += 1
                ended = [s for s, n in count.items() if n == left[s]]
            if ended:
                self.now += spent * (1 + self.noise * self.random.gauss(0, 1))
                self.now += self.stall_s * (self.random.random() < 0.01)
                num_running = len(count)
                self.end(ended, waiting, count, finished, race=race)
                spent = self.ended_s * (num_running - len(count))
        return [s for group in finished.values() if len(group) >= self.r0 for s in group]

    def end(self, ended, waiting, count, finished, *, race: bool) -> None:
        """These samples have ended; with a race, what they make superfluous is stopped."""
        stopped: list[tuple[SampleId, int]] = []
        for sample in ended:
            if sample not in count:
                continue
            self.lengths[sample] = tokens = count.pop(sample)
            group = finished[sample.prompt]
            group.append(sample)
            commands: list = [Score(sample=sample)]
            if race and len(group) == self.r0:
                full = [p for p, done in finished.items() if len(done) >= self.r0]
                over = len(full) == self.p0
                stop = [s for s in (*count, *waiting) if over or s.prompt == sample.prompt]
                stopped += [(other, count.pop(other, 0)) for other in stop]
                for other in set(waiting).intersection(stop):
                    waiting.remove(other)
                late = tuple(p for p in finished if p not in full) if over else ()
                self.queue.extend(late)
                commands += [Abort(samples=tuple(stop)), Defer(prompts=late)]
            event = SampleGenerated(
                time_s=self.now,
                sample=sample,
                num_tokens=tokens,
                finish_reason="length" if tokens == self.cap else "stop",
                version=0,
            )
            self.record(event, *commands)
        for sample, tokens in stopped:
            self.record(SampleAborted(time_s=self.now, sample=sample, num_tokens=tokens))

    def begin_gradients(self, step: int, kept: list[SampleId]) -> list[StartGradients]:
        return [StartGradients(step=step, groups=(tuple(kept),))] if self.streamed else []

    def learn(self, step: int, kept: list[SampleId]) -> None:
        self.now += REWARD_S
        training_s = TRAIN_FIXED_S + TRAIN_TOKEN_S * sum(self.lengths[s] for s in kept)
        for sample in kept[:-2]:
            value = float(sample.index % 2)
            self.record(SampleScored(time_s=self.now, sample=sample, value=value, seconds=CHECK_S))
        event = SampleScored(time_s=self.now, sample=kept[-2], value=1.0, seconds=CHECK_S)
        self.record(event, *self.begin_gradients(step, kept))
        early_s = training_s * self.streamed / 2
        self.now += early_s
        train = TrainOn(step=step, groups=(tuple(kept),))
        self.record(SampleScored(time_s=self.now, sample=kept[-1], value=1.0), train)
        if self.streamed:  # the gradients that are under way are ended first
            self.now += 0.01
            self.note("gradients", early_s + 0.01, groups=1)
            early_s += 0.01
        self.now += training_s - early_s
        self.record(Trained(time_s=self.now, step=step, version=step), SyncWeights(version=step))
        self.now += SYNC_S
        self.record(WeightsSynced(time_s=self.now, version=step), Commit(step=step, last=False))
        due = step % 5 == 0
        if due:
            self.now += 7.0
            self.note("evaluation", 7.0)
        self.now += CHECKPOINT_S if due else COMMIT_S
        committed = Committed(time_s=self.now, step=step, checkpointed=due)
        self.record(committed, FetchPrompts(count=self.p0))
