"""Processes that this one starts, talks to, watches and ends. Standard library only.

    `host.py`: `Host.start` starts a process here, or on another host (`hosts/`).
    `child.py`: `Child` tells whether a process here is stopped or how it ended, and ends it.
    `line.py`, `listener.py`: lines carry messages over an inherited socket, or over a port.
    `kinds.py`: the kinds of messages. `../codec.py`: their values, as bytes that cannot execute.
    `loop.py`: one thread with an event loop for the lines to all processes.

The process that starts another is its owner. The two sides of a process are, by what it runs:

    an engine or a reward host: the owner's `Served` (`served.py`), and `Program` (`program.py`).
    a user's function or environment: `WorkerPool` (`pool.py`), and `connected` (`answering.py`).
    a trainer's rank: `Member` and `replies` (`group.py`), and `answer_calls` (`program.py`).

A process says hello at once and is told what to make; it reports that it is ready, or why it cannot
be. A `Served` process answers at any time: silence longer than its heartbeat means that a signal
has stopped it, or that it hangs. The pool's workers run a user's code: each call has a limit, and a
worker that overruns it is ended. The members of a group answer one call each and are lost together.
A lost process is ended with all that it started; its owner decides whether to start another.

Limits: the bytes of a message (`Line(max_bytes=)`), a stranger's time and bytes before its hello, a
minute's output, the seconds until a process is ready (`START_S`), until its silence is a loss
(`HEARTBEAT_S`), and until a kill is forced. A process's owner sets how long its answers may take.
"""
