"""The events that the cluster's decisions take in, and the commands that come of them
(`cluster/decide/cluster.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollpacker.cluster.decide.job import ClusterJob, Phase, Times
from rollpacker.cluster.decide.nodes import Node
from rollpacker.codec import Omitted

# -- events ------------------------------------------------------------------------


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at_s: float
    """Seconds on the clock of whoever reports the event."""


class _JobEvent(_Event, frozen=True):
    job: str
    """Name of the job that the event is about."""


class Submitted(_Event, frozen=True):
    job: ClusterJob


class Asked(_JobEvent, frozen=True):
    """The job wants the nodes of a phase."""

    phase: Phase


class Left(_JobEvent, frozen=True):
    """The job has no use for the nodes any more. If the token is not that of the job's present
    grant, the event is about a grant that is over and changes nothing."""

    phase: Phase
    token: int


class Committed(_JobEvent, frozen=True):
    """The job has finished an iteration."""

    work_s: float
    """Seconds of the iteration without waits for nodes and without switches."""
    times: Times | None = None
    """Seconds of the iteration by phase, measured on the job's nodes; handing over the weights is
    part of training. None: they were not measured, and nothing is learned from the iteration."""
    kind: str = "plain"
    """Kind of the iteration's round."""
    step: Omitted[int] = 0
    """The job's own number of the iteration. 0: the job does not say, and one is added to the
    number before."""
    last: Omitted[bool | None] = None
    """Whether the job ends after this iteration. None: the job does not say, and the number of
    submitted steps decides."""
    numbers_otherwise: Omitted[bool] = False
    """Whether the job numbers its commits in a way of its own, so that one is added to the number
    before. Events of versions that did not have this field are replayed as they were counted."""


class Ended(_JobEvent, frozen=True):
    """The job has ended for good."""


class Withdrew(_JobEvent, frozen=True):
    """The job asked for the nodes of a phase, and has no use for them any more."""

    phase: Phase


class StayedAway(_JobEvent, frozen=True):
    """The job has been away between two phases for longer than it said, while others wait for its
    turn (`Cluster.overdue`). It has no turn until it asks again."""


class Lost(_JobEvent, frozen=True):
    """All processes of the job are gone before it has ended. It goes on from its last commit; a job
    that was cancelled has ended by this."""

    counts: Omitted[bool] = True
    """Whether this loss is one of those after which the job is given up."""


class Cancelled(_JobEvent, frozen=True):
    """A user does not want the job any more."""


class Drained(_Event, frozen=True):
    """The node is to have no jobs any more, and gets none until it is `Restored`."""

    node: Node
    has_host: bool = True
    """Whether the node has a host, so that processes can be started there now."""


class Restored(_Event, frozen=True):
    """The node may have jobs again."""

    node: Node


class Grown(_Event, frozen=True):
    """A pool has more nodes from now on."""

    pool: str
    nodes: int
    """Number of all nodes of the pool."""


Event = (
    Submitted
    | Asked
    | Left
    | Committed
    | Ended
    | Withdrew
    | StayedAway
    | Lost
    | Cancelled
    | Drained
    | Restored
    | Grown
)

# -- commands ----------------------------------------------------------------------


class _Command(msgspec.Struct, frozen=True):
    """The service keeps a checksum of the `repr` of its commands: a changed name or order of fields
    makes folders of before unreadable."""


class Open(_Command, frozen=True):
    """These nodes are wanted, and paid for from now on."""

    nodes: tuple[Node, ...]


class Close(_Command, frozen=True):
    """Nobody needs these nodes any more."""

    nodes: tuple[Node, ...]


class Start(_Command, frozen=True):
    """Start the job on these nodes, with nothing on their devices. A job that runs is stopped at
    the commit that it has just made and goes on from there; a lost job goes on from its last
    commit."""

    job: str
    group: int
    rollout_nodes: tuple[Node, ...]
    train_nodes: tuple[Node, ...]


class Grant(_Command, frozen=True):
    """The nodes of the phase are the job's until it leaves them. Tokens rise, so that a device can
    refuse whoever comes with an older one."""

    job: str
    phase: Phase
    token: int


class Stop(_Command, frozen=True):
    """The job is to end. A cancelled job ends at its next commit. Any other has lost its nodes: it
    ends at the commit that it has just made, and waits for others."""

    job: str
    reason: str
    of_cancelled: bool = False


class GiveUp(_Command, frozen=True):
    """The job was lost too often, and has left the cluster."""

    job: str


Command = Open | Close | Start | Grant | Stop | GiveUp


def leaving_first(commands: Sequence[Command], job: str) -> list[Command]:
    """The commands in another order: those for this job come before those for jobs that take over
    its nodes."""

    def key(command: Command) -> int:
        match command:
            case Close() | Grant():
                return 0
            case Open():
                return 1
            case Start() | Stop() if command.job == job:
                return 2
        return 3

    return sorted(commands, key=key)
