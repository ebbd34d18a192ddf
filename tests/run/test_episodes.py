"""The environments' port by itself: what is asked of it together is begun together, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

from rollpacker.core.commands import Act, CancelAct
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.environments.environment import Begun
from rollpacker.run.ports.episodes import Episodes
from rollpacker.run.ports.main_task import MainTask
from rollpacker.run.ports.shared import Shared


def sample(number: int) -> SampleId:
    return SampleId(PromptId("train", 0, number), 0, 0)


class CountingMain(MainTask):
    num_posts = 0

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        self.num_posts += 1
        super().post(function, *arguments)


class Told:
    """A bus, a player and all else that the port speaks to."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.said: list[str] = []
        self.events: list[Any] = []

    def take(self, event: Any) -> None:
        self.events.append(event)

    def new(self, sample: SampleId, row: object) -> Any:
        return SimpleNamespace(sample=sample)

    async def begin(self, play: Any, *, timeout_s: float | None) -> Begun:
        self.said.append(f"begin {play.sample.prompt.row}")
        return Begun(messages=None)

    def end(self, play: Any) -> None:
        self.said.append(f"end {play.sample.prompt.row}")


def port(told: Told, main: MainTask) -> Episodes:
    rest: Any = SimpleNamespace(
        waits=False, carries=False, sign=lambda: None, begun=lambda prompt: None
    )
    anything: Any = told
    return Episodes(
        Shared(anything, main, rest, rest),
        rest,
        anything,
        rows=[anything] * 8,
        carried=rest,
    )


async def answered(told: Told, num: int) -> None:
    for _ in range(100):  # rounds of the loop: each answer takes a few
        if len(told.events) < num:
            await asyncio.sleep(0)
    assert len(told.events) == num


def test_one_wake_up_of_the_loop_begins_all_that_was_asked_for_in_order() -> None:
    async def play() -> tuple[Told, int]:
        told, main = Told(), CountingMain()
        main.open()
        obey = port(told, main).routes()

        def ask() -> None:
            with told.lock:
                for number in range(5):
                    obey[Act](Act(sample=sample(number), turn=0, timeout_s=None))
                obey[CancelAct](CancelAct(samples=(sample(1),)))
                obey[Act](Act(sample=sample(5), turn=0, timeout_s=None))

        with ThreadPoolExecutor() as engine:
            engine.submit(ask).result()
        first = main.num_posts
        await answered(told, 6)
        with told.lock:
            obey[Act](Act(sample=sample(6), turn=0, timeout_s=None))
        assert main.num_posts == first + 1
        await answered(told, 7)
        return told, first

    told, num_posts = asyncio.run(play())
    assert num_posts == 1
    begun = [said for said in told.said if said.startswith("begin")]
    assert begun == [f"begin {number}" for number in (0, 2, 3, 4, 5, 6)]
    causes = {event.sample.prompt.row: event.cause for event in told.events}
    assert causes == {**dict.fromkeys((0, 2, 3, 4, 5, 6), ""), 1: "cancelled"}


def test_what_a_loop_did_not_come_to_does_not_hold_up_the_next() -> None:
    main, said = MainTask(), []

    async def ended_at_once() -> None:
        main.open()
        main.post_together(said.append, "too late")
        asyncio.get_running_loop().stop()  # with this round of it

    async def goes_on() -> None:
        main.open()
        main.post_together(said.append, "first")
        main.post_together(said.append, "second")
        for _ in range(3):
            await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    loop.call_soon(loop.create_task, ended_at_once())
    loop.run_forever()
    loop.close()
    said.clear()
    asyncio.run(goes_on())
    assert said == ["first", "second"]
