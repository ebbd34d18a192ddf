"""Writes responses to a file as they finish, so that the resume of a killed run need not generate
them again. The record of how a sample ended is called its *end*.

runs/NAME/salvage.bin     begun anew with each checkpoint; what its weights generated, in order
    head | end | end | ...          each: bytes and CRC-32 of what follows, a line of JSON, and of
                                    an end the tokens (int32) and log-probs (float64)

    engine -> SampleGenerated, SampleAborted -> core
                     +-> a thread of its own -> salvage.bin -> a resume -> Launch of the same sample
                                                                -> the same end, at once, in order

An end is used for a sample of the same id that is launched with the same prompt, settings, random
numbers and earlier tokens, under the weights of the checkpoint that the head names. A file that
breaks off is used up to its last whole record.

If a run must be equal bit for bit (`in_order`: one embedded engine), ends are used only up to the
last one after which the engine was idle. Samples that are decoded beside fewer others differ in
their last bits, so a batch that was interrupted is generated again as a whole.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rollpacker.codec import from_plain, to_plain
from rollpacker.core.events import Event, SampleAborted, SampleGenerated
from rollpacker.core.ids import SampleId
from rollpacker.core.messages import EVENTS
from rollpacker.engines.engine import EngineOutput, GenerationRequest, Response
from rollpacker.run.folder.checkpoint import MANIFEST
from rollpacker.run.ports.held import Handle

logger = logging.getLogger(__name__)

FILE = "salvage.bin"
FORMAT = 1
_SIZES = struct.Struct("<II")
CLOSE_S = 10.0
"""Seconds that the last writes to the file may take when the run ends."""


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """How one sample's generation ended, as recorded in `salvage.bin`."""

    event: SampleGenerated | SampleAborted
    key: str
    """Digest of the sample's request. The record is used only for an equal request."""
    response: Mapping[str, Any] | None
    """The response's finish reason, version of weights and `redraws`; its tokens are in `arrays`.
    None if the sample was aborted without a response."""
    arrays: bytes

    def output(self, request: GenerationRequest) -> EngineOutput:
        if self.response is None:
            return EngineOutput(self.event)
        size = self.event.num_tokens * 4
        response = Response(
            sample=request.sample,
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(np.frombuffer(self.arrays[:size], np.int32).tolist()),
            log_probs=tuple(np.frombuffer(self.arrays[size:], np.float64).tolist()),
            finish_reason=self.response["finish_reason"],
            version=self.response["version"],
            redraws=tuple((first, redraw) for first, redraw in self.response["redraws"]),
        )
        return EngineOutput(self.event, response)


class Salvage:
    """Records the finished responses under the current weights, and replays those of a killed run.
    Methods are called under the bus's lock; a thread of its own writes the file."""

    def __init__(
        self, folder: Path, checkpoint: Path | None = None, version: int = 0, *, in_order: bool
    ) -> None:
        """`folder`: the run's folder. `checkpoint`: the one that a resume goes on from, whose
        weights have this `version`; None for a new run, which records nothing before its first
        checkpoint. `in_order`: whether the run must be equal bit for bit."""
        self.wake: Callable[[], None] = lambda: None
        """Called when `outputs` has results to yield, so that somebody iterates over them."""
        self._path = folder / FILE
        self._in_order = in_order
        self._version: int | None = None
        """Version of the weights whose samples' results are recorded. None: nothing is recorded."""
        self._head: dict[str, Any] = {}
        self._found: dict[SampleId, tuple[int, RecordedEnd]] = {}
        """How samples ended before the run was killed, with the number of the record in the
        file."""
        self._under_way: dict[SampleId, GenerationRequest] = {}
        """Requests for the current weights that were given to engines and have not ended."""
        self._waiting: dict[SampleId, tuple[Handle, GenerationRequest]] = {}
        """Submitted requests whose result the file has, each with the engine that would generate
        it."""
        self._order: list[tuple[int, SampleId]] = []
        """A heap of the samples in `_waiting`, ordered by the number of their record in the
        file."""
        self._not_stopped: list[SampleId] = []
        """Samples in `_waiting` whose record says that they were aborted, while this run has not
        aborted them: an engine has to generate them after all."""
        self._unwanted: set[SampleId] = set()
        """Samples in `_waiting` that the core has aborted."""
        self._told: set[SampleId] = set()
        """Samples whose result came from the file, so that it is not recorded there again."""
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._file: BinaryIO | None = None
        self._thread: threading.Thread | None = None
        if checkpoint is not None:
            self._stand_at(checkpoint, version)
            self._read()

    @property
    def num_found(self) -> tuple[int, int]:
        """Number of finished responses that a resume found in the file, and number of their
        tokens."""
        ends = [end.event for _, end in self._found.values()]
        sizes = [event.num_tokens for event in ends if isinstance(event, SampleGenerated)]
        return len(sizes), sum(sizes)

    # -- what is launched ----------------------------------------------------------------

    def launched(self, version: int, requests: Sequence[GenerationRequest]) -> None:
        """Note requests that are about to be given to engines, so that their results are recorded;
        except if `version` (of the engines' weights) is not the one that is recorded."""
        if version == self._version:
            self._under_way.update({request.sample: request for request in requests})

    def keep_back(
        self, handle: Handle, requests: Sequence[GenerationRequest]
    ) -> Sequence[GenerationRequest]:
        """Returns the requests that this engine has to generate. The results of the others are in
        the file, and come from `outputs`."""
        if not self._found:
            return requests
        rest = []
        for request in requests:
            place, end = self._found.get(request.sample, (0, None))
            is_launched = request.sample in self._under_way
            if end is None or not is_launched or end.key != _key(request):
                rest.append(request)
            else:
                self._waiting[request.sample] = (handle, request)
                heapq.heappush(self._order, (place, request.sample))
        if self._waiting:
            self.wake()
        return rest

    def stop(self, samples: Sequence[SampleId]) -> Sequence[SampleId]:
        """Returns those of these samples that the engine itself must abort. The others' results are
        in the file, and their abort is noted."""
        self._unwanted.update(self._waiting.keys() & set(samples))
        return [sample for sample in samples if sample not in self._waiting]

    def outputs(self) -> Iterator[tuple[Handle, EngineOutput]]:
        """Yields engine and recorded result of the requests that `keep_back` held back, in the
        order of the file. Left to `not_stopped` are samples that were aborted in the killed run but
        not in this one."""
        while self._order:
            _, sample = heapq.heappop(self._order)
            if sample not in self._waiting:
                continue
            is_stopped = isinstance(self._found[sample][1].event, SampleAborted)
            if is_stopped and sample not in self._unwanted:
                self._not_stopped.append(sample)
            elif (output := self._take(sample)) is not None:
                yield output
        for sample in self._not_stopped:
            if sample in self._unwanted and (output := self._take(sample)) is not None:
                yield output

    def not_stopped(self) -> list[tuple[Handle, GenerationRequest]]:
        """Returns, after `outputs`, the requests of samples that were aborted in the killed run but
        not in this one. Their engines have to generate them."""
        left = [self._waiting.pop(one) for one in self._not_stopped if one in self._waiting]
        for _, request in left:
            del self._found[request.sample]
        self._not_stopped.clear()
        return [(handle, request) for handle, request in left if handle.lives]

    def _take(self, sample: SampleId) -> tuple[Handle, EngineOutput] | None:
        """Remove a sample from `_waiting`. Returns its engine and its recorded result; None if the
        engine is lost, as the core assigns the sample to another engine then."""
        handle, request = self._waiting.pop(sample)
        self._unwanted.discard(sample)
        if not handle.lives:
            return None
        _, end = self._found.pop(sample)
        self._told.add(sample)
        return handle, end.output(request)

    # -- what ends -----------------------------------------------------------------------

    def ended(self, event: Event, response: Response | None) -> None:
        """Record how a sample ended, unless the file has its record. A failed sample counts as
        still being generated, so that no later record claims that the engine was idle."""
        if not isinstance(event, SampleGenerated | SampleAborted):
            return
        request = self._under_way.pop(event.sample, None)
        if request is None or event.sample in self._told:
            return
        if response is None and event.num_tokens:
            return
        is_quiet = not self._under_way
        self._later(partial(self._write_end, request, event, response, is_quiet))

    def begin(self, checkpoint: Path, version: int) -> None:
        """Empty the file, since a resume goes on from this checkpoint from now on. `version`: that
        of its weights."""
        self._stand_at(checkpoint, version)
        self._found.clear()
        self._under_way.clear()
        self._told.clear()
        self._later(self._begin_file)

    def close(self) -> None:
        """Finish writing the file, and record nothing any more. Further calls do nothing."""
        self._version = None
        self._under_way.clear()
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(CLOSE_S)
            self._thread = None

    # -- the file ------------------------------------------------------------------------

    def _stand_at(self, checkpoint: Path, version: int) -> None:
        digest = sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()
        self._version = version
        self._head = {"format": FORMAT, "checkpoint": digest, "version": version}

    def _read(self) -> None:
        """Read the records that may be used, and cut the file off after them. A file of another
        checkpoint or format is removed."""
        frames = _frames(self._path)
        try:
            head, size = next(frames, (b"{}", 0))
            if json.loads(head) != self._head:
                raise ValueError("of another checkpoint")
            ends: list[RecordedEnd] = []
            sound = size, 0
            for body, size in frames:
                end, is_quiet = _end_of(body)
                ends.append(end)
                if is_quiet or not self._in_order:
                    sound = size, len(ends)
        except (ValueError, KeyError, TypeError):  # of another checkpoint, or another version's
            self._path.unlink(missing_ok=True)
            return
        size, count = sound
        self._found = {end.event.sample: (place, end) for place, end in enumerate(ends[:count])}
        self._file = self._path.open("r+b", buffering=0)
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def _later(self, deed: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="salvage", daemon=True)
            self._thread.start()
        self._inbox.put(deed)

    def _work(self) -> None:
        while (deed := self._inbox.get()) is not None:
            try:
                deed()
            except OSError as error:  # a full disk: a run without it is only slower to resume
                logger.warning("%s: %s; a resume will draw its samples again", self._path, error)
                self._file, self._head = None, {}
        if self._file is not None:
            self._file.close()

    def _begin_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._path.unlink(missing_ok=True)

    def _write_end(
        self,
        request: GenerationRequest,
        event: SampleGenerated | SampleAborted,
        response: Response | None,
        is_quiet: bool,
    ) -> None:
        if not self._head:
            return
        facts = to_plain(event)
        for name in ("time_s", "engine", "incarnation"):
            facts.pop(name, None)
        line = {
            "event": type(event).__name__,
            "facts": facts,
            "key": _key(request),
            "quiet": is_quiet,
            "response": None,
        }
        arrays = b""
        if response is not None:
            line["response"] = {
                name: getattr(response, name) for name in ("finish_reason", "version", "redraws")
            }
            arrays = np.array(response.tokens, np.int32).tobytes()
            arrays += np.array(response.log_probs, np.float64).tobytes()
        body = json.dumps(line, separators=(",", ":")).encode() + b"\n" + arrays
        if self._file is None:
            self._file = self._path.open("wb", buffering=0)
            self._file.write(_framed(json.dumps(self._head).encode()))
        self._file.write(_framed(body))


def _end_of(body: bytes) -> tuple[RecordedEnd, bool]:
    """Returns the record in this body of a frame (size, checksum, body), and whether no sample was
    being generated any more. Only up to such a record can a resume repeat the run bit for bit."""
    line, _, arrays = body.partition(b"\n")
    facts = json.loads(line)
    event: Any = from_plain(EVENTS[facts["event"]], {"time_s": 0.0, **facts["facts"]})
    return RecordedEnd(event, facts["key"], facts["response"], arrays), facts["quiet"]


def _framed(body: bytes) -> bytes:
    return _SIZES.pack(len(body), zlib.crc32(body)) + body


def _frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yields the body of each frame (size, checksum, body) in the file, and the byte at which the
    frame ends, up to the first damaged one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        end = 0
        while len(sizes := file.read(_SIZES.size)) == _SIZES.size:
            size, checksum = _SIZES.unpack(sizes)
            body = file.read(size)
            if len(body) != size or zlib.crc32(body) != checksum:
                return
            end += _SIZES.size + size
            yield body, end


def _key(request: GenerationRequest) -> str:
    """Returns a digest of the request. Equal digests mean equal responses under the same
    weights."""
    digest = blake2b(digest_size=16)
    carried = request.carried
    rules = {
        "sampling": asdict(request.sampling),
        "noise": str(request.noise or request.sample),
        "turn": request.turn,
        "forced_length": request.forced_length,
        "carried": carried
        and [len(carried.tokens), carried.verify, carried.floor, carried.ceiling, carried.redraws],
    }
    digest.update(json.dumps(rules, sort_keys=True).encode())
    digest.update(np.array(request.prompt_tokens, np.int64).tobytes())
    if carried is not None:
        digest.update(np.array(carried.tokens, np.int64).tobytes())
        digest.update(np.array(carried.log_probs, np.float64).tobytes())
    return digest.hexdigest()
