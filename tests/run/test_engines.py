"""Several engines: one is lost, hangs, lies or has numbers that are none, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from benchmarks.exactly_once import check
from rollpacker.config.schema import RunConfig
from rollpacker.core.commands import Launch, Place, Replace
from rollpacker.core.events import (
    EngineLost,
    EngineReady,
    Event,
    SampleFailed,
    SampleGenerated,
    SampleMoved,
)
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.records import Entry, Record
from rollpacker.engines.engine import (
    NOT_NUMBERS,
    Carried,
    EngineError,
    EngineOutput,
    GenerationRequest,
    SamplingParams,
)
from rollpacker.report.log import EventLog
from rollpacker.run.driver import Controller
from rollpacker.run.errors import EnginesLost
from rollpacker.run.ports.deliveries import Deliveries
from rollpacker.run.ports.engines import Engines
from rollpacker.run.ports.held import Handle
from rollpacker.run.replay import replay
from rollpacker.trainer.trainer import HandOver, NonFiniteError
from rollpacker.weights.delivery import Delivery
from tests.run.fakes import FakeEngine, FakeTrainer, Recorder, drive, make, run_config


class MortalEngine(FakeEngine):
    """One that can be killed, like a process: it says so once, and takes nothing any more."""

    def __init__(self, step_s: float = 0.002) -> None:
        super().__init__(step_s=step_s)
        self.is_dead = False
        self._on_error = lambda error: None
        self.why = "closed"

    def kill(self, why: str = "killed") -> None:
        with self._wake:
            if self.is_dead or self._closed:
                return
            self.is_dead, self._closed, self.why = True, True, why
            self._live.clear()
        self._on_error(EngineError(why))

    def _check(self) -> None:
        if self._closed:
            raise EngineError(self.why)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        with self._wake:
            twice = [r.sample for r in requests if r.sample in self._live]
        assert not twice, f"submitted twice: {twice}"
        super().submit(requests)

    def abort(self, samples: Sequence[SampleId]) -> None:
        self._check()
        super().abort(samples)

    async def update_weights(self, version: int, weights: object = None) -> None:
        self._check()
        assert not self._live, "the weights change while samples run"
        await super().update_weights(version, weights)


class Fleet:
    """Engines by number and incarnation, and how they are made."""

    def __init__(
        self, count: int = 2, make: Callable[[int, int], FakeEngine] | None = None
    ) -> None:
        self.made: dict[tuple[int, int], Any] = {}
        self._make = make or (lambda number, incarnation: MortalEngine())
        self.engines = Engines([self.make(number, 0) for number in range(count)], self.make)

    def make(self, number: int, incarnation: int, tensor_parallel: int = 1) -> FakeEngine:
        engine = self.made[number, incarnation] = self._make(number, incarnation)
        return engine

    def newest(self, number: int) -> Any:
        return self.made[max(key for key in self.made if key[0] == number)]


def several(steps: int = 6, count: int = 2, **rollout: Any) -> RunConfig:
    config = run_config(steps=steps)
    return replace(config, rollout=replace(config.rollout, engines=count, **rollout))


def commands(recorder: Recorder, kind: type) -> list[Any]:
    records = [entry for entry in recorder.entries if isinstance(entry, Record)]
    return [c for record in records for c in record.commands if isinstance(c, kind)]


def events(recorder: Recorder, kind: type) -> list[Any]:
    records = [entry for entry in recorder.entries if isinstance(entry, Record)]
    return [record.event for record in records if isinstance(record.event, kind)]


def when(recorder: Recorder, happens: Callable[[Event], bool], do: Callable[[], object]) -> None:
    """Do it once, in a thread of its own, as soon as such an event is logged."""
    original = recorder.feed
    done: list[bool] = []

    def feed(entry: Any) -> None:
        original(entry)
        if not done and isinstance(entry, Record) and happens(entry.event):
            done.append(True)
            threading.Thread(target=do).start()

    recorder.feed = feed  # type: ignore[method-assign]


def stop_when(controller: Controller, recorder: Recorder, happens: Callable[[Event], bool]) -> None:
    """End the run with "shown" once such an event is logged, however long that takes."""
    when(recorder, happens, lambda: controller.request_stop("shown"))


def from_a_new_engine(event: Event) -> bool:
    return isinstance(event, SampleGenerated) and event.incarnation > 0


def ready(count: int) -> Callable[[Event], bool]:
    """From the so-manieth engine on that has taken a lost one's place."""
    seen = iter(range(count - 1))
    return lambda event: isinstance(event, EngineReady) and next(seen, None) is None


def generated(count: int) -> Callable[[Event], bool]:
    """From the so-manieth finished sample on."""
    seen = iter(range(count))
    return lambda event: isinstance(event, SampleGenerated) and next(seen, None) is None


def is_whole(folder: Path, stopped: Controller | None = None) -> dict[str, Any]:
    """Everything was trained once or dropped, or is still in the queue of a run that was stopped,
    and the core says the same again."""
    result = check(folder / "events.jsonl")
    queued = [one for one in result["problems"] if one.endswith(" was settled 0 times")]
    assert len(queued) == (stopped.parts.job.num_queued if stopped else 0)
    assert len(result["problems"]) == len(queued), result["problems"]
    assert replay(EventLog(folder / "events.jsonl")).difference is None
    return result


def test_two_engines_share_a_round(tmp_path: Path) -> None:
    fleet = Fleet()
    controller, recorder = make(tmp_path, several(), engines=fleet.engines)
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    by_engine = Counter(event.engine for event in events(recorder, SampleGenerated))
    assert min(by_engine[0], by_engine[1]) > 0.3 * by_engine.total()
    assert fleet.newest(0).version == fleet.newest(1).version == controller.parts.trainer.version


def test_a_lost_engine_is_replaced_and_its_samples_are_placed_again(tmp_path: Path) -> None:
    fleet = Fleet()
    controller, recorder = make(tmp_path, several(steps=1000), engines=fleet.engines)
    when(recorder, generated(20), lambda: fleet.newest(1).kill("signal 9"))
    stop_when(controller, recorder, from_a_new_engine)
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    (lost,) = events(recorder, EngineLost)
    assert (lost.engine, lost.incarnation, lost.reason) == (1, 0, "signal 9")
    (ready,) = events(recorder, EngineReady)
    assert (ready.engine, ready.incarnation) == (1, 1)
    (replacing,) = commands(recorder, Replace)
    assert (replacing.engine, replacing.incarnation) == (1, 1)
    later = [e for e in events(recorder, SampleGenerated) if e.incarnation == 1]
    assert later and {e.engine for e in later} == {1}
    # Nobody was launched twice, and no retry was used: the samples that were placed again are the
    # launched ones.
    launched = {s for command in commands(recorder, Launch) for s in command.samples}
    placed = {s for command in commands(recorder, Place) for s in command.samples}
    assert placed <= launched
    assert not events(recorder, SampleFailed)


def test_all_engines_are_lost_at_once(tmp_path: Path) -> None:
    fleet = Fleet()
    controller, recorder = make(tmp_path, several(steps=1000), engines=fleet.engines)
    when(recorder, generated(20), lambda: [fleet.newest(n).kill() for n in (0, 1)])
    stop_when(controller, recorder, ready(2))
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    assert len(events(recorder, EngineLost)) == 2


@pytest.mark.parametrize("evaluates", [False, True], ids=["in a round", "in an evaluation"])
def test_losses_without_a_step_between_them_end_the_run(tmp_path: Path, evaluates: bool) -> None:
    def dying(number: int, incarnation: int) -> FakeEngine:
        engine = MortalEngine(step_s=0.05)
        if number == 1 or evaluates:
            submit = engine.submit

            def deadly(requests: Any) -> None:
                submit(requests)
                threading.Timer(0.01, engine.kill, ["out of memory"]).start()

            engine.submit = deadly  # type: ignore[method-assign]
        return engine

    fleet = Fleet(make=dying)
    controller, _ = make(tmp_path, several(steps=50), engines=fleet.engines, evaluates=evaluates)
    with pytest.raises(EnginesLost, match=r"engine \d was lost 3 times .*out of memory"):
        drive(controller)
    assert replay(EventLog(tmp_path / "events.jsonl")).difference is None


def test_an_evaluation_goes_on_without_a_lost_engine(tmp_path: Path) -> None:
    fleet = Fleet(make=lambda number, incarnation: MortalEngine(step_s=0.01))
    original = fleet.newest(1).submit

    def submit(requests: Any) -> None:
        original(requests)
        threading.Timer(0.02, fleet.made[1, 0].kill).start()

    fleet.newest(1).submit = submit
    controller, recorder = make(tmp_path, several(steps=1), engines=fleet.engines)
    drive(controller)
    is_whole(tmp_path)
    (lost, *_) = events(recorder, EngineLost)
    assert lost.engine == 1
    first = next(e for e in recorder.entries if getattr(e, "name", "") == "evaluation")
    assert first.metrics["eval/no_verdict"] == 0


class NoNumbers(MortalEngine):
    """Says so of the first sample that it is given after it was told to."""

    broken = False

    def _finished(self, sample: SampleId, request: GenerationRequest, length: int) -> EngineOutput:
        if not self.broken:
            return super()._finished(sample, request, length)
        reason = f"{NOT_NUMBERS} at response token 3"
        return EngineOutput(SampleFailed(time_s=0, sample=sample, reason=reason))


def test_numbers_that_are_none_cost_one_engine(tmp_path: Path) -> None:
    fleet = Fleet(make=lambda number, incarnation: NoNumbers())
    controller, recorder = make(tmp_path, several(steps=1000), engines=fleet.engines)
    when(recorder, generated(20), lambda: setattr(fleet.newest(0), "broken", True))
    stop_when(controller, recorder, ready(1))
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    (lost,) = events(recorder, EngineLost)
    assert lost.engine == 0 and lost.reason.startswith(NOT_NUMBERS)
    assert not events(recorder, SampleFailed)


def test_numbers_that_are_none_on_two_engines_are_the_policys(tmp_path: Path) -> None:
    fleet = Fleet(make=lambda number, incarnation: NoNumbers())
    controller, recorder = make(tmp_path, several(steps=1000), engines=fleet.engines)

    def broken() -> None:
        for engine in list(fleet.made.values()):
            engine.broken = True

    when(recorder, generated(20), broken)
    with pytest.raises(NonFiniteError, match="logits are not numbers"):
        drive(controller)


def test_an_engine_that_cannot_take_new_weights_is_lost_and_not_the_run(tmp_path: Path) -> None:
    class Stale(MortalEngine):
        async def update_weights(self, version: int, weights: object = None) -> None:
            if version != 3:  # and says nothing
                await super().update_weights(version, weights)

    fleet = Fleet(make=lambda n, i: Stale() if (n, i) == (1, 0) else MortalEngine())
    controller, recorder = make(tmp_path, several(), engines=fleet.engines)
    drive(controller)
    is_whole(tmp_path)
    (lost,) = events(recorder, EngineLost)
    assert lost.engine == 1 and "weights are not the trainer's at version 3" in lost.reason


def test_an_engine_whose_update_hangs_is_lost_and_not_the_run(tmp_path: Path) -> None:
    class Hanging(MortalEngine):
        async def update_weights(self, version: int, weights: object = None) -> None:
            if version == 2:
                await asyncio.sleep(20)
            await super().update_weights(version, weights)

    config = several()
    config = replace(config, deadlines=replace(config.deadlines, sync_s=4.0))
    fleet = Fleet(make=lambda n, i: Hanging() if (n, i) == (0, 0) else MortalEngine())
    controller, recorder = make(tmp_path, config, engines=fleet.engines)
    drive(controller)
    is_whole(tmp_path)
    (lost,) = events(recorder, EngineLost)
    assert lost.engine == 0 and "did not take new weights within 2 s" in lost.reason


@pytest.mark.parametrize("evaluates", [False, True], ids=["in a round", "in an evaluation"])
def test_an_engine_that_stands_still_is_lost(tmp_path: Path, evaluates: bool) -> None:
    config = several(steps=3)
    config = replace(config, deadlines=replace(config.deadlines, heartbeat_s=0.3))
    fleet = Fleet()
    controller, recorder = make(tmp_path, config, engines=fleet.engines, evaluates=evaluates)
    fleet.newest(1).silent = True
    assert drive(controller) == "every step is done"
    is_whole(tmp_path)
    (lost,) = events(recorder, EngineLost)
    assert lost.engine == 1 and "no progress for 3.6 s" in lost.reason


def test_a_new_engine_has_the_weights_that_came_while_it_was_made(tmp_path: Path) -> None:
    trainer = FakeTrainer()

    def slow(number: int, incarnation: int) -> FakeEngine:
        while incarnation and trainer.version < 6:  # so version 5 was handed over
            time.sleep(0.01)
        return MortalEngine()

    fleet = Fleet(make=slow)
    config = several(steps=1000)
    controller, recorder = make(tmp_path, config, engines=fleet.engines, trainer=trainer)
    when(recorder, generated(5), lambda: fleet.newest(1).kill())
    stop_when(controller, recorder, from_a_new_engine)
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    (lost,), (ready,) = events(recorder, EngineLost), events(recorder, EngineReady)
    assert lost.time_s < ready.time_s and ready.version >= 5
    assert [e for e in events(recorder, SampleGenerated) if e.incarnation]


def test_an_engine_that_missed_a_delivery_reads_what_the_trainer_then_writes(
    tmp_path: Path,
) -> None:
    told: list[tuple[int, bool]] = []

    class Sending(FakeTrainer):
        holders = (1,)

        async def hand_over(self, delivery: Delivery | None = None) -> HandOver:
            told.append((self.version, delivery is not None))
            probe = f"version {self.version}"
            return HandOver(weights=None, probe=probe, is_delivered=delivery is not None)

    fleet = Fleet()
    fleet.engines.deliveries = Deliveries(
        "broadcast", "127.0.0.1", lambda address: cast(Any, SimpleNamespace(port=1))
    )
    controller, recorder = make(
        tmp_path, several(steps=1000), engines=fleet.engines, trainer=Sending()
    )
    when(recorder, generated(5), lambda: fleet.newest(1).kill())
    stop_when(controller, recorder, from_a_new_engine)
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    (ready,) = events(recorder, EngineReady)
    written = [version for version, delivered in told if not delivered]
    assert written and max(written) >= ready.version, "it waits for weights that can be read"
    assert (1, True) in told and len(written) < len(told)


def test_what_a_dead_engine_still_says_changes_nothing(tmp_path: Path) -> None:
    class Undead(MortalEngine):
        def kill(self, why: str = "killed") -> None:
            """It is taken for dead, and goes on."""
            self._on_error(EngineError(why))

        async def close(self) -> None:
            threading.Timer(0.05, setattr, (self, "_closed", True)).start()

    fleet = Fleet(make=lambda n, i: MortalEngine() if i else Undead(step_s=0.01))
    controller, recorder = make(tmp_path, several(steps=1000), engines=fleet.engines)
    when(recorder, generated(10), lambda: fleet.newest(1).kill())
    stop_when(controller, recorder, from_a_new_engine)
    assert drive(controller) == "shown"
    is_whole(tmp_path, controller)
    assert len(events(recorder, EngineLost)) == 1
    zombies = [e for e in events(recorder, SampleGenerated) if (e.engine, e.incarnation) == (1, 0)]
    assert zombies  # some of them before it was lost


@pytest.mark.parametrize("lie", ["twice", "version", "half"])
def test_an_engine_that_lies_is_lost(tmp_path: Path, lie: str) -> None:
    class Liar(MortalEngine):
        lies = False

        def _step(self) -> list[EngineOutput]:
            outputs = super()._step()
            if not (self.lies and outputs):
                return outputs
            self.lies = False
            output = outputs[0]
            if not isinstance(output.event, SampleGenerated):
                return outputs
            if lie == "twice":
                return [*outputs, output]
            if lie == "version":
                return [EngineOutput(structs.replace(output.event, version=99), output.response)]
            assert output.response is not None
            return [EngineOutput(output.event, replace(output.response, log_probs=()))]

    fleet = Fleet(make=lambda n, i: Liar())
    controller, recorder = make(tmp_path, several(steps=30), engines=fleet.engines)
    when(recorder, generated(10), lambda: setattr(fleet.newest(0), "lies", True))
    drive(controller)
    is_whole(tmp_path)
    losses = events(recorder, EngineLost)
    assert len(losses) <= 1 and all(lost.engine == 0 for lost in losses)


@pytest.mark.parametrize("seed", range(6))
def test_random_losses_lose_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(count=3, make=lambda n, i: MortalEngine(step_s=0.001))
    config = several(steps=1000, count=3, routing=rng.choice(["spread", "group"]))
    trainer = FakeTrainer(accumulate_s=0.003)
    controller, recorder = make(tmp_path, config, engines=fleet.engines, trainer=trainer)
    over = threading.Event()
    losses: list[EngineLost] = []

    def count(entry: Entry) -> None:
        if isinstance(entry, Record) and isinstance(entry.event, EngineLost):
            losses.append(entry.event)

    controller.bus.add_sink(count)

    def kill() -> None:
        while not over.wait(rng.uniform(0.002, 0.03)):
            with controller.bus.lock:
                # Three without a commit would end the run. One that is killed before it has taken
                # its place is lost when it tries to.
                is_calm = sum(engine.is_dead for engine in fleet.made.values()) == len(losses)
                if is_calm and not controller.parts.job.fleet._losses:
                    for number in rng.sample(range(3), rng.choice([1, 1, 2])):
                        fleet.newest(number).kill()
            if len(losses) >= 12:
                controller.request_stop("shown")
                return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert drive(controller) == "shown"
    finally:
        over.set()
        killer.join()
    is_whole(tmp_path, controller)
    assert len(events(recorder, EngineLost)) >= 12
    tokens = {r.sample: r for r in events(recorder, SampleGenerated)}
    assert all(
        event.num_tokens == len(FakeEngine().draw(sample)) for sample, event in tokens.items()
    )


# -- moves, without a run ----------------------------------------------------------------------


def request(index: int, carried: Carried | None = None) -> GenerationRequest:
    return GenerationRequest(
        sample=SampleId(PromptId("train", 0, 3), index, 0),
        prompt_tokens=(1, 2),
        sampling=SamplingParams(max_response_tokens=40),
        carried=carried,
    )


class Long(MortalEngine):
    """It draws so many tokens of what it has and then waits to be told to go on, whatever the
    machine does meanwhile; what is aborted it lets go of at once."""

    pauses_after = 5
    holds = False
    """It does not even look at aborts."""

    def draw(self, noise: SampleId) -> tuple[int, ...]:
        return tuple(range(100, 130 + noise.index))

    def _step(self) -> list[EngineOutput]:
        if self.holds:
            return []
        outputs = super()._step()
        self.silent = self.steps == self.pauses_after
        return outputs

    def go_on(self) -> None:
        with self._wake:
            self.pauses_after, self.holds, self.silent = 0, False, False
            self._wake.notify()


class Told:
    """Engines without a core: what came up, under a lock as in a run."""

    def __init__(self, count: int = 2) -> None:
        self.lock = threading.RLock()
        self.engines = Engines(
            [Long(step_s=0.002) for _ in range(count)], lambda *_: Long(step_s=0.002)
        )
        self.up: list[tuple[Any, Any]] = []
        self.losses: list[Event] = []
        self.engines.start(self.listen, self.die, self.losses.append)

    def engine(self, number: int) -> Any:
        return self.engines.handles[number].engine

    def listen(self, handle: Handle, outputs: Sequence[EngineOutput]) -> None:
        with self.lock:
            for output in outputs:
                event, response = self.engines.heard(handle, output)
                if event is not None:
                    self.up.append((event, response))

    def die(self, handle: Handle, error: BaseException) -> None:
        with self.lock:
            self.engines.lose(handle, str(error))

    def has_begun(self, number: int) -> None:
        """The engine has drawn some tokens of all that it has, and waits."""
        until = time.monotonic() + 60
        while not self.engine(number).silent:
            assert time.monotonic() < until, self.engine(number).steps
            time.sleep(0.001)

    def wait(self, count: int) -> list[tuple[Any, Any]]:
        """What came up, once it is so much. The engines go on."""
        for handle in self.engines.handles.values():
            self.engine(handle.number).go_on()
        until = time.monotonic() + 60
        while len(self.up) < count:
            assert time.monotonic() < until, self.up
            time.sleep(0.005)
        return self.up


def test_a_moved_sample_takes_its_tokens_along() -> None:
    told = Told()
    with told.lock:
        told.engines.submit([request(n) for n in range(4)])
    told.has_begun(0)
    samples = [request(n).sample for n in (1, 3)]
    with told.lock:
        told.engines.move(samples, 1)
    up = told.wait(6)
    moves = [event for event, _ in up if isinstance(event, SampleMoved)]
    assert [m.sample for m in moves] == samples
    assert all(m.engine == 1 and 0 < m.num_tokens < 30 for m in moves)
    ends = {event.sample: (event, r) for event, r in up if isinstance(event, SampleGenerated)}
    for number in range(4):
        event, response = ends[request(number).sample]
        assert response.tokens == Long().draw(request(number).sample)
        assert event.engine == (1 if number in (1, 3) else 0)
        assert event.num_kept is None
    first, second = (told.engines.handles[n].engine for n in (0, 1))
    assert first.num_drawn + second.num_drawn == sum(range(30, 34))  # nothing was drawn twice


def test_a_sample_that_has_just_finished_does_not_move() -> None:
    told = Told()
    with told.lock:
        told.engines.submit([request(0)])
    told.wait(1)
    with told.lock:
        told.engines.move([request(0).sample], 1)
    time.sleep(0.02)
    assert [type(event) for event, _ in told.up] == [SampleGenerated]


def test_a_move_from_an_engine_that_is_lost_leaves_it_to_the_core() -> None:
    told = Told()
    told.engine(0).holds = True
    with told.lock:
        told.engines.submit([request(0)])
        told.engines.move([request(0).sample], 1)
        told.engines.handles[0].engine.kill()
    assert told.up == [] and len(told.losses) == 1
    with told.lock:
        told.engines.place([request(0).sample], [1])
    ((event, response),) = told.wait(1)
    assert event.engine == 1 and response.tokens == Long().draw(event.sample)


def test_a_move_to_an_engine_that_is_lost_starts_where_the_core_says() -> None:
    told = Told(3)
    with told.lock:
        told.engines.submit([request(0), request(1)])
    told.has_begun(0)
    samples = [request(0).sample, request(1).sample]
    with told.lock:
        told.engines.move(samples, 1)
        told.engines.handles[1].engine.kill()
        told.engines.place(samples, [0, 2])  # one where it still is
    up = told.wait(2)
    assert {event.sample: event.engine for event, _ in up} == {samples[0]: 0, samples[1]: 2}
    assert all(response.tokens == Long().draw(event.sample) for event, response in up)


def test_a_move_to_an_engine_that_is_lost_goes_where_the_core_says() -> None:
    told = Told(3)
    samples = [request(n).sample for n in range(3)]
    with told.lock:
        told.engines.submit([request(n) for n in range(3)])
    told.has_begun(0)
    with told.lock:
        told.engines.move(samples, 1)
        told.engines.handles[1].engine.kill()
        told.engines.move(samples[:1], 0)
        told.engines.move(samples[1:2], 2)
    for number in (0, 2):
        told.engine(number).go_on()
    up = told.wait(4)
    moves = [event for event, _ in up if isinstance(event, SampleMoved)]
    assert [(m.sample, m.engine) for m in moves] == [(samples[0], 0), (samples[1], 2)]
    assert all(0 < m.num_tokens < 30 for m in moves)
    with told.lock:  # of the last it has not said anything yet
        told.engines.place(samples[2:], [2])
    told.wait(5)
    ends = {event.sample: (event, r) for event, r in told.up if isinstance(event, SampleGenerated)}
    assert [ends[sample][0].engine for sample in samples] == [0, 2, 2]
    for sample, (_, response) in ends.items():
        assert response.tokens == Long().draw(sample)


def test_an_engine_that_is_lost_as_it_is_given_a_moved_sample() -> None:
    told = Told()
    sample = request(0).sample
    with told.lock:
        told.engines.submit([request(0)])
    told.has_begun(0)
    with told.lock:
        told.engines.move([sample], 1)
        told.engines.handles[1].engine._closed = True  # and nobody knows yet

        def core(event: Event) -> None:
            told.losses.append(event)
            if isinstance(event, EngineLost):
                told.engines.move([sample], 0)

        told.engines._tell = core
    told.engine(0).go_on()
    ((event, response),) = told.wait(1)
    assert response.tokens == Long().draw(sample) and event.engine == 0
    assert [type(event) for event in told.losses] == [EngineLost, SampleMoved]


def test_what_was_placed_and_aborted_is_answered_for_once() -> None:
    told = Told(3)
    with told.lock:
        told.engines.submit([request(0)])
        told.engines.move([request(0).sample], 1)
        told.engines.handles[1].engine.kill()
        told.engines.place([request(0).sample], [2])
        told.engines.abort([request(0).sample])
    ((event, response),) = told.wait(1)
    assert (event.engine, event.num_tokens, response) == (2, 0, None)
    time.sleep(0.02)
    assert len(told.up) == 1


def test_what_was_verified_before_a_move_is_told_at_the_end() -> None:
    told = Told()
    tokens = (*range(100, 110), 5, 5)
    carried = Carried(tokens=tokens, log_probs=(-2.0,) * len(tokens))
    with told.lock:
        told.engines.submit([request(0, carried)])
    told.has_begun(0)
    with told.lock:
        told.engines.move([request(0).sample], 1)
    (moved, _), (event, response) = told.wait(2)
    assert isinstance(moved, SampleMoved) and moved.num_tokens > 10
    assert event.num_kept == 10 and response.tokens == Long().draw(event.sample)


def test_an_end_that_may_be_refused_is_drawn_from_the_beginning() -> None:
    told = Told()
    carried = Carried(tokens=(100, 101), log_probs=(-2.0, -2.0), floor=20)
    with told.lock:
        told.engines.submit([request(0, carried)])
    told.has_begun(0)
    with told.lock:
        told.engines.move([request(0).sample], 1)
    (moved, _), (event, _) = told.wait(2)
    assert moved.num_tokens == 0 and event.num_kept == 2


def test_an_evaluation_keeps_the_samples_of_a_prompt_together() -> None:
    told = Told()
    requests = [replace(request(n), prompt_tokens=(n // 2,)) for n in range(8)]
    with told.lock:
        told.engines.submit_anywhere(requests)
    up = told.wait(8)
    engines = [event.engine for event, _ in sorted(up, key=lambda item: item[0].sample)]
    assert engines == [0, 0, 1, 1, 0, 0, 1, 1]


def test_one_engine_says_nothing_new(tmp_path: Path) -> None:
    controller, _ = make(tmp_path, run_config(steps=3))
    drive(controller)
    text = (tmp_path / "events.jsonl").read_text()
    assert '"engine"' not in text and '"engines"' not in text and '"fleet"' not in text
    assert json.loads(text.splitlines()[0])


def test_the_one_engine_is_what_the_run_dies_of(tmp_path: Path) -> None:
    engine = MortalEngine()
    controller, recorder = make(tmp_path, run_config(steps=50), engine=engine)
    when(recorder, generated(20), engine.kill)
    with pytest.raises(EngineError):
        drive(controller)
