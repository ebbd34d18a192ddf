"""A run that takes turns on its devices with others: engines and trainer are there only while their
pool is, and it computes what it computes alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.profile.phase_times import PhaseTimes
from rollpacker.cluster.seats.seat import Alone, LeaseLost
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Enter, Leave
from rollpacker.core.events import Committed, EngineReady, Entered, StopRequested, TrainerLost
from rollpacker.core.records import POOL_SWITCH, Note
from rollpacker.engines.engine import EngineError, GenerationRequest
from rollpacker.report.log import EventLog
from rollpacker.run.error_messages import classify
from rollpacker.run.errors import DeadlineExceeded, EnginesLost, HostsLost
from rollpacker.run.replay import replay
from rollpacker.trainer.trainer import HandOver, ScoreRequest, TokenScores, TrainerError
from tests.run.fakes import FakeEngine, FakeTrainer, drive, make, run_config
from tests.run.test_driver import recorded, streaming
from tests.run.test_engines import Fleet, MortalEngine, events, several, when
from tests.run.test_trainer_faults import Mortal


class Turns(Alone):
    """A seat that notes whose turn it is. `gates`: by pool and how often it was asked for before,
    what is waited for until it is there."""

    def __init__(self, gates: dict[tuple[str, int], threading.Event] | None = None) -> None:
        self.gates = gates or {}
        self.held: set[str] = set()
        self.said: list[tuple[str, ...]] = []
        self.quarrels: list[str] = []

    def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
        number = sum(said[:2] == ("ask", pool) for said in self.said)
        self.said.append(("ask", pool, purpose))
        gate = self.gates.get((pool, number))
        while gate is not None and not gate.is_set():
            if given_up.wait(0.005):
                self.said.append(("given up", pool))
                return False
        if self.held:
            self.quarrels.append(f"{pool} beside {self.held}")
        self.held.add(pool)
        self.said.append(("enter", pool, purpose))
        return True

    def leave(self, pool: str) -> None:
        if pool not in self.held:
            self.quarrels.append(f"{pool} was left and not held")
        self.held.discard(pool)
        self.said.append(("leave", pool))

    def needs(self, pool: str, who: str) -> None:
        if pool not in self.held:
            self.quarrels.append(f"{who} without {pool}")

    def purposes(self, pool: str) -> list[str]:
        return [said[2] for said in self.said if said[:2] == ("enter", pool)]


class Sleeper(MortalEngine):
    """An engine that is asleep at first, and notes which version it sampled from."""

    def __init__(self, seat: Turns, slow_s: float = 0.0, wrong: bool = False) -> None:
        super().__init__(step_s=0.0)
        self.seat, self.slow_s, self.wrong = seat, slow_s, wrong
        self.awake = False
        self.num_loads = 0
        self.versions: list[int] = []

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if not self.awake:
            self.seat.quarrels.append("it was asked while asleep")
        self.seat.needs("rollout", "generation")
        self.versions += [self.version] * len(requests)
        super().submit(requests)

    async def update_weights(self, version: int, weights: object = None) -> None:
        self.seat.needs("rollout", "loading")
        self.num_loads += 1
        await super().update_weights(version, weights)

    async def offload(self) -> None:
        self._check()
        if self._live:
            raise EngineError("samples run")
        self.seat.needs("rollout", "offload")
        self.awake = False

    async def reload(self) -> None:
        self._check()
        await asyncio.sleep(self.slow_s)
        self.seat.needs("rollout", "reload")
        self.awake = True

    def weight_probe(self) -> str:
        return "another" if self.wrong else super().weight_probe()


@dataclass
class Parking(Mortal):
    """A trainer that is parked at first. What it cannot do then is noted."""

    seat: Turns = field(default_factory=Turns)
    awake: bool = False
    hangs_in: str = ""

    def _works(self, what: str) -> None:
        self.seat.needs("train", what)
        if not self.awake and not self.dead:
            self.seat.quarrels.append(f"{what} while parked")

    async def score(
        self, requests: Sequence[ScoreRequest], replicas: Sequence[int] | None = None
    ) -> list[TokenScores]:
        self._works("score")
        return await super().score(requests, replicas)

    async def accumulate(self, samples: Any, replicas: Any = None) -> None:
        self._works("accumulate")
        if self.hangs_in == "accumulate":
            await asyncio.sleep(1000)
        await super().accumulate(samples, replicas)

    async def apply(self) -> dict[str, float]:
        self._works("apply")
        return await super().apply()

    async def hand_over(self) -> HandOver:
        self._works("hand_over")
        return await super().hand_over()

    async def offload(self) -> None:
        if self.hangs_in == "offload":
            await asyncio.sleep(1000)
        self._lives("offload")
        self.seat.needs("train", "offload")
        self.awake = False

    async def reload(self, replicas: Sequence[int] | None = None) -> None:
        self._lives("reload")
        self.seat.needs("train", "reload")
        self.awake = True

    def save(self, folder: Path) -> None:
        if (self.awake and not self.dead) or "train" in self.seat.held:
            self.seat.quarrels.append("a checkpoint of a trainer that is not parked")
        super().save(folder)

    async def restore(self, checkpoint: Path | None, tell: Callable[[], None]) -> None:
        self.seat.needs("train", "restore")
        self.awake = True
        await super().restore(checkpoint, tell)


def in_processes(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, processes=2))


def shared(
    folder: Path,
    *,
    steps: int = 6,
    seat: Turns | None = None,
    engine: Callable[[Turns], FakeEngine] = Sleeper,
    config: Callable[[RunConfig], RunConfig] = in_processes,
    deadlines: dict[str, float] | None = None,
    evaluates: bool = True,
    **trainer: Any,
) -> tuple[Any, Any, Turns, Parking, Any]:
    seat = seat or Turns()
    parked = Parking(seat=seat, **trainer)
    made = engine(seat)
    settings = config(run_config(steps=steps, **(deadlines or {})))
    controller, recorder = make(
        folder, settings, engine=made, trainer=parked, seat=seat, evaluates=evaluates
    )
    return controller, recorder, seat, parked, made


def purposes_of(recorder: Any) -> list[str]:
    return [f"{command.pool}: {command.purpose}" for command in recorded(recorder, Enter)]


def test_it_computes_what_it_does_alone_with_its_parts_there_only_in_their_turn(
    tmp_path: Path,
) -> None:
    alone = FakeTrainer()
    (tmp_path / "alone").mkdir()
    controller, _ = make(tmp_path / "alone", in_processes(run_config()), trainer=alone)
    assert drive(controller) == "every step is done"
    (tmp_path / "shared").mkdir()
    controller, recorder, seat, trainer, _ = shared(tmp_path / "shared")
    assert drive(controller) == "every step is done"
    assert trainer.trained == alone.trained and trainer.weights == alone.weights
    assert seat.quarrels == [] and trainer.version > 0
    assert seat.purposes("rollout").count("evaluation") == 4, "before the run and in commits"
    assert {"round"} < {*seat.purposes("rollout")} and {*seat.purposes("train")} == {"step"}
    assert len(recorded(recorder, Leave)) == len(recorded(recorder, Enter))
    parkings = [
        one for one in recorder.entries if isinstance(one, Note) and one.name == POOL_SWITCH
    ]
    assert parkings
    phases = PhaseTimes()
    found = [done for one in recorder.entries if (done := phases.feed(one)) is not None]
    evaluated = [one.step for one in found if one.kind.endswith("+evaluation")]
    assert evaluated == [2, 4, 6] and [one.step for one in found] == [1, 2, 3, 4, 5, 6]
    replayed = replay(list(EventLog(tmp_path / "shared" / "events.jsonl")))
    assert replayed.difference is None


def test_the_cluster_hears_of_a_commit_before_it_is_asked_for_the_next_round(
    tmp_path: Path,
) -> None:
    """It moves a job, or empties a drained node, at commits, and nobody who holds devices."""
    controller, recorder, seat, *_ = shared(tmp_path, evaluates=False)
    feed = recorder.feed

    def noting(entry: Any) -> None:
        feed(entry)
        if isinstance(getattr(entry, "event", None), Committed):
            seat.said.append(("committed",))

    recorder.feed = noting
    drive(controller)
    said = [one for one in seat.said if one in (("ask", "rollout", "round"), ("committed",))]
    assert len(said) >= 12
    assert said == [("ask", "rollout", "round"), ("committed",)] * (len(said) // 2)


def test_an_engine_that_slept_through_updates_samples_from_the_last(tmp_path: Path) -> None:
    controller, _, _, _, engine = shared(tmp_path)
    versions = []
    take = controller.bus.take

    def noting(event: Any) -> None:
        if isinstance(event, Entered) and event.pool == "rollout":
            versions.append((engine.version, controller.parts.trainer.version))
        take(event)

    controller.bus.take = noting
    drive(controller)
    assert versions and all(has == trained for has, trained in versions), versions
    assert engine.versions == sorted(engine.versions) and len({*engine.versions}) > 4
    assert engine.num_loads == len({*versions}), "an evaluation's weights are the next round's"


def test_weights_that_did_not_arrive_are_never_sampled_from(tmp_path: Path) -> None:
    controller, *_, engine = shared(tmp_path, engine=lambda seat: Sleeper(seat, wrong=True))
    with pytest.raises(TrainerError, match="the transfer went wrong"):
        drive(controller)
    assert engine.versions == []


def test_gradients_that_may_come_early_wait_for_their_pool(tmp_path: Path) -> None:
    controller, _, seat, trainer, _ = shared(
        tmp_path, config=lambda config: in_processes(streaming(steps=6))
    )
    assert drive(controller) == "every step is done"
    assert seat.quarrels == [] and trainer.version > 0


def later(event: threading.Event, seconds: float) -> None:
    threading.Timer(seconds, event.set).start()


def test_others_may_have_a_pool_for_longer_than_any_deadline(tmp_path: Path) -> None:
    gates = {(pool, 2): threading.Event() for pool in ("rollout", "train")}
    for gate in gates.values():
        later(gate, 3.5)
    controller, recorder, _, _, _ = shared(
        tmp_path,
        seat=Turns(gates),
        steps=4,
        deadlines={"generation_s": 2.0, "sync_s": 2.0, "train_s": 2.0, "reward_s": 2.0},
    )
    assert drive(controller) == "every step is done"
    assert controller.bus.job.waited_s > 2.0
    seconds = [one.seconds for one in recorder.entries if getattr(one, "name", "") == "evaluation"]
    assert max(seconds) < 3.0, "no wait is part of an evaluation"


def test_a_part_that_does_not_wake_up_is_not_waited_for(tmp_path: Path) -> None:
    controller, *_ = shared(
        tmp_path, engine=lambda seat: Sleeper(seat, slow_s=60.0), deadlines={"sync_s": 0.3}
    )
    with pytest.raises(DeadlineExceeded, match="engines to wake up"):
        drive(controller)


def test_a_trainer_that_does_not_let_go_is_not_saved_from(tmp_path: Path) -> None:
    controller, _, seat, _, _ = shared(tmp_path, hangs_in="offload", deadlines={"sync_s": 0.3})
    with pytest.raises(DeadlineExceeded, match="let go of its devices"):
        drive(controller)
    assert seat.quarrels == [] and seat.held == {"train"}, "until its processes have ended"
    assert not (tmp_path / "checkpoints" / "latest").exists()


def stop_when(controller: Any, condition: Callable[[], bool]) -> threading.Thread:
    def work() -> None:
        while not condition():
            time.sleep(0.002)
        controller.request_stop("enough")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_wish_to_stop_while_it_waits_ends_the_run_without_the_pool(tmp_path: Path) -> None:
    seat = Turns({("rollout", 3): threading.Event()})
    controller, *_ = shared(tmp_path, seat=seat, evaluates=False)
    stop_when(controller, lambda: sum(said[:2] == ("ask", "rollout") for said in seat.said) == 4)
    assert drive(controller) == "enough"
    assert seat.quarrels == [] and seat.said[-1] == ("given up", "rollout") and not seat.held
    assert (tmp_path / "checkpoints" / "latest").exists(), "what was done is saved"


def test_a_pool_that_comes_when_nobody_wants_it_any_more_is_left_again(tmp_path: Path) -> None:
    seat = Turns()
    controller, recorder, _, trainer, _ = shared(
        tmp_path, seat=seat, engine=lambda seat: Sleeper(seat, slow_s=0.3)
    )
    # It has the pool, and wakes up.
    stop_when(controller, lambda: trainer.version == 1 and "rollout" in seat.held)
    assert drive(controller) == "enough"
    assert seat.quarrels == []
    assert isinstance(recorded(recorder, Leave)[-1], Leave)
    entered = [event.pool for event in events(recorder, Entered)]
    assert entered.count("rollout") == seat.purposes("rollout").__len__() - 1
    assert len(events(recorder, StopRequested)) == 1


def test_a_trainer_that_is_lost_is_brought_back_only_where_it_has_its_devices(
    tmp_path: Path,
) -> None:
    plain = FakeTrainer()
    (tmp_path / "plain").mkdir()
    drive(make(tmp_path / "plain", in_processes(run_config()), trainer=plain)[0])
    moments = [("accumulate", 2), ("apply", 3), ("save", 2), ("offload", 3), ("reload", 4)]
    for moment in [*moments, ("hand_over", 3), ("offload", 4)]:
        folder = tmp_path / "-".join(map(str, moment))
        folder.mkdir()
        controller, recorder, seat, trainer, _ = shared(folder, dies_in=[moment])
        assert drive(controller) == "every step is done", moment
        assert trainer.trained[-1] == plain.trained[-1], moment
        assert trainer.version == plain.version and seat.quarrels == [], moment
        assert len(events(recorder, TrainerLost)) == 1, moment
        asked = "train: recovery" in purposes_of(recorder)
        in_checkpoint = moment in [("save", 2), ("offload", 4)]
        assert asked == in_checkpoint, "the others had the pool, or waited for their next turn"


def test_one_that_dies_while_others_have_its_devices_comes_back_in_its_turn(tmp_path: Path) -> None:
    gate = threading.Event()
    seat = Turns({("rollout", 3): gate})
    controller, recorder, _, trainer, _ = shared(tmp_path, seat=seat, evaluates=False)

    def work() -> None:
        while sum(said[:2] == ("ask", "rollout") for said in seat.said) < 4:
            time.sleep(0.002)
        trainer.dead = "process 1 was killed in its sleep"
        time.sleep(0.8)
        assert not events(recorder, TrainerLost)
        gate.set()

    threading.Thread(target=work, daemon=True).start()
    assert drive(controller) == "every step is done"
    assert len(events(recorder, TrainerLost)) == 1 and seat.quarrels == []
    assert "train: recovery" not in purposes_of(recorder)


def test_a_trainer_that_dies_on_its_way_back_keeps_the_pool_for_the_next_try(
    tmp_path: Path,
) -> None:
    controller, recorder, seat, _, _ = shared(tmp_path, dies_in=[("save", 1), ("restore", 1)])
    assert drive(controller) == "every step is done"
    assert len(events(recorder, TrainerLost)) == 2 and seat.quarrels == []
    assert purposes_of(recorder).count("train: recovery") == 1


def test_a_lost_lease_ends_the_run_in_the_middle_of_what_it_does(tmp_path: Path) -> None:
    controller, _, seat, _, _ = shared(tmp_path, hangs_in="accumulate")

    def lose() -> None:
        while "train" not in seat.held:
            time.sleep(0.002)
        controller.end_at_once(LeaseLost("the lease of train is over"))

    threading.Thread(target=lose, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(LeaseLost) as caught:
        drive(controller)
    assert time.monotonic() - began < 100.0  # and not the 1000 s for which it hangs
    assert classify(caught.value)[0] == 6


def test_a_lease_that_is_lost_before_the_run_begins_ends_it_too(tmp_path: Path) -> None:
    controller, *_ = shared(tmp_path)
    controller.end_at_once(LeaseLost("the lease of rollout is over"))
    with pytest.raises(LeaseLost):
        drive(controller)


def test_a_cluster_out_of_reach_ends_the_run_resumable(tmp_path: Path) -> None:
    class Unreachable(Turns):
        def enter(self, pool: str, purpose: str, *, given_up: threading.Event) -> bool:
            raise ConnectionRefusedError("nobody listens")

    controller, *_ = shared(tmp_path, seat=Unreachable())
    with pytest.raises(HostsLost, match="--resume") as caught:
        drive(controller)
    assert classify(caught.value)[0] == 6


def test_one_that_is_cancelled_while_it_waits_gives_up(tmp_path: Path) -> None:
    seat = Turns({("rollout", 0): threading.Event()})
    controller, *_ = shared(tmp_path, seat=seat)

    async def go() -> None:
        running = asyncio.ensure_future(controller.run())
        while not seat.said:
            await asyncio.sleep(0.002)
        running.cancel()
        try:
            await running
        finally:
            await controller.close()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(go())
    until = time.monotonic() + 60
    while seat.said[-1] != ("given up", "rollout"):
        assert time.monotonic() < until
        time.sleep(0.01)


# -- engines that come and go ----------------------------------------------------------------------


def of_several(folder: Path, seat: Turns, fleet: Fleet, steps: int = 30) -> tuple[Any, Any]:
    trainer = Parking(seat=seat)
    return make(
        folder,
        in_processes(several(steps=steps)),
        engines=fleet.engines,
        trainer=trainer,
        seat=seat,
    )


class Newcomer(Sleeper):
    """It loads when it is made, and is awake then."""

    def __init__(self, seat: Turns, incarnation: int) -> None:
        if incarnation:
            time.sleep(0.05)
            seat.needs("rollout", "a new engine")
        super().__init__(seat)
        self.awake = incarnation > 0


def test_one_that_dies_while_it_sleeps_is_replaced_when_the_pool_is_there(tmp_path: Path) -> None:
    seat = Turns()
    fleet = Fleet(make=lambda number, incarnation: Newcomer(seat, incarnation))
    controller, recorder = of_several(tmp_path, seat, fleet)
    killed = threading.Event()

    def kill(event: Any) -> bool:
        return isinstance(event, Entered) and event.pool == "train" and not killed.is_set()

    def die() -> None:
        killed.set()
        fleet.newest(1).kill("it was killed in its sleep")

    when(recorder, kill, die)
    assert drive(controller) == "every step is done"
    assert killed.is_set() and len(events(recorder, EngineReady)) == 1
    assert seat.quarrels == []


def test_one_that_does_not_wake_up_is_lost_and_not_the_run(tmp_path: Path) -> None:
    seat = Turns()

    class Sleepy(Newcomer):
        async def reload(self) -> None:
            if self.version == 3:
                raise EngineError("it does not wake up")
            await super().reload()

    fleet = Fleet(make=lambda n, i: (Sleepy if (n, i) == (1, 0) else Newcomer)(seat, i))
    controller, recorder = of_several(tmp_path, seat, fleet)
    assert drive(controller) == "every step is done"
    assert len(events(recorder, EngineReady)) == 1 and seat.quarrels == []


def test_all_engines_lost_for_good_while_an_evaluation_waits_end_the_run(tmp_path: Path) -> None:
    seat = Turns({("rollout", 0): threading.Event()})
    fleet = Fleet(make=lambda number, incarnation: Newcomer(seat, incarnation))
    controller, _ = of_several(tmp_path, seat, fleet)

    def work() -> None:
        while not seat.said:
            time.sleep(0.002)
        for number in (0, 1):
            fleet.newest(number).kill("gone")

    threading.Thread(target=work, daemon=True).start()
    timer = threading.Timer(1.0, seat.gates["rollout", 0].set)
    timer.start()
    assert drive(controller) == "every step is done"
    assert seat.quarrels == []


def test_a_run_that_has_lost_its_engines_for_good_asks_for_no_pool(tmp_path: Path) -> None:
    """The core answers nothing then, and nobody is to wait for that."""
    seat = Turns()
    fleet = Fleet(make=lambda number, incarnation: Newcomer(seat, incarnation))
    controller, _ = of_several(tmp_path, seat, fleet)
    begin = controller.parts.audience.begin

    async def begin_without(step: int) -> None:
        await begin(step)
        assert controller.bus.job.fleet is not None
        controller.bus.job.fleet.given_up = "engine 0 was lost 3 times"

    controller.parts.audience.begin = begin_without
    with pytest.raises(EnginesLost, match="3 times"):
        drive(controller)
    assert seat.said == []
