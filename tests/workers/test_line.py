"""Messages over an inherited socket, from a thread and from an event loop."""

import asyncio
import socket
import threading

import pytest

from rollpacker.workers.frames import HEADER, Frames, Message, packed
from rollpacker.workers.line import Line, LineEnded, ready


def two() -> tuple[Line, Line]:
    ours, theirs = Line.pair()
    return ours, Line(theirs)


def test_frames_are_cut_and_bounded() -> None:
    frames = Frames(max_bytes=10)
    data = packed(4, 1, b"{}") + packed(4, 2, b"")
    found = [message for at in range(len(data)) for message in frames.feed(data[at : at + 1])]
    assert found == [(4, 1, b"{}"), (4, 2, b"")]
    with pytest.raises(ValueError, match="11 bytes"):
        frames.feed(HEADER.pack(4, 1, 11))


def test_threads_talk_and_wait_no_longer_than_they_say() -> None:
    ours, theirs = two()
    with pytest.raises(TimeoutError):
        ours.receive(0.05)
    large = bytes(5_000_000)  # more than a socket holds
    sending = threading.Thread(target=theirs.send, args=(1, 7, large))
    sending.start()
    assert ours.receive(10) == (1, 7, large)
    sending.join()
    theirs.send(2, 0, b"a")
    theirs.send(3, 0, b"b")
    assert ready([ours], 5) == [ours]
    assert [ours.receive(5).kind, ours.receive(5).kind] == [2, 3]
    assert ready([ours], 0.0) == []
    theirs.close()
    with pytest.raises(LineEnded):
        ours.receive(5)
    with pytest.raises(LineEnded):
        ours.send(1)
    ours.close()


def test_hanging_up_is_heard_by_the_thread_that_waits() -> None:
    ours, theirs = two()
    heard: list[str] = []

    def wait() -> None:
        try:
            ours.receive()
        except LineEnded:
            heard.append("ended")

    waiting = threading.Thread(target=wait)
    waiting.start()
    ours.hang_up()
    waiting.join(60)
    assert heard == ["ended"]
    with pytest.raises(LineEnded):
        theirs.receive(5)


def test_an_event_loop_hears_all_and_then_the_end() -> None:
    async def run() -> tuple[list[Message], int]:
        ours, theirs = two()
        loop = asyncio.get_running_loop()
        theirs.send(1, 1, b"before")
        theirs.send(1, 2, b"before too")
        first = ours.receive(5)
        heard, ended = [first], asyncio.Event()
        ours.attach(loop, heard.append, ended.set)
        large = bytes(3_000_000)
        echo = asyncio.to_thread(lambda: theirs.send(5, 0, theirs.receive(10).payload))
        ours.post(4, 3, large)
        await echo
        theirs.close()
        await asyncio.wait_for(ended.wait(), 60)
        ours.post(4, 4)
        ours.close()
        assert heard[-1].payload == large
        return heard, len(heard)

    heard, count = asyncio.run(run())
    assert count == 3 and [message.kind for message in heard] == [1, 1, 5]


@pytest.mark.parametrize("nonsense", [b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"])
def test_nonsense_is_an_end(nonsense: bytes) -> None:
    ours, theirs = socket.socketpair()
    line = Line(ours, max_bytes=1 << 20)
    theirs.sendall(nonsense)
    with pytest.raises(LineEnded, match="a message of"):
        line.receive(5)
    line.close()
    theirs.close()


def test_what_is_posted_together_arrives_in_order_and_a_later_loop_takes_it_up() -> None:
    ours, theirs = two()

    async def post() -> None:
        ours.attach(asyncio.get_running_loop(), lambda message: None, lambda: None)
        ours.post_together(1, 1, b"a")
        ours.post_together(1, 2, bytes(5_000_000))  # more than a socket holds
        assert not ready([theirs], 0.0), "sent before the loop looks around"
        ours.post(1, 3)
        assert theirs.receive(5) == (1, 1, b"a")
        ours.post_together(1, 4)

    asyncio.run(post())

    async def post_again() -> list[int]:
        ours.attach(asyncio.get_running_loop(), lambda message: None, lambda: None)
        ours.post_together(1, 5)
        return [(await asyncio.to_thread(theirs.receive, 5)).number for _ in range(4)]

    assert asyncio.run(post_again()) == [2, 3, 4, 5]
    ours.close()
    theirs.close()


def test_what_was_posted_before_the_end_is_sent() -> None:
    ours, theirs = two()

    async def post() -> None:
        ours.attach(asyncio.get_running_loop(), lambda message: None, lambda: None)
        ours.post_together(1, 7)
        ours.detach()

    asyncio.run(post())
    assert theirs.receive(5).number == 7
    ours.close()
    theirs.close()
