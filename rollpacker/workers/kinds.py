"""The kinds of messages between an owner and the program of one of its processes: one numbering.

    up     HELLO pid       once, at once: the process is there
    down   SETUP           once: what the program is to make
    up     READY           once, when it is made
           REFUSED text    it cannot be made, which the user must mend
           FAILED text     it cannot be made or go on, which is our mistake; the process ends
    down   CALL number     something to do
           CANCEL number   the answer to this call is not awaited any more
           END number      the program may forget what this number stands for
    up     ANSWER number   the answer to a call
           ERROR number    the error that a call raised
           STOPPED number  the program has received CANCEL, and says what had been done until then
           BEAT            the program lives; it may say how it is
           LOGGED          a line of the program's log

A program and its owner agree on the contents of messages. Not every program has every kind.
"""

from __future__ import annotations

HELLO, SETUP, READY, REFUSED, FAILED, CALL, CANCEL, END, ANSWER, ERROR, STOPPED, BEAT, LOGGED = (
    range(13)
)
