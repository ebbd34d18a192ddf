"""The trainer's processes make room, between two steps, for others in another layout."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import write_model
from rollpacker.pipeline.plan.choosers import KINDS
from rollpacker.pipeline.plan.layout import Layout
from rollpacker.pipeline.plan.work import Load
from rollpacker.pipeline.stages.overseer import Overseer
from rollpacker.pipeline.stages.peers import partners_of
from rollpacker.pipeline.stages.relayout import Relayout
from rollpacker.pipeline.stages.times import NUM_BYTES, StageTimes
from rollpacker.trainer.journal import RELAYOUT
from rollpacker.trainer.launch import RankPlace, Ranks
from rollpacker.trainer.model import load_model
from rollpacker.trainer.outcome import StepOutcome
from rollpacker.trainer.process_trainer import ProcessTrainer
from rollpacker.trainer.setup import build_learner
from rollpacker.trainer.step_sums import StepSums
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.trainer.trainer import ModelConfig, PipelineConfig, RanksLost
from rollpacker.workers.line import Line
from tests.trainer.test_process_trainer import setup_of, step, weights
from tests.trainer.tiny import largest_difference


class FrailRanks(Ranks):
    """One of them is killed when this method is called for the first time."""

    kill_at: str | None = None
    spoil: Path | None = None
    """A folder whose tensors are cut short before anybody loads them."""
    torchrun = False

    @property
    def can_start_anew(self) -> bool:
        return not self.torchrun

    def send(self, method: str, calls: Sequence[bytes], numbers: Sequence[int] = ()) -> list[Any]:
        if method == self.kill_at:
            self.kill_at = None
            os.kill(self.all[-1].pid, signal.SIGKILL)
        if method == "load" and self.spoil is not None:
            for path in self.spoil.rglob("*.safetensors"):
                os.truncate(path, path.stat().st_size // 2)
            self.spoil = None
        return super().send(method, calls, numbers)


class Wish:
    """In the place of a `Relayout`: a layout that is to be taken after the next step."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layouts = [Layout(layers=layers, places=(0, 1))]

    def observe(self, *_: object, **__: object) -> Layout | None:
        return self._layouts.pop() if self._layouts else None


def state(trainer: ProcessTrainer) -> dict[str, str]:
    """Hashes of weights and optimizer state, by name."""
    found: dict[str, str] = trainer._all("hashes")[0]
    return found


def relayout(trainer: ProcessTrainer, **pipeline: Any) -> float:
    return asyncio.run(trainer.relayout(PipelineConfig(**pipeline)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, in which one that was killed has left something."""
    path = tmp_path_factory.mktemp("run")
    (path / RELAYOUT / "version-3").mkdir(parents=True)
    return path


@pytest.fixture(scope="module")
def trainer(folder: Path, run: Path) -> Iterator[ProcessTrainer]:
    """Two stages of one process each."""
    engine = load_model(ModelConfig(path=str(folder), device="cpu")).model
    setup = setup_of(folder)
    pipeline = PipelineConfig(stages=2, layers=(1, 3))
    train = dataclasses.replace(setup.train, processes=2, pipeline=pipeline)
    setup = dataclasses.replace(setup, train=train)
    found = ProcessTrainer(setup, FrailRanks(2), engine.named_parameters(), journal_in=run)
    yield found
    found.close()
    assert not (run / RELAYOUT).exists()


def test_other_layers_and_stages_go_on_as_if_nothing_was(folder, trainer, run):
    assert not (run / RELAYOUT).exists()
    own = TorchTrainer(build_learner(setup_of(folder)), in_place=False)
    for number, pipeline in enumerate(({"stages": 1}, {"stages": 2, "layers": (3, 1)})):
        step(own, number)
        step(trainer, number)
        before, version = state(trainer), trainer.version
        assert relayout(trainer, **pipeline) > 0
        assert state(trainer) == before and trainer.version == version == number + 1
        assert [path.name for path in (run / RELAYOUT).iterdir()] == [f"version-{version}"]
    expected, found = step(own, 3), step(trainer, 3)
    for name in found.keys() - {"train/padded_tokens", "train/micro_batches"}:
        assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    (plain, _), (staged, _) = weights(own), weights(trainer)
    assert largest_difference(plain, staged) < 1e-6


def test_the_same_layout_goes_on_bit_for_bit_and_lost_ranks_come_back_in_it(
    folder, trainer, run, tmp_path
):
    """Killed while they write for the next switch, from what they wrote for the last one."""
    layout = trainer._setup.train.pipeline
    trainer.save(tmp_path / "newer")
    assert (run / RELAYOUT).exists()  # the newest checkpoint may turn out to be damaged
    expected = [step(trainer, number) for number in (5, 6)]
    after = state(trainer)
    trainer.load(tmp_path / "newer")
    assert not (run / RELAYOUT).exists()
    assert asyncio.run(trainer.relayout(layout)) > 0
    assert step(trainer, 5) == expected[0]
    trainer._relayout, trainer._ranks.kill_at = Wish((2, 2)), "save"
    assert step(trainer, 6) == expected[1]  # it is done, and not to be taken again
    assert trainer.how_lost() is not None
    with pytest.raises(RanksLost):
        asyncio.run(trainer.hand_over())
    older = tmp_path / "older"
    TorchTrainer(build_learner(setup_of(folder)), in_place=False).save(older)
    asyncio.run(trainer.restore(older, lambda: None))
    assert trainer._setup.train.pipeline == layout and state(trainer) == after


def test_a_layout_in_which_a_process_is_lost_is_given_up(trainer, tmp_path):
    layout = trainer._setup.train.pipeline
    trainer.save(tmp_path)
    step(trainer, 7)
    expected = state(trainer)
    trainer.load(tmp_path)
    trainer._relayout, trainer._ranks.kill_at = Wish((2, 2)), "load"
    step(trainer, 7)
    assert trainer.how_lost() is None
    assert trainer._setup.train.pipeline == layout and state(trainer) == expected


def test_state_that_nobody_can_read_leaves_the_way_from_the_checkpoint(trainer, run, tmp_path):
    layout = trainer._setup.train.pipeline
    trainer.save(tmp_path)
    step(trainer, 7)
    expected, version = state(trainer), trainer.version
    trainer.load(tmp_path)
    trainer._relayout, trainer._ranks.spoil = Wish((2, 2)), run / RELAYOUT
    step(trainer, 7)  # it is done
    assert trainer.version == version and trainer.how_lost() is not None
    asyncio.run(trainer.restore(tmp_path, lambda: None))
    assert trainer._setup.train.pipeline == layout and state(trainer) == expected
    assert not [*(run / RELAYOUT).iterdir()]


def test_torchruns_processes_keep_their_layout(trainer):
    """The last test with these processes."""
    before, trainer._ranks.torchrun = trainer.pids, True
    with pytest.raises(ValueError, match="torchrun has started cannot be started anew"):
        relayout(trainer, stages=2, layers=(2, 2))
    assert trainer.pids == before and state(trainer)


# --- when -----------------------------------------------------------------------------------------


def outcomes(slowness: float, trips_s: float) -> list[StepOutcome]:
    """Of two stages of two shards, three layers each: the first stage is so much slower, and a
    message between its shards takes so long."""
    ranks = []
    for rank in range(4):
        op_s = 0.1 * (slowness if rank < 2 else 1.0)
        times = StageTimes(
            stage=rank // 2,
            num_layers=3,
            ops=dict.fromkeys(KINDS, ((Load(tokens=64), op_s),) * 8),
            from_previous=((1 << 14, 1e-3),) * 8 if rank > 1 else (),
            from_next=((1 << 14, 1e-3),) * 8 if rank < 2 else (),
            peak_live_tokens=64,
            busy_s=8 * 3 * op_s,
            waiting_s=0.0,
            round_trips=((1, trips_s if rank < 2 else 1e-3),) if rank % 2 == 0 else (),
            shard_bytes=float(100 * NUM_BYTES),
        )
        sums = StepSums(seconds=3.0)
        ranks.append(
            StepOutcome(
                sums=sums,
                grad_norm=1.0,
                learning_rate=1.0,
                critic_grad_norm=None,
                peak_memory_bytes=0,
                stage_times=times,
            )
        )
    return ranks


@pytest.mark.parametrize(
    ("relayout", "torchrun", "said"),
    [
        ("propose", False, "train.pipeline.relayout=do has that done"),
        ("propose", True, "--resume it with train.pipeline.layers=[2,4]"),
        ("do", True, "--resume it with train.pipeline.layers=[2,4]"),
        ("do", False, "the trainer's processes start anew so"),
    ],
)
def test_a_layout_is_told_once(tmp_path, caplog, relayout, torchrun, said):
    pipeline = PipelineConfig(stages=2, relayout=relayout)
    setup = setup_of(tmp_path)
    setup = dataclasses.replace(
        setup,
        train=dataclasses.replace(setup.train, processes=4, pipeline=pipeline),
        total_steps=None,
    )
    relays, overseer = Relayout.of(setup, can_switch=not torchrun), Overseer(pipeline, 2)
    assert relays is not None
    taken = []
    for version in range(100, 130):
        found = outcomes(2.0, 1e-3)
        overseer.observe(version, [one.stage_times for one in found])
        taken.append(
            relays.observe(version, found, overseer=overseer, places=(0, 1, 2, 3), switch_s=9.0)
        )
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "a sweep would" in message]
    assert len(told) == 1 and said in told[0] and "takes some 9 s" in told[0]
    layout = Layout(layers=(2, 4), places=(0, 1, 2, 3))
    assert [one for one in taken if one] == ([layout] if "start anew so" in said else [])


def test_shards_that_reach_one_another_slowly_are_parted(tmp_path, caplog):
    pipeline = PipelineConfig(stages=2, relayout="do")
    setup = setup_of(tmp_path)
    setup = dataclasses.replace(
        setup, train=dataclasses.replace(setup.train, processes=4, pipeline=pipeline)
    )
    setup = dataclasses.replace(setup, total_steps=1000)
    relays, overseer = Relayout.of(setup, can_switch=True), Overseer(pipeline, 2)
    assert relays is not None
    taken, places = [], (0, 2, 3, 1)  # shards of the first stage live at places 0 and 2
    for version in range(1, 12):
        found = outcomes(1.0, 1e-3 if version < 6 else 50e-3)
        overseer.observe(version, [one.stage_times for one in found])
        taken.append(relays.observe(version, found, overseer=overseer, places=places, switch_s=9.0))
    assert [one.places for one in taken if one] == [(0, 3, 2, 1)]
    assert "between places 0 and 2, of the same stage, is slow" in caplog.text
    never = dataclasses.replace(pipeline, relayout="never")
    setup = dataclasses.replace(setup, train=dataclasses.replace(setup.train, pipeline=never))
    assert Relayout.of(setup, can_switch=True) is None


@pytest.mark.parametrize("size", range(2, 8))
def test_every_two_shards_meet_once_and_nobody_twice_in_a_round(size):
    partners = [list(partners_of(own, size)) for own in range(size)]
    for own, found in enumerate(partners):
        assert sorted([*found, own]) == list(range(size))
    waiting = [list(found) for found in partners]
    while any(waiting):  # each waits for its next partner: somebody always has one who waits back
        pairs = [
            (one, row[0]) for one, row in enumerate(waiting) if row and waiting[row[0]][0] == one
        ]
        assert pairs
        for one, _ in pairs:
            waiting[one].pop(0)


# --- places ---------------------------------------------------------------------------------------


class Place:
    """A host on which nothing is started; it takes down what was to be."""

    name = "nowhere"

    def __init__(self) -> None:
        self.started: list[str] = []

    def start(
        self, module: str, name: str, *, guarded: bool, environment: Mapping[str, str | None]
    ) -> tuple[Any, Line]:
        self.started.append(f"rank {environment['RANK']} on {environment['LOCAL_RANK']}")
        ours, theirs = Line.pair()
        theirs.close()
        return Nobody(), ours


class Nobody:
    pid = 0

    def is_stopped(self) -> bool:
        return False

    def how_ended(self, wait_s: float = 0.0) -> str:
        return "never was"

    def kill(self) -> None: ...

    def close(self) -> None: ...


def test_ranks_change_places():
    hosts = [Place() for _ in range(4)]
    ranks = Ranks(4, [RankPlace(number % 2, host, {}) for number, host in enumerate(hosts)])
    ranks.start_anew((0, 2, 1, 3))
    ranks.start_anew()  # as after a loss
    ranks.close()
    first, second, third, fourth = (host.started for host in hosts)
    assert first == ["rank 0 on 0"] * 3 and fourth == ["rank 3 on 1"] * 3
    assert second == ["rank 1 on 1", *["rank 2 on 1"] * 2]
    assert third == ["rank 2 on 0", *["rank 1 on 0"] * 2]
