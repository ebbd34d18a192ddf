"""What happens in a cluster, and what is to be done about it; `cluster/decide/cluster.py` is
between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollpacker.cluster.decide.job import ClusterJob, Phase, Times
from rollpacker.cluster.decide.nodes import Node
from rollpacker.codec import OMIT_DEFAULT

# -- events ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submitted:
    at_s: float
    job: ClusterJob


@dataclass(frozen=True, slots=True)
class Asked:
    """The job wants the nodes of a phase."""

    at_s: float
    job: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Left:
    """The job has no use for the nodes any more. With another token than that of its grant it is
    about a grant that is over, and changes nothing."""

    at_s: float
    job: str
    phase: Phase
    token: int


@dataclass(frozen=True, slots=True)
class Committed:
    """An iteration is over."""

    at_s: float
    job: str
    work_s: float
    """What the iteration took without waits for nodes and without switches."""
    times: Times | None = None
    """The same by phase, as it was measured on the job's nodes, weights handed over in training.
    None: nobody says, and nothing is learned."""
    kind: str = "plain"
    """Of its round."""
    step: int = field(default=0, metadata=OMIT_DEFAULT)
    """The job's number of it. 0: nobody says, and it is one more than the one before."""
    last: bool | None = field(default=None, metadata=OMIT_DEFAULT)
    """No iteration comes after it. None: nobody says, and it is the last that was submitted."""
    numbers_otherwise: bool = field(default=False, metadata=OMIT_DEFAULT)
    """The job numbers its commits as it likes: this is one more than the one before. (Earlier
    versions did not say so, and are replayed as they counted.)"""


@dataclass(frozen=True, slots=True)
class Ended:
    at_s: float
    job: str


@dataclass(frozen=True, slots=True)
class Withdrew:
    """The job asked for the nodes of a phase, and has no use for them any more."""

    at_s: float
    job: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class StayedAway:
    """The job is away for longer than it said, between two phases, and others wait for its turn
    (`Cluster.overdue`): it has none until it asks again."""

    at_s: float
    job: str


@dataclass(frozen=True, slots=True)
class Lost:
    """All processes of the job are gone, and it has not ended: it goes on from its last commit. A
    cancelled one has ended by that."""

    at_s: float
    job: str
    counts: bool = field(default=True, metadata=OMIT_DEFAULT)
    """Among those after which it is given up."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    at_s: float
    job: str


@dataclass(frozen=True, slots=True)
class Drained:
    """The node is to have no jobs any more, and gets none until it is `Restored`."""

    at_s: float
    node: Node
    has_host: bool = True
    """False: nobody can start anything there now."""


@dataclass(frozen=True, slots=True)
class Restored:
    at_s: float
    node: Node


@dataclass(frozen=True, slots=True)
class Grown:
    """A pool has more nodes from now on."""

    at_s: float
    pool: str
    nodes: int
    """In all."""


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


@dataclass(frozen=True, slots=True)
class Open:
    """These nodes are wanted, and paid for from now on."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Nobody needs these nodes."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Start the job, parked, on these nodes. A job that runs is stopped at the commit that it has
    just made, and goes on from there; a lost one from its last."""

    job: str
    group: int
    rollout_nodes: tuple[Node, ...]
    train_nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """The nodes of the phase are the job's until it leaves. Tokens rise, so that a device can
    refuse whoever comes with an older one."""

    job: str
    phase: Phase
    token: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is to end at its next commit if it was cancelled. Else it has lost its nodes, is to
    end at the commit that it has just made, and waits."""

    job: str
    reason: str
    of_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job was lost too often; it has left the cluster."""

    job: str


Command = Open | Close | Start | Grant | Stop | GiveUp


def leaving_first(commands: Sequence[Command], job: str) -> list[Command]:
    """With what the job is told before what others are that come to its nodes."""

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
