"""The circuit breaker, in a loop whose clock jumps to whatever comes next."""

from __future__ import annotations

import asyncio
import logging
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollpacker.endpoints.breaker import Breaker


class JumpingSelector(selectors.SelectSelector):
    """Waits no time at all, and moves the clock on instead."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now += timeout or 0.0
        return super().select(0)


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    selector = JumpingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(test())


def clock() -> float:
    return asyncio.get_running_loop().time()


def opened(**settings: Any) -> Breaker:
    breaker = Breaker("the judge", **{"failures": 2, "probe_every_s": 5.0, **settings})
    for _ in range(2):
        breaker.failed("503 Service Unavailable")
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    async def test():
        breaker = Breaker("the judge", failures=3)
        for _ in range(5):
            breaker.failed("x")
            breaker.failed("x")
            breaker.succeeded()
        assert breaker.outage() is None
        breaker.failed("x")
        breaker.failed("x")
        assert breaker.outage() is None
        assert await breaker.ready(clock())
        breaker.failed("x")
        assert breaker.outage() is not None

    run(test)


def test_one_probe_at_a_time_by_the_clock_and_in_order():
    async def test():
        began = clock()
        breaker = opened()
        went = []

        async def caller(number: int) -> None:
            assert await breaker.ready(began + 1000)
            went.append((number, clock() - began))
            breaker.failed("still down")

        await asyncio.gather(*(caller(number) for number in range(4)))
        assert went == [(0, 5.0), (1, 10.0), (2, 15.0), (3, 20.0)]

    run(test)


def test_a_success_lets_everybody_go_in_order():
    async def test():
        began = clock()
        breaker = opened()
        went = []

        async def caller(number: int) -> None:
            assert await breaker.ready(began + 1000)
            went.append((number, clock() - began))
            await asyncio.sleep(0.5)
            breaker.succeeded()

        await asyncio.gather(*(caller(number) for number in range(50)))
        assert went == [(0, 5.0), *((number, 5.5) for number in range(1, 50))]
        assert breaker.outage() is None

    run(test)


def test_waiting_ends_at_until():
    async def test():
        began = clock()
        breaker = opened(probe_every_s=60.0)
        assert not await breaker.ready(began + 3)
        assert clock() - began == 3
        assert not await breaker.ready(began + 1)  # long past
        assert clock() - began == 3

    run(test)


def test_a_probe_that_nobody_waited_for_is_due_at_once():
    async def test():
        breaker = opened()
        await asyncio.sleep(60)
        now = clock()
        assert await breaker.ready(now + 1)
        assert clock() == now
        assert not await breaker.ready(now + 1)  # the next one is not due yet

    run(test)


def test_a_cancelled_probe_passes_its_turn_on():
    async def test():
        began = clock()
        breaker = opened()
        went = []

        async def caller(number: int) -> None:
            assert await breaker.ready(math.inf)
            went.append((number, clock() - began))

        first, second = (asyncio.create_task(caller(number)) for number in range(2))
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        loop.call_at(began + 5.0, first.cancel)  # after the turn was given, before it is taken
        await asyncio.wait((first, second))
        assert first.cancelled()
        assert went == [(1, 5.0)]

    run(test)


def test_a_waiter_that_is_cancelled_leaves_the_line():
    async def test():
        began = clock()
        breaker = opened()
        first = asyncio.create_task(breaker.ready(math.inf))
        await asyncio.sleep(1)
        first.cancel()
        second = await breaker.ready(began + 6)
        assert second and clock() - began == 5

    run(test)


def test_a_probe_that_reports_nothing_holds_up_nobody():
    async def test():
        began = clock()
        breaker = opened()
        assert await breaker.ready(math.inf)
        assert await breaker.ready(math.inf)
        assert clock() - began == 10

    run(test)


def test_a_late_success_closes_it():
    async def test():
        began = clock()
        breaker = opened(probe_every_s=100.0)
        asyncio.get_running_loop().call_later(2, breaker.succeeded)
        assert await breaker.ready(began + 50)
        assert clock() - began == 2

    run(test)


def test_nothing_wakes_up_while_it_waits():
    """No polling: a thousand callers in line cost a timer each and one for the probe."""

    async def test():
        breaker = opened(probe_every_s=600.0)
        loop = asyncio.get_running_loop()
        turns = 0
        run_once = loop._run_once

        def counted() -> None:
            nonlocal turns
            turns += 1
            run_once()

        loop._run_once = counted
        callers = [breaker.ready(clock() + 500) for _ in range(1000)]
        assert not any(await asyncio.gather(*callers))
        assert turns < 20

    run(test)


def test_it_can_be_used_in_one_loop_after_another():
    async def wait_in_vain():
        assert not await breaker.ready(clock() + 1)

    async def probe():
        assert await breaker.ready(clock() + 100)

    async def make():
        return opened()

    breaker = run(make)
    run(wait_in_vain)
    run(probe)


def test_the_outage_in_words(caplog):
    async def test():
        breaker = Breaker("the judge at http://host:1", failures=2)
        breaker.failed("503")
        await asyncio.sleep(30)
        breaker.failed("connection\nrefused\x1b[31m")
        await asyncio.sleep(4)
        said = "the judge at http://host:1 has been down for 34 s (connection refused [31m)"
        assert breaker.outage() == said
        await asyncio.sleep(600)
        breaker.failed("timed out " + "x" * 1000)
        outage = breaker.outage()
        assert outage and "for 11 min (timed out" in outage and len(outage) < 300
        breaker.succeeded()
        breaker.succeeded()
        assert breaker.outage() is None

    with caplog.at_level(logging.WARNING):
        run(test)
    assert [record.getMessage() for record in caplog.records] == [
        "the judge at http://host:1 does not answer (connection refused [31m);"
        " trying again every 5 s",
        "the judge at http://host:1 answers again after 11 min",
    ]


def test_outside_of_a_loop():
    breaker = opened()
    assert breaker.outage() == "the judge has been down for 0 s (503 Service Unavailable)"


@pytest.mark.parametrize("settings", [{"failures": 0}, {"probe_every_s": 0.0}])
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match="must be"):
        Breaker("x", **settings)
