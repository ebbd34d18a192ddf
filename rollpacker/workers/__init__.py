"""Processes that this one starts, talks to, watches and ends. Standard library only.

    Child.start(command, name, guarded=...)   child.py     stopped? how ended? kill, gone, close
      a guardian                              guardian.py  its parent ends all that it started
    Line.pair(), Line.inherited(fd)           line.py      messages over an inherited socket
    Listener(host), connect(...)              listener.py  or over a port, for who has a token
    Codec(*types)                             codec.py     what a message says, as bytes
    Output(), OutputQuota()                   output.py    what it prints, as lines for a log

The owner makes a line and starts the child with the other side of it (`pass_fds`), which it then
closes. The child's first message is its hello, for which the owner sets a time limit. A line that
ends means a child that has ended or is about to: `how_ended` says how. A child that is silent may
be stopped: `is_stopped`. Then it is killed, and a new one takes its place.

    thread   line.send(kind, number, payload); line.receive(timeout_s); ready(lines, timeout_s)
             child.how_ended(wait_s); child.kill(); child.close()
    asyncio  line.attach(loop, heard, ended); line.post(kind, number, payload)
             child.kill(); await child.gone()

Limits: the bytes of a message (`Line(max_bytes=)`), a stranger's time and bytes before its hello, a
minute's output, the seconds until a kill is forced. How long an answer may take, only its owner
knows.
"""
