"""Runs one program as `__main__`, inside the sandbox, after all rights were given up.

It is given into the sandbox as one compiled file. A warm run, forked from a loaded interpreter,
calls `run_program`; a cold run is a new interpreter started with this file. It imports only what is
built in (not even `__future__`), since a cold run would pay for the rest.
"""

import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import _thread
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

WORK = "/tmp/work"
"""The folder in which a run works."""
READY = b"k"
"""The byte that a run writes to its pipe when the program's own code begins."""
THREAD_STACK = 8 << 20
"""Bytes of the stack of a program's further threads. Without it the C library would take the limit
of the first thread's stack (64 MiB)."""
OUT_OF_MEMORY_SIGNAL = 64
"""The signal with which a run ends itself if its program ended with MemoryError."""
FOR_THE_C_LIBRARY = b"MALLOC_ARENA_MAX"
"""An environment variable that is not shown to programs. It stops the C library from making more
heaps, each of which would reserve 64 MB of a run's address space."""


def run_program(program: bytes) -> None:
    """Run the program, and exit with the status that an interpreter of its own would have."""
    main = type(sys)("__main__")
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    main.__file__ = f"{WORK}/main.py"
    sys.modules["__main__"] = main
    sys.path.insert(0, WORK)
    sys.argv = ["main.py"]
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    _open_standard_streams()
    status = 1
    out_of_memory = False
    try:
        exec(compile(program, "main.py", "exec", dont_inherit=True), main.__dict__)
        status = 0
    except SystemExit as stop:
        status = _exit_status(stop)
    except BaseException as error:
        out_of_memory = isinstance(error, MemoryError)
        _show(error)
    _finish()
    if out_of_memory:
        posix.kill(posix.getpid(), OUT_OF_MEMORY_SIGNAL)
    posix._exit(status)


def _open_standard_streams() -> None:
    """Give the program new objects for its standard streams. Those inherited from the zygote (the
    process that forks the runs) still describe the zygote's files."""
    streams = (("stdin", "r", -1, "strict"), ("stdout", "w", -1, "strict"))
    for fd, (name, mode, buffering, errors) in enumerate(
        (*streams, ("stderr", "w", 1, "backslashreplace"))
    ):
        stream = open(  # noqa: SIM115
            fd, mode, buffering, encoding="utf-8", errors=errors, closefd=False
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _exit_status(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    _quietly(lambda: print(stop.code, file=sys.stderr))
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback as usual, without the frame of this file."""
    below = error.__traceback__ and error.__traceback__.tb_next
    _quietly(lambda: sys.excepthook(type(error), error.with_traceback(below), below))


def _finish() -> None:
    """End threads, call exit functions and flush buffers, as an interpreter does at its end."""
    import atexit

    if "threading" in sys.modules:
        _quietly(lambda: sys.modules["threading"]._shutdown())
    _quietly(atexit._run_exitfuncs)
    _quietly(lambda: sys.stdout.flush())
    _quietly(lambda: sys.stderr.flush())


def _quietly(action: "Callable[[], object]") -> None:
    """Call `action` and ignore any error, so that the end of a run goes on even if the program has
    broken the interpreter."""
    try:
        action()
    except BaseException:
        return


def add_exit() -> None:
    """Add the functions `exit` and `quit`, which an interpreter started with -S lacks."""
    import builtins
    from _sitebuiltins import Quitter

    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))


def _read_all(fd: int) -> bytes:
    with open(fd, "rb") as file:
        return file.read()


def _main(program: int, ready: int) -> None:
    """Run a program in this new interpreter. `program`: descriptor of the file with the program.
    `ready`: descriptor of the pipe for `READY`."""
    posix.environ.pop(FOR_THE_C_LIBRARY, None)
    posix.unsetenv(FOR_THE_C_LIBRARY)
    add_exit()
    _thread.stack_size(THREAD_STACK)
    text = _read_all(program)
    posix.write(ready, READY)
    posix.close(ready)
    run_program(text)


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
