"""The mailbox that an actor behind ray is, in one event loop."""

from __future__ import annotations

import asyncio
import time

from rollpacker.cluster.on_ray import boxes
from rollpacker.cluster.on_ray.boxes import Boxes


def test_a_letter_is_read_until_it_is_forgotten_and_put_in_once() -> None:
    async def story() -> None:
        mail = Boxes()
        for _ in range(2):
            await mail.post("a", "someone", "1", "hello", {"x": 1})
        await mail.post("b", "someone", "1", "hello", {"x": 2})
        epoch, found = await mail.read("a", 0, 0.0)
        assert [(one.sender, one.kind, one.facts) for one in found] == [
            ("someone", "hello", {"x": 1})
        ]
        assert await mail.epoch() == epoch
        number = found[0].number
        assert (await mail.read("a", number, 0.0))[1] == []
        await mail.forget("a", number)
        await mail.post("a", "someone", "1", "hello", {"x": 1})  # once more, much later
        assert (await mail.read("a", 0, 0.0))[1] == []
        assert len((await mail.read("b", 0, 0.0))[1]) == 1

    asyncio.run(story())


def test_a_reader_waits_and_has_a_letter_at_once() -> None:
    async def story() -> None:
        mail = Boxes()
        began = time.monotonic()
        assert (await mail.read("a", 0, 0.05))[1] == []
        assert time.monotonic() - began >= 0.05
        first = asyncio.create_task(mail.read("a", 0, 60.0))
        second = asyncio.create_task(mail.read("a", 0, 60.0))
        other = asyncio.create_task(mail.read("b", 0, 0.2))
        await asyncio.sleep(0)
        await mail.post("a", "someone", "1", "hello", {})
        assert len((await first)[1]) == len((await second)[1]) == 1
        assert (await other)[1] == []
        assert time.monotonic() - began < 50
        assert not mail._waiting, "nothing is kept of readers that are gone"

    asyncio.run(story())


def test_numbers_rise_and_boxes_that_are_read_take_nothing() -> None:
    async def story() -> None:
        mail = Boxes()
        for number in range(100):
            await mail.post(f"box-{number}", "someone", "1", "hello", {})
        numbers = []
        for number in range(100):
            _, (letter,) = await mail.read(f"box-{number}", 0, 0.0)
            numbers.append(letter.number)
            await mail.forget(f"box-{number}", letter.number)
        assert numbers == sorted(set(numbers))
        assert not mail._letters

    asyncio.run(story())


def test_keys_are_not_remembered_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(boxes, "NUM_KEYS", 10)

    async def story() -> None:
        mail = Boxes()
        for number in range(50):
            await mail.post("a", "someone", str(number), "beat", {})
        assert len(mail._keys) == 10
        await mail.post("a", "someone", "49", "beat", {})
        assert len((await mail.read("a", 0, 0.0))[1]) == 50

    asyncio.run(story())


def test_a_mailbox_that_is_made_anew_has_another_epoch() -> None:
    async def story() -> None:
        assert await Boxes().epoch() != await Boxes().epoch()

    asyncio.run(story())
