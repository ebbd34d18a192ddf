"""The controller's small parts, one by one."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollpacker.core.commands import Finish, Score
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.engines.engine import Response
from rollpacker.rewards.reward import Failed, Scored
from rollpacker.run.errors import DeadlineExceeded, RunError
from rollpacker.run.ports.desk import Desk
from rollpacker.run.ports.main_task import MainTask
from tests.run.fakes import FakeEngine, FakeReward, drive, make, run_config

SAMPLES = [SampleId(PromptId("train", 0, row), 0, 0) for row in range(4)]


def response(sample: SampleId) -> Response:
    return Response(
        sample=sample,
        prompt_tokens=(1,),
        tokens=(7, 7),
        log_probs=(-1.0, -1.0),
        finish_reason="stop",
        version=0,
    )


# -- the desk --------------------------------------------------------------------------


def test_the_desk_forgets_all_but_what_waits_for_its_check() -> None:
    desk = Desk()
    for seconds, sample in enumerate(SAMPLES[:3]):
        desk.lay_down(response(sample))
        desk[sample].verdict = Scored(value=float(seconds))
        desk[sample].check_s = float(seconds)
    desk.lay_down(response(SAMPLES[3]))
    desk.round_kind = "short"
    assert desk.slowest(2) == [SAMPLES[2], SAMPLES[1]]
    assert desk.scored_groups([SAMPLES[:2]]) == [
        [(response(SAMPLES[0]), 0.0), (response(SAMPLES[1]), 1.0)]
    ]
    with pytest.raises(AssertionError, match="no verdict"):
        desk.scored_groups([[SAMPLES[3]]])
    desk.forget([SAMPLES[3]])
    assert desk[SAMPLES[3]].response == response(SAMPLES[3])
    assert desk.get(SAMPLES[0]) is None and desk.slowest(2) == [] and desk.round_kind == ""


def test_a_check_reads_its_sample_when_it_is_handed_over(tmp_path: Path) -> None:
    """A commit may come before the check's own first turn, and forgets the sample."""
    controller, recorder = make(tmp_path, run_config())
    controller.parts.job.handle = lambda event: []  # type: ignore[method-assign]
    desk, scoring = controller._shared.desk, controller._scoring

    async def go() -> None:
        controller._main.open()
        desk.lay_down(response(SAMPLES[0]))
        scoring.routes()[Score](Score(sample=SAMPLES[0]))
        assert scoring.waits and scoring.waiting() == SAMPLES[:1]
        scoring.start()
        desk.forget(scoring.waiting())
        await asyncio.sleep(0.05)
        assert await controller._main.next(0.01) is None  # nothing died of it

    asyncio.run(go())
    controller._observing.feed()
    assert recorder.entries[-1].event.sample == SAMPLES[0]
    assert desk.get(SAMPLES[0]) is None


# -- reasons ---------------------------------------------------------------------------


class Owned(Counter[str]):
    """Counts that are changed by whoever holds the lock, and by nobody else."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.num_changes = 0
        super().__init__()

    def __setitem__(self, reason: str, count: int) -> None:
        assert self.lock._is_owned(), f"{threading.current_thread().name} holds no lock"
        self.num_changes += 1
        super().__setitem__(reason, count)


def test_reasons_are_counted_under_the_lock_alone(tmp_path: Path) -> None:
    """The engine's thread counts failures, the event loop verdicts that were not given."""
    reward = FakeReward(verdict=lambda sample: Failed(reason="the judge is down"))
    controller, _ = make(tmp_path, run_config(), reward=reward, evaluates=False)
    counts = controller._reasons._counts = Owned(controller.bus.lock)
    with pytest.raises(RunError, match="the judge is down"):
        drive(controller)
    assert counts["the judge is down"] > 10 and counts.num_changes > 10


# -- the main task ---------------------------------------------------------------------


def test_deeds_come_in_the_order_in_which_threads_asked_for_them() -> None:
    main, done = MainTask(), []

    async def deed(name: str) -> None:
        done.append(name)

    def ask() -> None:
        for name in "ab":
            main.later(partial(deed, name))
        main.routes()[Finish](Finish(reason="enough"))

    async def go() -> None:
        main.open()
        thread = threading.Thread(target=ask)
        thread.start()
        for name in "ab":
            todo = await main.next(5.0)
            assert callable(todo) and name not in done
            await todo()
        assert await main.next(5.0) == Finish(reason="enough")
        assert await main.next(0.01) is None
        thread.join()

    asyncio.run(go())
    assert done == ["a", "b"]


def test_a_failure_goes_to_what_the_main_task_waits_for() -> None:
    main = MainTask()

    async def go() -> None:
        main.open()
        main.awaited = asyncio.get_running_loop().create_future()
        main.fail(MemoryError("first"))
        with pytest.raises(MemoryError, match="first"):
            await main.awaited
        main.fail(MemoryError("second"))  # nobody waits for that future any more
        with pytest.raises(MemoryError, match="second"):
            await main.next(5.0)
        main.post(lambda: 1 // 0)  # a callback of ours ends the run, too
        with pytest.raises(ZeroDivisionError):
            await main.next(5.0)

    asyncio.run(go())


# -- the hand-over ---------------------------------------------------------------------


class StuckEngine(FakeEngine):
    """Copies weights for as long as the test runs."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    async def update_weights(self, version: int, weights: object = None) -> None:
        self.released.wait(60)


def test_a_copy_of_the_weights_that_hangs_meets_its_deadline(tmp_path: Path) -> None:
    engine = StuckEngine()
    config = run_config(sync_s=0.3)
    controller, _ = make(tmp_path, config, engine=engine, evaluates=False)
    began = time.perf_counter()
    with pytest.raises(DeadlineExceeded, match=r"version 1 of the weights.*deadlines\.sync_s"):
        drive(controller)
    assert time.perf_counter() - began < 30
    engine.released.set()


def test_a_probe_of_the_weights_that_hangs_meets_its_deadline(tmp_path: Path) -> None:
    engine = FakeEngine()
    released = threading.Event()
    engine.weight_probe = lambda: str(released.wait(60))  # type: ignore[method-assign]
    controller, _ = make(tmp_path, run_config(sync_s=0.3), engine=engine, evaluates=False)
    began = time.perf_counter()
    with pytest.raises(DeadlineExceeded, match=r"deadlines\.sync_s"):
        drive(controller)
    assert time.perf_counter() - began < 30
    released.set()


def test_an_engine_that_refuses_the_weights_is_heard(tmp_path: Path) -> None:
    class Refusing(FakeEngine):
        async def update_weights(self, version: int, weights: object = None) -> None:
            raise MemoryError("no room for the copy")

    controller, _ = make(tmp_path, run_config(), engine=Refusing(), evaluates=False)
    with pytest.raises(MemoryError, match="no room"):
        drive(controller)
