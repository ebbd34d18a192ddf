"""A process with an engine in it, which does what the run's process says over an inherited line.

    the run -- Exchange --> main thread: submits, aborts, starts calls
            <-- Report ---- reporting thread: waits until there is something to say
                            the engine's own thread, or whatever it has

It ends when its line does, or its engine: one that is dead must not stay and be asked again.
Light until it is told what to make.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from rollpacker.engines.engine import Engine, EngineError, EngineOutput
from rollpacker.engines.messages import (
    OFFLOAD,
    RELOAD,
    UPDATE_WEIGHTS,
    WEIGHT_PROBE,
    Answer,
    Call,
    Exchange,
    Report,
    codec,
    packed,
)
from rollpacker.imports import load_function
from rollpacker.workers.kinds import ANSWER, FAILED, READY
from rollpacker.workers.line import LineEnded
from rollpacker.workers.program import Program, text_of


class EngineHost:
    """The verb `exchange` of one engine: `obey` takes it, `report` answers it."""

    def __init__(self, engine: Engine) -> None:
        """Starts the engine."""
        self._engine = engine
        self._changed = threading.Condition()
        self._sequence = 0
        """The newest exchange that was obeyed ..."""
        self._answered = 0
        """... and that a report has answered."""
        self._report_by = 0.0
        """The time on the monotonic clock at which the next answer is due."""
        self._outputs: deque[EngineOutput] = deque()
        """Those that the run has not acknowledged."""
        self._first = 1
        """Number of the first of them."""
        self._num_reported = 0
        """Number of the last one that a report had."""
        self._answer: Answer | None = None
        self._answer_is_new = False
        self._call = 0
        self._error: BaseException | None = None
        engine.start(self._heard, self._died)

    def obey(self, exchange: Exchange) -> None:
        """Take an exchange, once. One that was taken before is only to be answered again."""
        if exchange.sequence > self._sequence:
            self._give(exchange)
        with self._changed:
            while self._outputs and self._first <= exchange.acknowledged:
                self._outputs.popleft()
                self._first += 1
            if exchange.sequence <= self._sequence:  # the run may lack what was said since
                self._answered = self._sequence - 1
                self._num_reported = self._first - 1
            if self._sequence == self._answered or not exchange.wait_s:
                self._report_by = time.monotonic() + exchange.wait_s
            self._sequence = max(self._sequence, exchange.sequence)
            self._changed.notify_all()

    def _give(self, exchange: Exchange) -> None:
        try:
            if exchange.let_go:
                self._engine.let_go(exchange.let_go)
            if exchange.requests:
                self._engine.submit(exchange.requests)
            if exchange.aborts:
                self._engine.abort(exchange.aborts)
        except EngineError as error:
            self._died(error)
        if exchange.call is not None and exchange.call.number > self._call:
            self._call = exchange.call.number
            threading.Thread(
                target=self._do, args=(exchange.call,), name="call", daemon=True
            ).start()

    def report(self) -> Report:
        """Wait until there is an exchange to answer, and either something to say or its time over.

        Raises `EngineError` once the engine is dead.
        """
        with self._changed:
            while not self._is_due():
                unanswered = self._sequence > self._answered
                self._changed.wait(self._report_by - time.monotonic() if unanswered else None)
            if self._error is not None:
                raise EngineError(text_of(self._error, EngineError)) from self._error
            start = self._num_reported + 1
            outputs = [self._outputs[i - self._first] for i in range(start, self._end)]
            self._num_reported = self._end - 1
            self._answered = self._sequence
            self._answer_is_new = False
            answer, sequence = self._answer, self._sequence
        return Report(
            sequence=sequence,
            first=start,
            outputs=tuple(packed(output) for output in outputs),
            status=self._engine.status(),
            answer=answer,
        )

    def _is_due(self) -> bool:
        if self._error is not None:
            return True
        has_news = self._num_reported + 1 < self._end or self._answer_is_new
        is_late = time.monotonic() >= self._report_by
        return self._sequence > self._answered and (has_news or is_late)

    @property
    def _end(self) -> int:
        """The number that the next output gets."""
        return self._first + len(self._outputs)

    # -- the engine's side -----------------------------------------------------------------

    def _heard(self, outputs: Sequence[EngineOutput]) -> None:
        with self._changed:
            self._outputs.extend(outputs)
            self._changed.notify_all()

    def _died(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def _do(self, call: Call) -> None:
        result, failure = None, None
        try:
            if call.name == UPDATE_WEIGHTS:
                asyncio.run(self._engine.update_weights(call.version, call.source))
            elif call.name in (OFFLOAD, RELOAD):
                asyncio.run(
                    self._engine.offload() if call.name == OFFLOAD else self._engine.reload()
                )
            else:
                assert call.name == WEIGHT_PROBE, call.name
                result = self._engine.weight_probe()
        except Exception as error:
            failure = text_of(error, EngineError)
        with self._changed:
            self._answer = Answer(number=call.number, result=result, error=failure)
            self._answer_is_new = True
            self._changed.notify_all()


def serve(program: Program, engine: Engine) -> NoReturn:
    """Obey until the line ends, or the engine is dead; then the process ends."""
    host = EngineHost(engine)

    def speak() -> None:
        try:
            while True:
                report = host.report()
                program.say(ANSWER, report.sequence, codec().encode(report))
        except Exception as error:
            program.end_with(FAILED, program.text_of(error))

    threading.Thread(target=speak, name="reports", daemon=True).start()
    try:
        while True:
            host.obey(codec().decode(program.line.receive().payload))
    except LineEnded:
        os._exit(0)


def main() -> NoReturn:
    program = Program(codec(), own=EngineError)
    setup = program.setup()
    with program.telling(ValueError):
        engine = load_function(setup.make)(config=setup.config, **setup.arguments)
        program.line.send(READY)
    serve(program, engine)


if __name__ == "__main__":
    main()
