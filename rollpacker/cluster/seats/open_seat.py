"""Finds the seat that a job's environment names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from rollpacker.cluster.seats.mailbox_seat import MailboxSeat
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, Alone, Seat

MAILBOXES = {"file": "rollpacker.cluster.seats.mail_file", "ray": "rollpacker.cluster.on_ray.mail"}
"""Modules that know mailboxes by address (`open_mailbox`), by its begin. They are loaded by name
when a seat needs one: what is behind ray is no part of this package."""


def open_seat(environ: Mapping[str, str]) -> Seat | None:
    """The seat that the environment names; None: the job runs by itself. Raises `ValueError` for
    what names none, and `OSError` where it cannot be reached."""
    where = environ.get(SEAT_VARIABLE)
    if where is None:
        return None
    if where == "alone":
        return Alone()
    address, _, incarnation = where.rpartition("#")
    address, _, job = address.rpartition("#")
    scheme = address.partition(":")[0]
    if not (job and incarnation.isdecimal() and scheme in MAILBOXES):
        raise ValueError(
            f"{SEAT_VARIABLE}={where}: no such seat; it is set by `rollpacker cluster`. Unset it "
            "to run alone"
        )
    mailbox = importlib.import_module(MAILBOXES[scheme]).open_mailbox(address)
    return MailboxSeat(mailbox, job, int(incarnation))
