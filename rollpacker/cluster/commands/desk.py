"""Lets a command find a cluster's service by its folder, and ask it by messages (*letters*).

The folder is named by --cluster or ROLLPACKER_CLUSTER, or is the only one served from `runs/` here.
Its file service.json has the address of the service's mailbox: the command posts a letter there,
and reads the answer in a box of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from rollpacker.writing import replacing

if TYPE_CHECKING:
    from rollpacker.cluster.seats.mailbox import Mailbox

CLUSTER_VARIABLE = "ROLLPACKER_CLUSTER"
FACTS_FILE, LOCK_FILE = "service.json", "service.lock"
ANSWER_S = 10.0
_RUNS = "runs"
_LATER = {
    "submit": ". What was submitted waits there, and may start once the service answers: rollpacker"
    " cluster cancel takes it back",
    **dict.fromkeys(("cancel", "drain"), ". What was asked waits there, and is done once it does"),
}
"""What the error message adds if the service does not answer, by the command's name."""


class Refused(ValueError):
    """The service has refused a question, for the reason in the message. Nothing was changed."""


class ServiceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about itself that a service leaves in its folder, for commands to find it."""

    name: str
    """Name of the cluster."""
    mailbox: str
    """Address of the service's mailbox."""
    host: str
    pid: int
    spec: Mapping[str, Any]
    """The settings of the cluster's file, with overrides applied, as plain values by name."""
    first_nodes: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Number of nodes of each pool when this folder was first served, by the pool's name; pools may
    have grown since. Empty in files of earlier versions: then `spec` has the numbers."""


def write_facts(folder: Path, facts: ServiceFacts) -> None:
    """Write the service's facts into its folder in one step: a reader never sees half of them."""
    with replacing(folder / FACTS_FILE) as draft:
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))


def read_facts(folder: Path) -> ServiceFacts:
    """Read the facts about a folder's service. Raises `ValueError` if no service has used it."""
    try:
        return msgspec.json.decode((folder / FACTS_FILE).read_bytes(), type=ServiceFacts)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} is no folder of a cluster: it has no {FACTS_FILE}. rollpacker cluster serve "
            "says which one it has"
        ) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{folder / FACTS_FILE} cannot be read: {error}") from None


def take_lock(folder: Path) -> IO[str]:
    """Lock the cluster's folder for this process until the returned file is closed. Raises
    `ValueError` if another service has locked the folder."""
    lock = (folder / LOCK_FILE).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        at = ""
        with contextlib.suppress(ValueError):
            at = f" (process {read_facts(folder).pid})"
        raise ValueError(
            f"another service is at work in {folder}{at}: end that one, or give this one a folder "
            "of its own with --folder"
        ) from None
    return lock


def is_served(folder: Path) -> bool:
    """Return whether a service of this host is running in the folder, by the lock that it holds."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def find_folder(given: str | None) -> Path:
    """Return the folder of the cluster that a command means: `given`, else that in
    ROLLPACKER_CLUSTER, else the only one served from `runs/` here. Raises `ValueError` if none, or
    several, are found."""
    if given or (given := os.environ.get(CLUSTER_VARIABLE)):
        return Path(given).expanduser()
    how = f"with --cluster FOLDER, or {CLUSTER_VARIABLE}"
    known = sorted(path.parent for path in Path(_RUNS).glob(f"*/{FACTS_FILE}"))
    served = [folder for folder in known if is_served(folder)]
    if len(served) == 1:
        return served[0]
    if served:
        names = ", ".join(map(str, served))
        raise ValueError(f"{len(served)} clusters are served here, {names}: say which one {how}")
    if known:
        names = ", ".join(map(str, known))
        raise ValueError(
            f"no cluster is served from {names}: start rollpacker cluster serve again, or name "
            f"another one {how}"
        )
    raise ValueError(
        f"there is no cluster in {_RUNS}/: start one with rollpacker cluster serve FILE, or name "
        f"it {how}"
    )


def open_mailbox(address: str) -> Mailbox:
    """Open the mailbox at this address. Raises `OSError` or `ValueError` if that is impossible."""
    from rollpacker.cluster.seats.mailbox_seat import MAILBOXES

    scheme = address.partition(":")[0]
    if scheme not in MAILBOXES:
        raise ValueError(f"{address} is no mailbox that this version knows")
    if scheme == "ray":
        from rollpacker.imports import require
        from rollpacker.workers.hosts.token import demand_token

        require("ray", extra="ray", what="a cluster on ray")
        demand_token()
    mailbox: Mailbox = importlib.import_module(MAILBOXES[scheme]).open_mailbox(address)
    return mailbox


class Desk:
    """Asks one cluster's service questions by letters (messages), and waits for the answers."""

    def __init__(self, folder: Path) -> None:
        """Raises `ValueError` if no service has used `folder`, or its mailbox cannot be reached."""
        self.folder = folder
        self.facts = read_facts(folder)
        self._own = f"desk-{secrets.token_hex(8)}"
        self._number = 0
        self._read = 0
        try:
            self._mailbox = open_mailbox(self.facts.mailbox)
        except OSError as error:
            raise ValueError(self._silent(error)) from error

    def _silent(self, error: OSError | None = None) -> str:
        """Return the text of the error that the service does not answer. `error`: what failed at
        posting the question; None if no answer came in time."""
        facts = self.facts
        where = f"process {facts.pid} on {facts.host}"
        is_here = facts.host == socket.gethostname()
        if is_here and error is not None and is_served(self.folder):
            return f"the service of cluster {facts.name} ({self.folder}) cannot be asked: {error}"
        if is_here and not is_served(self.folder):
            where += " has ended"
        why = "" if error is None else f" ({error})"
        return (
            f"the service of cluster {facts.name} ({self.folder}) does not answer: {where}. Start "
            f"it again with rollpacker cluster serve FILE --folder {self.folder}; its jobs are "
            f"still known{why}"
        )

    def ask(self, kind: str, facts: Mapping[str, Any]) -> Any:
        """Post a question to the service and return the values of its answer by name. `kind`: what
        is asked, such as submit; `facts`: values of the question by name. Raises `Refused` with the
        service's reason, and `ValueError` if no answer comes within `ANSWER_S` seconds."""
        from rollpacker.cluster.seats.mailbox import ALL, SERVICE

        self._number += 1
        key, until = str(self._number), time.monotonic() + ANSWER_S
        posted = ""
        try:
            while (left_s := until - time.monotonic()) > 0:
                if posted != self._mailbox.epoch:  # all letters were lost since
                    self._read = 0
                    self._mailbox.post(SERVICE, self._own, key, kind, facts)
                    posted = self._mailbox.epoch
                for letter in self._mailbox.read(self._own, self._read, min(left_s, 1.0)):
                    self._read = letter.number
                    self._mailbox.forget(self._own, letter.number)
                    if letter.facts.get("about") != key:
                        continue  # of a question that was given up
                    if letter.kind == "refused":
                        raise Refused(str(letter.facts["why"]))
                    return letter.facts
        except OSError as error:
            raise ValueError(self._silent(error)) from error
        finally:  # nobody else reads it
            with contextlib.suppress(OSError):
                self._mailbox.forget(self._own, ALL)
                self._read = 0
        raise ValueError(self._silent() + _LATER.get(kind, ""))


def open_desk(given: str | None) -> Desk:
    """Return a desk for the cluster in the folder `given`, or if that is None in the folder that
    `find_folder` finds. Raises `ValueError` if there is no such cluster."""
    return Desk(find_folder(given))
