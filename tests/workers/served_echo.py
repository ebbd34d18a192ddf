"""A program that a `Served` may start: it makes a word, and repeats what it is asked in front of
it."""

import os
import sys
import time

from rollpacker.codec import Codec
from rollpacker.workers.kinds import ANSWER, CALL, FAILED, READY
from rollpacker.workers.line import LineEnded
from rollpacker.workers.program import Program

codec = Codec()


class OwnError(Exception):
    """An error that is told in its own words."""


def make(word: str) -> str:
    if word == "refuse":
        raise ValueError("no such word")
    if word == "break":
        raise RuntimeError("a bug")
    if word == "own":
        raise OwnError("not today")
    if word == "sleep":
        time.sleep(600)
    return word


def main() -> None:
    program = Program(codec, own=OwnError)
    word = program.setup()
    with program.telling(ValueError):
        made = make(word)
        program.line.send(READY, payload=codec.encode(made.upper()))
    try:
        while True:
            message = program.line.receive()
            if message.kind != CALL:
                program.say(message.kind, message.number, codec.encode("seen"))
                continue
            asked = codec.decode(message.payload)
            if asked == "exit":
                sys.exit(3)
            if asked == "fail":
                program.end_with(FAILED, "it fell over")
            if asked == "wait":
                continue
            program.say(ANSWER, message.number, codec.encode([made, asked]))
    except LineEnded:
        os._exit(0)


if __name__ == "__main__":
    main()
