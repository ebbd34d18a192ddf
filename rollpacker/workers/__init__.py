"""Processes that this one starts, talks to, watches and ends. Standard library only.

    Host.start(module, name)         host.py      here, or on another host (hosts/)
      Child, its guardian            child.py     stopped? how ended? kill, gone, close
    Line, Listener                   line.py      messages over an inherited socket or a port
      their kinds                    kinds.py     HELLO, SETUP, READY ... one numbering
      what they hold                 ../codec.py  values as bytes that cannot execute
    LoopUse                          loop.py      one thread with a loop for all lines

    the owner has                    the program has
    Served              served.py    Program       program.py     an engine, a reward host
    WorkerPool          pool.py      connected     answering.py   functions, environments
      WorkerProcess     worker.py
    Member, replies     group.py     answer_calls  program.py     the trainer's ranks

A process says hello at once and is told what to make; it reports that it is ready, or why it cannot
be. A `Served` process answers at any time: silence longer than its heartbeat means that a signal
has stopped it, or that it hangs. The pool's workers run a user's code: each call has a limit, and a
worker that overruns it is ended. The members of a group answer one call each and are lost together.
A lost process is ended with all that it started; its owner decides whether to start another.

Limits: the bytes of a message (`Line(max_bytes=)`), a stranger's time and bytes before its hello, a
minute's output, the seconds until a process is ready (`START_S`), until its silence is a loss
(`HEARTBEAT_S`), and until a kill is forced. A process's owner sets how long its answers may take.
"""
