"""Requests, aborts and other messages from an engine's callers to its worker, under one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

from rollpacker.core.ids import SampleId
from rollpacker.engines.embedded.rows import Pending
from rollpacker.engines.engine import EngineError, GenerationRequest, Listener


class Inbox:
    """The requests and aborts on their way to an engine, and the engine's listener. Every method
    may be called from any thread."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._submitted: list[Pending] = []
        self._aborted: list[SampleId] = []
        self._unkept: list[SampleId] = []
        self._in_flight: set[SampleId] = set()
        self._num_launched = 0
        self._weights_change = False
        self._is_away = False
        self._closed = False
        self._error: BaseException | None = None
        self._listener: Listener | None = None
        self._on_error: Callable[[BaseException], None] = _tell_nobody

    # -- the caller's side -----------------------------------------------------------------

    def check_open(self) -> None:
        """Raise `EngineError` if the engine is closed or dead."""
        if self._closed:
            raise EngineError("the engine is closed")
        if self._error is not None:
            raise EngineError(f"the engine died: {self._error}") from self._error

    def check_here(self) -> None:
        """Raise `EngineError` if the engine is closed, dead or has freed its device's memory."""
        self.check_open()
        if self._is_away:
            raise EngineError("the engine has let go of its device's memory: reload it first")

    def tell(self, listener: Listener, on_error: Callable[[BaseException], None]) -> None:
        """Set the functions that are called with outputs and with the engine's error. Raises
        `EngineError` while samples run."""
        with self._condition:
            self.check_open()
            if self._in_flight:
                raise EngineError("the engine cannot change its listener while samples run")
            self._listener, self._on_error = listener, on_error

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue these requests. Raises `EngineError` for a sample that is in flight already, and
        while weights change."""
        with self._condition:
            self.check_here()
            if self._weights_change:
                raise EngineError(
                    "samples were submitted while the weights change, or after they could not be "
                    "changed"
                )
            samples = [request.sample for request in requests]
            twice = self._in_flight.intersection(samples)
            if twice or len(set(samples)) < len(samples):
                name = min(twice, default="in this call")
                raise EngineError(f"a sample was submitted twice: {name}")
            self._in_flight.update(samples)
            for request in requests:
                self._submitted.append(Pending(request, self._num_launched))
                self._num_launched += 1
            self._condition.notify()

    def abort(self, samples: Sequence[SampleId]) -> None:
        """Mark these samples as aborted. Samples that are not in flight are ignored."""
        with self._condition:
            self.check_open()
            self._aborted.extend(sample for sample in samples if sample in self._in_flight)
            self._condition.notify()

    def let_go(self, samples: Sequence[SampleId]) -> None:
        """Note that keys and values kept of these samples, ended or not, are not needed any
        more."""
        with self._condition:
            self.check_open()
            self._unkept.extend(samples)

    def begin_weights(self, version: int) -> None:
        """Refuse new samples until `end_weights`, for a change to this version. Raises
        `EngineError` while samples run."""
        with self._condition:
            self.check_here()
            self._check_idle(f"the weights cannot change to version {version}")
            self._weights_change = True

    def end_weights(self) -> None:
        """End the refusal of `begin_weights`: accept samples again."""
        self._weights_change = False

    def leave(self) -> None:
        """Refuse calls that need the device's memory until `come_back`. Raises `EngineError` if
        samples run."""
        with self._condition:
            self.check_open()
            self._check_idle("the device's memory cannot be let go of")
            self._is_away = True

    def come_back(self) -> None:
        """End the refusal of `leave`: accept all calls again."""
        self._is_away = False

    def _check_idle(self, what: str) -> None:
        if self._in_flight:
            raise EngineError(f"{what} while {len(self._in_flight)} samples run")

    def close(self) -> None:
        """End the worker after the current decode step. Later calls raise `EngineError`."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    # -- the worker's side -----------------------------------------------------------------

    def wait_for_work(self) -> bool:
        """Wait until samples are in flight. Returns False if the engine is closed, else True."""
        with self._condition:
            while not (self._closed or self._in_flight):
                self._condition.wait()
            return not self._closed

    def take_let_go(self) -> list[SampleId]:
        """Return the samples given to `let_go` since the last call. Call this before `take`: a
        sample that is submitted again later may need them."""
        with self._condition:
            unkept, self._unkept = self._unkept, []
        return unkept

    def take(self) -> tuple[list[Pending], set[SampleId]]:
        """Return the requests and the aborted samples that arrived since the last call."""
        with self._condition:
            submitted, self._submitted = self._submitted, []
            aborted, self._aborted = set(self._aborted), []
        return submitted, aborted

    def end(self, samples: Iterable[SampleId]) -> tuple[bool, Listener]:
        """Remove these samples, which have ended, from those in flight. Returns whether no samples
        are in flight any more, and the engine's listener."""
        with self._condition:
            self._in_flight.difference_update(samples)
            assert self._listener is not None
            return not self._in_flight, self._listener

    def die(self, error: BaseException) -> Callable[[BaseException], None]:
        """Note that the engine is dead, so that later calls raise `EngineError`. Returns the
        `on_error` function, to be called with `error`; if the engine was dead before, one that does
        nothing."""
        with self._condition:
            if self._error is not None:
                return _tell_nobody
            self._error = error
            return self._on_error

    @property
    def num_in_flight(self) -> int:
        with self._condition:
            return len(self._in_flight)


def _tell_nobody(error: BaseException) -> None:
    """Ignore the error. Used where no listener to errors is set, or it was called already."""
