"""The program of a process with an engine in it, which obeys the run's process over an inherited
connection.

    the run -- Work, Call ------> main thread: submits, aborts
                                  calling thread: one call after the other
            <-- Report, Answer -- reporting thread: waits until there is something to report
                                  the engine's own thread, or whatever it has

The process ends when the connection or its engine does, so that no dead engine is called again.
Imports nothing heavy until it has been told which engine to make.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

from rollpacker.engines.engine import Engine, EngineError, EngineOutput
from rollpacker.engines.messages import (
    COMPARE,
    OFFLOAD,
    RELOAD,
    UPDATE_WEIGHTS,
    WEIGHT_PROBE,
    Answer,
    Call,
    Report,
    Work,
    codec,
    packed,
)
from rollpacker.imports import load_function
from rollpacker.workers.kinds import ANSWER, BEAT, CALL, FAILED, READY
from rollpacker.workers.line import LineEnded
from rollpacker.workers.program import Program, text_of


class EngineHost:
    """Holds the engine of this process, calls its methods as the run's messages ask, and collects
    its outputs and answers for sending."""

    def __init__(self, engine: Engine, beat_s: float) -> None:
        """Starts the engine. `beat_s`: longest time between two reports to the run, in seconds."""
        self._engine = engine
        self._beat_s = beat_s
        self._calls: queue.SimpleQueue[tuple[int, Call]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._outputs: list[EngineOutput] = []
        """Outputs of the engine that have not been reported to the run yet."""
        self._answers: list[tuple[int, Answer]] = []
        """Answers that have not been sent yet, each with the number of its call."""
        self._error: BaseException | None = None
        engine.start(self._heard, self._died)
        threading.Thread(target=self._make_calls, name="calls", daemon=True).start()

    def obey(self, number: int, told: Work | Call) -> None:
        """Do at once what a `Work` message asks for: submit, abort, forget. Queue a `Call`, since
        calls are made one after the other; its answer will bear `number`."""
        if isinstance(told, Call):
            self._calls.put((number, told))
            return
        try:
            if told.let_go:
                self._engine.let_go(told.let_go)
            if told.requests:
                self._engine.submit(told.requests)
            if told.aborts:
                self._engine.abort(told.aborts)
        except EngineError as error:
            self._died(error)

    def report(self) -> tuple[Report, list[tuple[int, Answer]]]:
        """Wait for outputs or answers, but at most `beat_s` seconds. Returns the report, and
        (call's number, answer) for each answer to send after it. Raises `EngineError` for a dead
        engine."""
        with self._changed:
            # Idle engines of a host report at the same moments, which makes one packet of them.
            self._changed.wait_for(self._has_news, self._beat_s - time.monotonic() % self._beat_s)
            if self._error is not None:
                raise EngineError(text_of(self._error, EngineError)) from self._error
            outputs, self._outputs = self._outputs, []
            answers, self._answers = self._answers, []
        return Report(tuple(map(packed, outputs)), self._engine.status()), answers

    def _has_news(self) -> bool:
        return bool(self._outputs or self._answers or self._error)

    # -- the engine's side -----------------------------------------------------------------

    def _heard(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self._outputs.extend(outputs)
            self._changed.notify_all()

    def _died(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _make_calls(self) -> None:
        while True:
            number, call = self._calls.get()
            try:
                answer = Answer(result=self._called(call))
            except Exception as error:
                answer = Answer(error=text_of(error, EngineError))
            with self._changed:
                self._answers.append((number, answer))
                self._changed.notify_all()

    def _called(self, call: Call) -> str | None:
        if call.name == UPDATE_WEIGHTS:
            weights = call.source if call.delivery is None else call.delivery
            asyncio.run(self._engine.update_weights(call.version, weights))
        elif call.name == OFFLOAD:
            asyncio.run(self._engine.offload())
        elif call.name == RELOAD:
            asyncio.run(self._engine.reload())
        elif call.name == COMPARE:
            self._engine.compare(call.text, call.log_probs)
        else:
            assert call.name == WEIGHT_PROBE, call.name
            return self._engine.weight_probe()
        return None


def serve(program: Program, engine: Engine, beat_s: float) -> NoReturn:
    """Obey messages until the connection ends or the engine is dead, then end the process.
    `beat_s`: longest time between two reports, in seconds."""
    host = EngineHost(engine, beat_s)

    def speak() -> None:
        try:
            while True:
                report, answers = host.report()
                program.say(BEAT, payload=codec().encode(report))
                for number, answer in answers:
                    program.say(ANSWER, number, codec().encode(answer))
        except Exception as error:
            program.end_with(FAILED, program.text_of(error))

    threading.Thread(target=speak, name="reports", daemon=True).start()
    try:
        while True:
            message = program.line.receive()
            if message.kind == CALL:  # that nobody waits for an answer changes nothing here
                host.obey(message.number, codec().decode(message.payload))
    except LineEnded:
        os._exit(0)


def main() -> NoReturn:
    program = Program(codec(), own=EngineError)
    setup = program.setup()
    with program.telling(ValueError):
        engine = load_function(setup.make)(config=setup.config, **setup.arguments)
        program.line.send(READY)
    serve(program, engine, setup.beat_s)


if __name__ == "__main__":
    main()
