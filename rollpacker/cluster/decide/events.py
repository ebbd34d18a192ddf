"""The events that the decisions about a cluster take in, and the commands that follow from them
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
    """Time of the event in seconds, on the clock of whoever reports it."""


class _JobEvent(_Event, frozen=True):
    job: str
    """Name of the job that the event is about."""


class Submitted(_Event, frozen=True):
    job: ClusterJob


class Asked(_JobEvent, frozen=True):
    """The job asks for the nodes of a phase (rollout or train)."""

    phase: Phase


class Left(_JobEvent, frozen=True):
    """The job has given the nodes of a phase back. If the token (number of a grant) is not that of
    the job's present grant, the event is about an earlier grant and changes nothing."""

    phase: Phase
    token: int


class Committed(_JobEvent, frozen=True):
    """The job has finished an iteration (rollout and training), and may be moved now."""

    work_s: float
    """Seconds of the iteration, less waits for nodes and moves of jobs onto and off devices."""
    times: Times | None = None
    """Seconds of the iteration by phase, measured on the job's nodes; handing over the weights is
    part of training. None: they were not measured, and nothing is learned from the iteration."""
    kind: str = "plain"
    """Kind of the iteration's round (batch of generation), such as plain, short or long."""
    step: Omitted[int] = 0
    """Number of the iteration, as the job counts. 0 if the job does not say: the last plus 1."""
    last: Omitted[bool | None] = None
    """Whether the job ends after this iteration. None: the job does not say, so that it ends once
    it has done its submitted number of steps."""
    numbers_otherwise: Omitted[bool] = False
    """Whether the job numbers its commits in its own way, so that they are no iterations: the
    number was above its submitted steps. Then `step` is ignored and each commit counts as one
    iteration. Events of earlier versions do not have this field."""


class Ended(_JobEvent, frozen=True):
    """The job has ended, done or not, and is not to be started again: it leaves the cluster."""


class Withdrew(_JobEvent, frozen=True):
    """The job asked for the nodes of a phase, and does not need them any more."""

    phase: Phase


class StayedAway(_JobEvent, frozen=True):
    """The job has been away between two phases for longer than it may, while others wait for its
    turn (`Cluster.overdue`). It takes no part in the turns until it asks again."""


class Lost(_JobEvent, frozen=True):
    """All processes of the job are gone before it has ended. The job is started again from its last
    commit (finished iteration), unless it was cancelled: then it has ended."""

    counts: Omitted[bool] = True
    """Whether the loss counts towards giving up; not if the run's folder was in use by another."""


class Cancelled(_JobEvent, frozen=True):
    """A user has cancelled the job."""


class Drained(_Event, frozen=True):
    """The node is to get no more jobs, and the jobs on it have to leave, until it is `Restored`."""

    node: Node
    has_host: bool = True
    """Whether the node has a host, so that processes can be started on it. If not, jobs still to be
    started there go elsewhere at once."""


class Restored(_Event, frozen=True):
    """The node that was closed to jobs (`Drained`) may have jobs again."""

    node: Node


class Grown(_Event, frozen=True):
    """A pool has more nodes from now on."""

    pool: str
    nodes: int
    """Number of all nodes of the pool, the new ones included."""


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
    """Base of all commands of the cluster's decisions. The service stores a checksum of their
    `repr`: if a name or the order of fields changes, existing folders become unreadable."""


class Open(_Command, frozen=True):
    """These nodes, free until now, are needed and paid for from now on."""

    nodes: tuple[Node, ...]


class Close(_Command, frozen=True):
    """No job needs these nodes any more: they are free, and not paid for from now on."""

    nodes: tuple[Node, ...]


class Start(_Command, frozen=True):
    """Start the job on these nodes, whose devices are empty. A running job is stopped at the end of
    the iteration that it just did and goes on from there; a lost job from its last commit."""

    job: str
    group: int
    rollout_nodes: tuple[Node, ...]
    train_nodes: tuple[Node, ...]


class Grant(_Command, frozen=True):
    """The job holds the nodes of the phase until it leaves them. Each grant has a higher token
    (number) than earlier grants, so that a job with an outdated grant can be told apart."""

    job: str
    phase: Phase
    token: int


class Stop(_Command, frozen=True):
    """The job is to end. A cancelled job ends at its next commit (end of an iteration). Any other
    has lost its nodes: it ends at the commit that it has just made, and waits for other nodes."""

    job: str
    reason: str
    of_cancelled: bool = False


class GiveUp(_Command, frozen=True):
    """The job was lost too often, and is removed from the cluster."""

    job: str


Command = Open | Close | Start | Grant | Stop | GiveUp


def leaving_first(commands: Sequence[Command], job: str) -> list[Command]:
    """Return the commands reordered, so that those that stop or move this job come before those
    that start other jobs on its nodes."""

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
