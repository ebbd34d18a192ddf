"""Runs a worker process on another host: its first message names the folders of modules and the
program that it has to run."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from importlib import import_module

from rollpacker.workers.line import LineEnded, inherited_line


def main() -> None:
    line = inherited_line()
    assert line is not None, "a host starts this program"
    try:
        first = line.receive()
    except LineEnded:
        return
    paths, folder, program = pickle.loads(first.payload)
    own = [path for path in sys.path if path != os.getcwd()]  # which `-m` has put in front
    sys.path[:] = dict.fromkeys([*paths, *own])
    with contextlib.suppress(OSError):
        os.chdir(folder)
    import_module(program).main(line)


if __name__ == "__main__":
    main()
