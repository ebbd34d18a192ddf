"""Weights that go from the trainer's processes straight to those of the engines, in buckets.

    senders     processes of the trainer that hold parts of the weights: shards are not gathered
    receivers   processes that compute with an engine's weights
    broadcast   buckets go through torch.distributed: gloo, or NCCL between CUDA devices
    ipc         buckets lie in memory that all these processes map: a file in memory, or a
                CUDA device's; a barrier says that one is there, and that the last one was read

All of them form a group, which has a number, the epoch. If one of them is lost the others' calls
fail, and a group with a new number must be made. Each sender's part of a bucket ends in a stamp: a
sum over its bytes, the version and the bucket's number. Weights that are torn, or of another
version, are refused. Nothing is pickled. Importing this is quick: torch comes with the first group.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rollpacker.weights.buckets import (
    STAMP_BYTES,
    Bucket,
    Part,
    buckets_of,
    end_of,
    open_slots,
    parts_of,
    shared_slots,
    stamp_of,
    values_in,
)
from rollpacker.workers.loopback import LOOPBACK, gloo_on_loopback

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Carrier = Literal["broadcast", "ipc"]

BUCKET_BYTES = {
    ("broadcast", "cpu"): 2 << 20,
    ("ipc", "cpu"): 16 << 20,
    ("broadcast", "cuda"): 256 << 20,
    ("ipc", "cuda"): 512 << 20,
}
"""Most bytes of a bucket, by carrier and type of device. Small ones stay in a CPU's cache, and all
processes have to meet once for each that is shared (`benchmarks/hand_over.py`). Those of a GPU were
never measured."""
ROOMS: dict[Carrier, int] = {"broadcast": 4, "ipc": 2}
"""Number of buckets that are on their way at once."""
JOIN_S = 30.0
"""Seconds that a process waits for the others of a new group."""
WAIT_S = 60.0
"""Seconds that a process waits for others to send or take a bucket."""
LOOK_S = 0.2
"""Seconds between two looks whether another process of the group has failed."""
_FAILED = "failed"
"""Key that is set in the group's part of the store once one of its processes has failed."""


class UndeliveredError(RuntimeError):
    """Raised if weights did not arrive: a process of the group is lost, or they are torn. What has
    arrived by then is a part of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What a process needs to know to take part in a delivery of weights."""

    carrier: Carrier
    version: int
    address: tuple[str, int]
    """Host and port of the key-value store by which the group's processes find each other."""
    epoch: int
    """Number of the group. Processes make it in the first delivery that names it."""
    senders: int
    """Number of senders, which are the group's first members."""
    size: int
    """Number of members of the group."""
    number: int = 0
    """Number of the member that is told. Of an engine of several processes: of the first one."""


class Arrived(NamedTuple):
    """Adjacent elements of a tensor that have arrived. They are valid until the next ones come."""

    name: str
    shape: tuple[int, ...]
    start: int
    """Number of elements of the whole tensor before these."""
    values: Tensor
    """The elements, in one dimension."""


class Member:
    """A process's places in groups: by carrier in the newest one, which is made in the first
    delivery of its epoch."""

    def __init__(self) -> None:
        self._groups: dict[Carrier, Group] = {}

    def _of(
        self, delivery: Delivery, number: int, device: torch.device, parts: Sequence[Part]
    ) -> Group:
        group = self._groups.get(delivery.carrier)
        if group is None or (group.address, group.epoch) != (delivery.address, delivery.epoch):
            self.leave(delivery.carrier)
            group = self._groups[delivery.carrier] = Group(delivery, number, device, parts)
        return group

    def leave(self, carrier: Carrier) -> None:
        """Leave the group of this carrier, if there is one, so that the others' calls fail."""
        if (group := self._groups.pop(carrier, None)) is not None:
            group.close()

    def send(
        self,
        delivery: Delivery,
        number: int,
        device: torch.device,
        held: Mapping[Part, Tensor],
        version: int,
    ) -> None:
        """Send the elements that this process holds, each part's in one dimension, as sender
        `number`; they may be of another dtype than they are sent in. `version`: that of the
        weights. Raises `UndeliveredError`."""
        with self._failing(delivery):
            self._of(delivery, number, device, [*held]).send(held, version)

    @contextmanager
    def receiving(
        self, delivery: Delivery, device: torch.device, offset: int = 0
    ) -> Iterator[tuple[Mapping[str, tuple[int, ...]], Iterator[Arrived]]]:
        """Yield the names and shapes of the tensors, and the elements as they arrive, to be used up
        inside the `with`. `offset`: number of this process in the engine. Raises
        `UndeliveredError`; after any error in the `with`, the group's other members fail too."""
        with self._failing(delivery):
            group = self._of(delivery, delivery.number + offset, device, ())
            yield group.shapes, group.receive(delivery.version)

    @contextmanager
    def _failing(self, delivery: Delivery) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.leave(delivery.carrier)
            if type(error).__module__.startswith("rollpacker") or not isinstance(error, Exception):
                raise
            what = f"weights of version {delivery.version} did not arrive by {delivery.carrier}"
            raise UndeliveredError(f"{what}: {error}") from error


def whole(arriving: Iterator[Arrived]) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors, in memory of their own, as soon as all elements are there."""
    import torch

    missing: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    for name, shape, start, values in arriving:
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=values.dtype, device=values.device)
            missing[name] = tensors[name].numel()
        tensors[name].view(-1)[start : start + len(values)] = values
        missing[name] -= len(values)
        if not missing[name]:
            yield name, tensors.pop(name)


class Group:
    """The processes of one epoch, as one of them uses it. Some buckets are on their way at once."""

    def __init__(
        self, delivery: Delivery, number: int, device: torch.device, parts: Sequence[Part]
    ) -> None:
        """Join the others as member `number`. `parts`: what this process holds, if it sends. Raises
        `RuntimeError` if they do not come."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # hidden

        self.address, self.epoch = delivery.address, delivery.epoch
        self.left_s = 0.0
        """When this process has left the group, on the monotonic clock; 0: it has not."""
        self._number, self._device = number, device
        self._senders = range(delivery.senders)
        self._is_sender = number in self._senders
        timeout = timedelta(seconds=JOIN_S)
        connection = TCPStore(*delivery.address, is_master=False, timeout=timeout)
        store = self._store = PrefixStore(str(delivery.epoch), connection)
        if self._is_sender:
            store.set(f"parts {number}", json.dumps(parts))
        listed = [parts_of(store.get(f"parts {sender}")) for sender in self._senders]
        self.shapes = {part.name: part.shape for own in listed for part in own}
        self._buckets = buckets_of(listed, BUCKET_BYTES[delivery.carrier, device.type])
        self._rooms = ROOMS[delivery.carrier]
        sizes = [max(end_of(b[s]) for b in self._buckets) + STAMP_BYTES for s in self._senders]
        self._slots: dict[int, Tensor] = {}
        """Room for buckets by sender, [rooms, bytes]: a sender's own, a receiver's all."""
        self._memory: object = None
        """Keeps the shared memory that this process has made. None: it has made none."""
        self._works: list[list[Any]] = [[] for _ in range(self._rooms)]
        """What is being sent or received in each of the two rooms."""
        self._groups: list[Any] = []
        """Process groups: one of all members, or one for each sender that this process meets."""
        self._is_joint = device.type == "cuda"
        """Whether broadcasts go to all members, other senders too: a group of NCCL's costs memory,
        and so there is one. Else each sender has a group with the receivers."""
        everybody = range(delivery.size)
        if delivery.carrier == "ipc":
            self._share(store, sizes)
            self._groups = [self._joined(store, everybody)]
        else:
            self._apart(store, everybody, sizes)
        self._is_ipc = delivery.carrier == "ipc"

    def _share(self, store: Any, sizes: Sequence[int]) -> None:
        """Make this sender's room for buckets, which others map, or map that of all senders."""
        if self._is_sender:
            made = shared_slots(self._rooms, sizes[self._number], self._device)
            self._slots[self._number], self._memory, told = made
            store.set(f"slots {self._number}", json.dumps(told))
            return
        for sender in self._senders:
            told = json.loads(store.get(f"slots {sender}"))
            self._slots[sender] = open_slots(told, self._rooms, sizes[sender])

    def _apart(self, store: Any, everybody: Sequence[int], sizes: Sequence[int]) -> None:
        """Make room for the buckets that come to this process, and join the groups for them."""
        import torch

        receivers = everybody[len(self._senders) :]
        for sender in self._senders:
            if self._is_joint or not self._is_sender or sender == self._number:
                room = torch.empty(
                    self._rooms, sizes[sender], dtype=torch.uint8, device=self._device
                )
                self._slots[sender] = room
        if self._is_joint:
            self._groups = [self._joined(store, everybody, nccl=True)] * len(self._slots)
        else:
            self._groups = [self._joined(store, [sender, *receivers]) for sender in self._slots]

    def _joined(self, store: Any, members: Sequence[int], *, nccl: bool = False) -> Any:
        """Return the process group of these members, of which this process is one."""
        from torch import distributed
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # hidden

        place = members.index(self._number)
        store = PrefixStore(f"group of {members[0]}", store)
        if nccl:
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=WAIT_S)
            return distributed.ProcessGroupNCCL(store, place, len(members), options)
        timeout = timedelta(seconds=JOIN_S)
        is_local = self.address[0] == LOOPBACK
        with gloo_on_loopback() if is_local else contextlib.nullcontext():
            group = distributed.ProcessGroupGloo(store, place, len(members), timeout)
        group.set_timeout(timedelta(seconds=WAIT_S))
        return group

    def close(self) -> None:
        """Leave the group, so that what others await in it fails."""
        with contextlib.suppress(RuntimeError):  # the run is over
            self._store.set(_FAILED, "")
        _left[:] = [one for one in _left if time.monotonic() - one.left_s < 2 * WAIT_S]
        self.left_s = time.monotonic()
        _left.append(self)

    # -- what they do together -------------------------------------------------------------

    def send(self, held: Mapping[Part, Tensor], version: int) -> None:
        """Send what this process holds as this version; see `Member.send`."""
        import torch

        own = self._number
        for number, bucket in enumerate(self._buckets):
            self._finish(number)
            slot = self._slots[own][number % self._rooms]
            end = end_of(bucket[own])
            for span in bucket[own]:
                first = span.start - span.part.start
                values_in(slot, span).copy_(held[span.part][first : first + span.length])
            slot[end : end + STAMP_BYTES].view(torch.int64)[0] = stamp_of(
                slot[:end], version, number
            )
            self._start(number, bucket)
        self._finish_all()

    def receive(self, version: int) -> Iterator[Arrived]:
        """Yield what arrives, which must be this version; see `Member.receiving`."""
        import torch

        wrong = torch.zeros((), dtype=torch.bool, device=self._device)
        for number, bucket in enumerate(self._buckets):
            ahead = 1 if self._is_ipc else self._rooms
            for later in range(number + ahead - 1 if number else 0, number + ahead):
                if later < len(self._buckets):
                    self._start(later, self._buckets[later])
            self._finish(number)
            for sender, room in self._slots.items():
                slot, end = room[number % self._rooms], end_of(bucket[sender])
                stamp = slot[end : end + STAMP_BYTES].view(torch.int64)[0]
                if bucket[sender]:
                    wrong |= stamp_of(slot[:end], version, number) != stamp
                for span in bucket[sender]:
                    part = span.part
                    yield Arrived(part.name, part.shape, span.start, values_in(slot, span))
        if bool(wrong):
            raise UndeliveredError(f"what arrived is torn, or not version {version} of the weights")
        self._finish_all()

    def _start(self, number: int, bucket: Bucket) -> None:
        """Begin to send or receive this bucket; or wait until it lies in shared memory, and all
        that was read of the one before has been."""
        from torch import distributed

        if self._is_ipc:
            self._meet()
            return
        options = distributed.BroadcastOptions()
        for place, sender in enumerate(self._slots):
            group, end = self._groups[place], end_of(bucket[sender])
            if end:
                options.rootRank = sender if self._is_joint else 0
                slot = self._slots[sender][number % self._rooms, : end + STAMP_BYTES]
                self._works[number % self._rooms].append(group.broadcast([slot], options))

    def _finish(self, number: int) -> None:
        """Wait until the room of this bucket is not being read or written by a broadcast."""
        for work in self._works[number % self._rooms]:
            self._wait(work)
        self._works[number % self._rooms] = []

    def _finish_all(self) -> None:
        if self._is_ipc:
            self._meet()
        for number in range(self._rooms):
            self._finish(number)

    def _meet(self) -> None:
        """Wait for all members."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._wait(self._groups[0].barrier())

    def _wait(self, work: Any) -> None:
        """Wait until something is sent, received or agreed on. Raises `RuntimeError` if it fails,
        or if another process has failed, which gloo tells those alone who wait for that one."""
        if self._is_joint and not self._is_ipc:  # NCCL's, for which the device waits
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():
                    raise
                if self._store.check([_FAILED]):
                    raise RuntimeError("another process of the group has failed") from None


_left: list[Group] = []
"""Groups that this process has left of late. Gloo ends none in which something is awaited, and
would wait for that."""
