"""Which engine keeps what it computed of a sample whose environment has the turn."""

from __future__ import annotations

from collections.abc import Iterable

from rollpacker.core.ids import SampleId
from rollpacker.engines.engine import GenerationRequest
from rollpacker.run.held import Handle


class Keepers:
    """Belongs to whoever holds the bus's lock."""

    def __init__(self) -> None:
        self._handles: dict[SampleId, Handle] = {}

    def keeps(self, handle: Handle, request: GenerationRequest) -> None:
        """A turn of this request's sample has ended there."""
        if request.keep:
            self._handles[request.sample] = handle

    def forget(self) -> None:
        """Engines have other weights: nothing is kept."""
        self._handles.clear()

    def of(self, sample: SampleId) -> int | None:
        """The engine where it would go on soonest, if that lives."""
        handle = self._handles.get(sample)
        return handle.number if handle is not None and handle.lives else None

    def leave(
        self, samples: Iterable[SampleId], to: Handle | None = None
    ) -> dict[Handle, list[SampleId]]:
        """Nobody keeps these any more, but for `to`, where they go on. Who is to be told so."""
        told: dict[Handle, list[SampleId]] = {}
        for sample in samples:
            handle = self._handles.pop(sample, None)
            if handle is not None and handle is not to and handle.lives:
                told.setdefault(handle, []).append(sample)
        return told
