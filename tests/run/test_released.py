"""Engines let go of their devices towards the end of a round, and replicas begin there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Move, Release, StartGradients, TrainOn
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Note, Record
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.engines import process_engine
from rollpacker.report.log import EventLog
from rollpacker.run.parts.engines import build_engines
from rollpacker.run.parts.hosts import Hosts
from rollpacker.run.ports.engines import Engines
from rollpacker.run.replay import replay
from rollpacker.trainer.trainer import TrainSample
from tests.run.fakes import FakeEngine, FakeTrainer, Live, drive, make, run_config

LIMIT_S = 30.0
"""After so long a wait that should have ended is given up."""
LONGEST = 9
NUM_EARLY = 2
"""Portions of gradients for which the longest samples of a step wait."""


def colocated(steps: int) -> RunConfig:
    config = run_config(steps=steps)
    return replace(
        config,
        rollout=replace(config.rollout, engines=2, prompts_per_step=6),
        train=replace(config.train, processes=2, replicas=2, colocate=True, micro_batch_tokens=1),
        tail_batching=TailBatchingConfig(enabled=False),
        stream_trainer=StreamConfig(enabled=True, kinds=("plain",)),
    )


class Tail(FakeEngine):
    """The samples of every sixth prompt are long, and end only when `may_end` says so."""

    def __init__(self, may_end: Callable[[], bool], step_s: float) -> None:
        super().__init__(step_s=step_s)
        self._may_end = may_end

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        return (7,) * (LONGEST if noise.prompt.row % 6 == 0 else 1 + noise.prompt.row % 3)

    def _go_on(self, live: Live) -> None:
        # Two short of its end: a sample that moves draws a token at once where it arrives.
        if len(live.tokens) < LONGEST - 2 or self._may_end():
            super()._go_on(live)

    @property
    def num_live(self) -> int:
        return len(self._live)


class Replicas(FakeTrainer):
    """Looks at the engine whose device it computes on."""

    engines: Sequence[Tail] = ()
    num_early = 0
    """Portions of this step that began on a released device."""

    async def accumulate(
        self, samples: Sequence[TrainSample], replicas: Sequence[int] | None = None
    ) -> None:
        if replicas is not None:
            assert [*replicas] == [1] and not self.engines[1].num_live
            # The long samples may end from the second portion on: later ones may come behind them.
            assert self.engines[0].num_live or self.num_early >= NUM_EARLY
            self.num_early += 1
        await super().accumulate(samples, replicas)

    async def apply(self) -> dict[str, float]:
        self.num_early = 0
        return await super().apply()


def test_a_replica_begins_while_the_other_engine_still_generates(tmp_path: Path) -> None:
    """The long samples of each step end only after two portions of gradients were computed on the
    device of an engine that is slow to let go of its samples."""
    trainer = Replicas()
    until = time.monotonic() + LIMIT_S

    def may_end() -> bool:
        return trainer.num_early >= NUM_EARLY or time.monotonic() > until

    trainer.engines = [Tail(may_end, 0.002), Tail(may_end, 0.02)]
    engines = Engines(trainer.engines, lambda number, incarnation: pytest.fail("none is lost"))
    controller, recorder = make(
        tmp_path, colocated(steps=2), engines=engines, trainer=trainer, evaluates=False
    )
    drive(controller)
    assert time.monotonic() < until
    records = [entry for entry in recorder.entries if isinstance(entry, Record)]
    commands = [command for record in records for command in record.commands]
    assert [c.devices for c in commands if isinstance(c, Release)] == [(1,), (1,)]
    assert any(isinstance(c, Move) and c.engine == 0 for c in commands)
    early = [entry for entry in recorder.entries if isinstance(entry, Note) and is_early(entry)]
    assert len(early) >= 2 * NUM_EARLY
    assert trainer.calls.count("accumulate on [1]") >= 2 * NUM_EARLY and "rescale" in trainer.calls
    for step, weights in zip(
        [c for c in commands if isinstance(c, TrainOn)], trainer.weights, strict=True
    ):
        samples = [sample for group in step.groups for sample in group]
        assert sorted(weights) == sorted(samples)
        assert list(weights.values()) == pytest.approx([1 / len(samples)] * len(samples))


def is_early(note: Note) -> bool:
    return note.name == "gradients" and note.metrics["groups"] == 1


def test_engines_and_processes_are_as_many() -> None:
    config = colocated(steps=1)
    for engines, processes in ((2, 4), (1, 1), (2, None)):
        train = replace(config.train, processes=processes, replicas=1)
        with pytest.raises(ValueError, match=r"train.colocate puts one engine and one process"):
            replace(config, rollout=replace(config.rollout, engines=engines), train=train)
    config = colocated(steps=1)
    assert config.without_effect is None
    told = replace(config, train=replace(config.train, replicas=1)).without_effect
    assert told is not None and "train.replicas=2 gives each device its own" in told
    assert replace(config, train=replace(config.train, colocate=False)).without_effect


def test_on_cuda_engines_know_that_they_will_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, dict[str, str]]] = []

    def make(setup: Any, *, environment: dict[str, str], **_: Any) -> FakeEngine:
        made.append((setup.arguments, environment))
        return FakeEngine()

    monkeypatch.setattr(process_engine, "ProcessEngine", make)
    policy: Any = SimpleNamespace(threads=2)
    config = colocated(steps=1)
    build_engines(config, policy, Hosts())
    assert [arguments["sleeps"] for arguments, _ in made] == [True, True]
    apart = replace(config, train=replace(config.train, colocate=False))
    build_engines(apart, policy, Hosts())
    assert not made[-1][0]["sleeps"]
    build_engines(apart, policy, Hosts(), shares_pools=True)
    assert made[-1][0]["sleeps"]


# --- for real -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    threads = torch.get_num_threads()
    write_model(folder / "model")
    path = write_config(folder, steps=3)
    (folder / "reward.py").write_text(
        "def vowels(completions, **columns):\n"
        "    return [sum(c in 'aeiou' for c in t) / max(1, len(t)) for t in completions]\n"
    )
    yield path
    torch.set_num_threads(threads)


OVERRIDES = (
    *("rollout.engines=2", "train.processes=2", "train.replicas=2", "train.micro_batch_tokens=64"),
    *("rollout.prompts_per_step=8", "tail_batching.enabled=false", "train.eps=1e-4"),
    *("data.eval_fraction=0", "save_samples=false", "train.colocate=true"),
    "deadlines.heartbeat_s=60",
)


def train(config: Path, name: str, *overrides: str) -> tuple[rollpacker.Run, list[Any]]:
    run = rollpacker.train(config, [f"name={name}", *OVERRIDES, *overrides])
    return run, list(EventLog(run.folder / "events.jsonl"))


MOVES = """\
import os, sys
from rollpacker.weights import host_store

host_store.HostStore.__init__.__defaults__ = ("cpu",)
offload = host_store.HostStore.offload

def noted(self, tensors):
    tensors = list(tensors)
    for one in tensors:
        if not host_store.local(one).untyped_storage().resizable():  # a mapped file, on a CPU
            one.data = one.data.clone()
    moved = offload(self, tensors)
    with open({moved!r}, "a") as file:
        print(sys.argv[-1] if "engine" in " ".join(sys.orig_argv) else "rank", moved, file=file)
    return moved

host_store.HostStore.offload = noted
"""
"""For the processes of a run: host memory plays the device's part, so that all does move."""


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Who moved how many bytes, line by line, in processes that start from now on."""
    path = tmp_path / "moved"
    (tmp_path / "sitecustomize.py").write_text(MOVES.format(moved=str(path)))
    root = Path(rollpacker.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    return path


def test_a_run_that_releases_devices_learns_what_one_without_does(
    config: Path, moved: Path
) -> None:
    """With memory that changes sides at each hand-over, in engines and ranks alike."""
    run, log = train(config, "released", "stream_trainer={enabled: true, kinds: [plain]}")
    records = [entry for entry in log if isinstance(entry, Record)]
    commands = [command for record in records for command in record.commands]
    assert [c.devices for c in commands if isinstance(c, Release)] == [(1,)] * 3
    assert any(isinstance(c, Move) and c.engine == 0 for c in commands)
    assert any(isinstance(c, StartGradients) for c in commands)
    assert replay(log).difference is None
    lines = [line.split() for line in moved.read_text().splitlines()]
    by_rank = [int(size) for who, size in lines if who == "rank"]
    by_engine = [int(size) for who, size in lines if who != "rank"]
    assert sum(map(bool, by_rank)) >= 2 * 3 and sum(map(bool, by_engine)) >= 2 * 3
    (moved.parent / "sitecustomize.py").unlink()
    other, _ = train(config, "kept")
    for name in ("actor/grad_norm", "actor/entropy", "critic/rewards/mean"):
        found, expected = (list(r.metrics[name]) for r in (run, other))
        assert found == pytest.approx(expected, rel=1e-3), name
