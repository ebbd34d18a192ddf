"""What control costs where samples take turns: 1,600 trajectories of 8 turns a step, with
environments of no seconds.

The controller of a run, environments in processes of their own, and an engine that computes
nothing: it decodes all its rows by a token at a time, together so many tokens a second (20,000:
about one large GPU's on a model of 7 billion parameters). Reward and trainer take no time. Counted
is the processor time of the controller's process, without that of the engine's stand-in; `parts`
are shares by cProfile, in a run of its own, where built-in functions count for their callers. Exit
code 1 above 5 % of a step.

    python benchmarks/turns_overhead.py [--steps 2] [--tokens-per-s 20000]
"""

from __future__ import annotations

import asyncio
import cProfile
import dataclasses
import pstats
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from lab import bench

from rollpacker.chat_template import Detokenizer
from rollpacker.core.checks.acting import TurnLimits
from rollpacker.core.ids import SampleId
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.cursor import PromptCursor
from rollpacker.data.dataset import PromptRow, PromptSet
from rollpacker.dialogue.parsing import TemplateDialogue
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.engines.engine import EngineOutput, GenerationRequest
from rollpacker.environments.environment import EnvironmentConfig
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.run.driver import Controller, Parts
from rollpacker.run.driving import python_set_for_runs
from rollpacker.run.folder.event_log import LogWriter
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.parts.environments import TurnParts
from rollpacker.run.ports.engines import Engines, Weights
from rollpacker.trainer.trainer import HandOver
from tests.dialogue.families import FAMILIES, tokenizer_of
from tests.run.fakes import FakeEngine, FakeReward, FakeTrainer, Live, build_samples, run_config

PROMPTS, SAMPLES, TURNS = 200, 8, 8
MESSAGE_TOKENS = (50, 150)
BOUND = 0.05
SOURCE = f"""
class AtOnce:
    deterministic = True

    def __init__(self):
        self.turn = 0

    async def reset(self, row):
        return "Begin."

    async def step(self, message):
        self.turn += 1
        said = f"Go on, please, with number {{self.turn}}: {{message['content'][:20]}}"
        return said, 0.0, self.turn == {TURNS}
"""
PARTS = {
    "core": ("rollpacker/core/",),
    "bus and log": ("rollpacker/bus.py", "run/folder/event_log.py", "core/records.py"),
    "tokens": ("rollpacker/dialogue/", "rollpacker/chat_template.py", "tokenizers", "transformers"),
    "calls of environments": (
        *("rollpacker/environments/", "rollpacker/workers/", "rollpacker/rewards/"),
        *("/json/", "/asyncio/", "/selectors.py", "/socket.py"),
    ),
    "player and episodes": ("run/ports/player.py", "run/ports/episodes.py"),
    "other ports": ("rollpacker/run/",),
}
"""By parts of a file's path; the last that fits."""


class PacedEngine(FakeEngine):
    """Decodes all its rows by a token at a time, at so many tokens a second, and says nothing."""

    def __init__(self, tokens_per_s: float, ids: Sequence[int], end: int) -> None:
        super().__init__()
        self.own_cpu_s = 0.0
        self.profile: cProfile.Profile | None = None
        self._rate, self._ids, self._end = tokens_per_s, ids, end
        self._chance = random.Random(0)
        self._left: dict[SampleId, tuple[GenerationRequest, int]] = {}
        """When, counted in decode steps, each of them ends."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._wake:
            for request in requests:
                length = self._chance.randint(*MESSAGE_TOKENS)
                self._left[request.sample] = request, self.steps + length
            self._wake.notify()

    def _work(self) -> None:
        try:
            while not self._closed:
                before = time.thread_time()
                with self._wake:
                    if not self._left:
                        self._wake.wait(0.05)
                        continue
                    num_rows = len(self._left)
                    self.steps += 1
                    ended = [s for s, (_, at) in self._left.items() if at <= self.steps]
                    outputs = [self._output(self._left.pop(sample)[0]) for sample in ended]
                self.num_drawn += num_rows
                self.own_cpu_s += time.thread_time() - before
                time.sleep(num_rows / self._rate)
                if outputs:
                    with self.profile or nullcontext():
                        self._listener(outputs)
        except BaseException as error:
            self._on_error(error)

    def _output(self, request: GenerationRequest) -> EngineOutput:
        length = self._chance.randint(*MESSAGE_TOKENS)
        tokens = [*self._chance.choices(self._ids, k=length - 1), self._end]
        live = self._live[request.sample] = Live(request, length, tokens, [-1.0] * length)
        output = self._finished(request.sample, request, live.length)
        del self._live[request.sample]
        return output


def make(folder: Path, steps: int, tokens_per_s: float) -> tuple[Controller, PacedEngine]:
    """The controller of a run over these trajectories."""
    (folder / "at_once.py").write_text(SOURCE)
    family = FAMILIES["chatml"]
    tokenizer = tokenizer_of("chatml")
    end = tokenizer.convert_tokens_to_ids(family.end)
    template = DialogueTemplate(
        tokenizer, tools=(), chat_template_kwargs={}, end_tokens=frozenset({end})
    )
    environments = SupervisedEnvironments(
        EnvironmentConfig(function=f"{folder / 'at_once.py'}:AtOnce", workers=2)
    )
    limits = TurnLimits(max_turns=100, max_trajectory_tokens=100_000)
    turns = TurnParts(environments, TemplateDialogue(template), limits, 60.0, 1000)
    config = run_config(steps)
    sizes = {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES}
    rollout = dataclasses.replace(
        config.rollout, **sizes, max_response_tokens=2 * MESSAGE_TOKENS[1]
    )
    off = TailBatchingConfig(enabled=False)
    config = dataclasses.replace(config, rollout=rollout, tail_batching=off)
    job = Job(
        JobConfig(
            **sizes,
            max_steps=steps,
            max_response_tokens=100_000,
            tail_batching=off,
            acting=turns.acting({"train"}),
            cadence=Cadence(checkpoint_every_steps=1000, evaluates=False),
        )
    )
    rows = [PromptRow(prompt=f"p{n}", tokens=(1, 2), columns={"n": n}) for n in range(PROMPTS)]
    special = set(tokenizer.all_special_ids)
    ids = [n for n in range(len(tokenizer)) if n not in special]
    text = Detokenizer(tokenizer)
    engine, trainer = PacedEngine(tokens_per_s, ids, end), FakeTrainer()
    engines = Engines([engine])
    engines.expect(Weights(0, HandOver(weights=None, probe="version 0")))
    parts = Parts(
        job=job,
        engines=engines,
        trainer=trainer,
        reward=FakeReward(),
        prompts=PromptSet(rows=tuple(rows), fingerprint="none"),
        eval_prompts=None,
        cursor=PromptCursor("train", PROMPTS, 0, True, None),
        build_samples=build_samples,
        decode=partial(text, skip_special_tokens=True),
        render=partial(text, skip_special_tokens=False),
        log=LogWriter(folder / "events.jsonl"),
        samples=SampleWriter(folder),
        player=turns.player(0),
    )
    controller = Controller(config, parts, checkpoints=folder / "checkpoints", time_s=0.0)
    controller.open(started_at="2026-01-01T00:00:00+00:00", began_s=0.0)
    return controller, engine


def measure(steps: int, tokens_per_s: float, *, profiled: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        return asyncio.run(_measure(Path(name), steps, tokens_per_s, profiled=profiled))


async def _measure(
    folder: Path, steps: int, tokens_per_s: float, *, profiled: bool
) -> dict[str, Any]:
    controller, engine = make(folder, steps, tokens_per_s)
    of_loop = cProfile.Profile()
    if profiled:
        engine.profile = cProfile.Profile()
        of_loop.enable()
    wall, cpu, loop = time.perf_counter(), time.process_time(), time.thread_time()
    with python_set_for_runs():
        await controller.run()
    wall, loop = time.perf_counter() - wall, time.thread_time() - loop
    cpu = time.process_time() - cpu - engine.own_cpu_s
    of_loop.disable()
    await controller.close()
    num_turns = steps * PROMPTS * SAMPLES * TURNS
    step_s = engine.num_drawn / tokens_per_s / steps
    found = {
        "steps": steps,
        "turns": num_turns,
        "step_s_of_the_engine": round(step_s, 2),
        "wall_s_a_step": round(wall / steps, 2),
        "cpu_s_a_step": round(cpu / steps, 3),
        "cpu_us_a_turn": round(1e6 * cpu / num_turns, 1),
        "share_of_a_step": round(cpu / steps / step_s, 4),
        "cpu_s_a_step_of_the_loop": round(loop / steps, 3),
    }
    if profiled:
        stats = pstats.Stats(of_loop)
        assert engine.profile is not None
        stats.add(engine.profile)
        found["parts"] = parts(stats)
        found["largest"] = largest(stats)
    return found


def part_of(file: str) -> str:
    fits = [part for part, paths in PARTS.items() if any(path in file for path in paths)]
    if "other ports" in fits and len(fits) > 1:
        fits.remove("other ports")
    return fits[-1] if fits else "others"


def parts(stats: pstats.Stats) -> dict[str, float]:
    """Shares of the time, by part."""
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, name), (_, _, own_s, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        if "select.epoll" in name or "time.sleep" in name or "acquire" in name:
            continue  # it waits
        if file != "~":
            seconds[part_of(file)] += own_s
            continue
        for (caller, _, _), (_, _, of_caller_s, _) in callers.items():
            seconds[part_of(caller)] += of_caller_s
    total = sum(seconds.values())
    ordered = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return {part: round(seconds[part] / total, 3) for part in ordered}


def largest(stats: pstats.Stats) -> list[str]:
    """Functions that take most by themselves."""
    waits = ("epoll", "sleep", "acquire")
    rows = [
        (own_s, f"{'/'.join(Path(file).parts[-2:])}:{name}", calls)
        for (file, _, name), (_, calls, own_s, _, _) in stats.stats.items()  # type: ignore[attr-defined]
        if not any(one in name for one in waits)
    ]
    total = sum(own_s for own_s, _, _ in rows)
    rows.sort(reverse=True)
    return [f"{own_s / total:.3f} {where} ({calls} calls)" for own_s, where, calls in rows[:15]]


def main(steps: int = 2, tokens_per_s: float = 20_000.0, quick: bool = False) -> dict[str, Any]:
    measure(1, 1e7, profiled=False)  # caches and imports
    found = measure(1 if quick else steps, tokens_per_s, profiled=False)
    print(found, flush=True)
    profiled = measure(1, tokens_per_s, profiled=True)
    print(*profiled["largest"], sep="\n")
    return found | {"tokens_per_s": tokens_per_s, "parts": profiled["parts"]}


if __name__ == "__main__":
    bench(main, holds=lambda found: found["share_of_a_step"] <= BOUND)
