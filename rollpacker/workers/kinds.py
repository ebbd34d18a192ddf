"""The kinds of messages between an owner and the program of one of its processes: one numbering.

From the program to its owner:

    HELLO pid: first of all, the process is there.
    READY: what the owner wanted is made. REFUSED text: it cannot be made, by a user's mistake.
    FAILED text: it cannot be made or go on, by a mistake of ours; the process ends.
    ANSWER number, ERROR number: the answer to the call of this number, or the error it raised.
    STOPPED number: the call was cancelled, and this is what had been done until then.
    BEAT: the program lives, with or without news of its state. LOGGED: a line of its log.

From the owner to the program:

    SETUP: what the program is to make, sent once. CALL number: something to do.
    CANCEL number: the answer to this call is not awaited any more.
    END number: the program may forget what this number stands for.

A program and its owner agree on the contents of messages. Not every program has every kind.
"""

from __future__ import annotations

HELLO, SETUP, READY, REFUSED, FAILED, CALL, CANCEL, END, ANSWER, ERROR, STOPPED, BEAT, LOGGED = (
    range(13)
)
