"""Lines over a port: those with the token come through, whoever else knocks."""

import socket
import threading
import time

import pytest

from rollpacker.workers import listener as module
from rollpacker.workers.frames import HEADER
from rollpacker.workers.line import Line, LineEnded
from rollpacker.workers.listener import HELLO, MAX_HELLO_BYTES, MAX_KNOCKING, Listener, connect


def knock(listener: Listener, said: bytes = b"") -> socket.socket:
    stranger = socket.create_connection((listener.host, listener.port))
    stranger.sendall(said)
    return stranger


def is_turned_away(listener: Listener, stranger: socket.socket) -> bool:
    """Nobody comes through until it is."""
    stranger.settimeout(0.05)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert listener.accept(0.05) == []
        try:
            return stranger.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def accepted(listener: Listener) -> tuple[Line, bytes]:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for found in listener.accept(0.1):
            return found
    raise AssertionError("nobody came through")


def test_who_has_the_token_talks_in_both_directions() -> None:
    listener = Listener("127.0.0.1")
    theirs = connect(listener.host, listener.port, listener.token, b"rank 1")
    ours, hello = accepted(listener)
    assert hello == b"rank 1"
    large = bytes(10 * MAX_HELLO_BYTES)
    theirs.send(7, 1, large)
    assert ours.receive(5.0) == (7, 1, large)
    ours.send(8, 2)
    assert theirs.receive(5.0) == (8, 2, b"")
    listener.close()
    ours.close()
    with pytest.raises(LineEnded):
        theirs.receive(5.0)
    theirs.close()


def test_silent_strangers_keep_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOCK_S", 1000.0)
    listener = Listener("127.0.0.1")
    half = HEADER.pack(HELLO, 0, 100) + b"x"
    strangers = [knock(listener), knock(listener, b"\x00"), knock(listener, half)]
    assert listener.accept(0.1) == []
    line = connect(listener.host, listener.port, listener.token, b"")
    ours, _ = accepted(listener)
    while len(listener._knocks) < len(strangers):  # they have their time still
        assert listener.accept(0.1) == []
    monkeypatch.setattr(module, "KNOCK_S", 0.5)
    late = [knock(listener), knock(listener, b"\x00"), knock(listener, half)]
    assert all(is_turned_away(listener, one) for one in late)
    assert len(listener._knocks) == len(strangers)
    for one in (*strangers, *late, line, ours, listener):
        one.close()


@pytest.mark.parametrize(
    "said",
    [
        HEADER.pack(HELLO, 0, 32) + bytes(32),
        HEADER.pack(HELLO, 0, 0),
        HEADER.pack(HELLO, 0, MAX_HELLO_BYTES + 1),
        HEADER.pack(HELLO, 0, 1 << 63),
        HEADER.pack(HELLO + 1, 0, 32) + bytes(32),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x80\x04cos\nsystem\n(S'true'\ntR." * 10,
    ],
)
def test_whoever_says_something_else_is_turned_away(said: bytes) -> None:
    listener = Listener("127.0.0.1")
    stranger = knock(listener, said)
    assert is_turned_away(listener, stranger)
    stranger.close()
    listener.close()


def test_a_crowd_of_strangers_is_bounded_and_does_not_keep_others_out() -> None:
    listener = Listener("127.0.0.1")
    crowd: list[socket.socket] = []

    def gather() -> None:
        crowd.extend(knock(listener) for _ in range(3 * MAX_KNOCKING))

    gathering = threading.Thread(target=gather)
    gathering.start()
    while gathering.is_alive():
        assert listener.accept(0.05) == []
    assert listener.accept(0.05) == []
    line = connect(listener.host, listener.port, listener.token, b"me")
    ours, hello = accepted(listener)
    assert hello == b"me"
    assert len(listener._knocks) <= MAX_KNOCKING
    for one in (*crowd, line, ours, listener):
        one.close()
