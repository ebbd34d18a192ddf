"""Exceptions to messages and exit codes. Classes are told by name, so that nothing heavy is
imported.

A user's mistake, or a disk that is full, is one message without a traceback. A bug keeps its
traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback

EXIT_CODES = {
    0: "done",
    1: "a bug in RollPacker, or a part of it that failed: the traceback says where",
    2: "something in the command, the config or the data is not right",
    3: "NaN or infinity in a reward, the loss or the gradient; no update was applied",
    4: "a wait passed its deadline; the run can be resumed",
    5: "a file could not be written or read (full disk, permissions)",
    130: "interrupted",
}

_USER_ERRORS = {"rollpacker.rewards.base.RewardError"}
"""User mistakes that are no `ValueError`."""

_BY_NAME = {
    "rollpacker.trainer.base.NonFiniteError": 3,
    "rollpacker.controller.base.DeadlineExceeded": 4,
}

_OS_ADVICE = {
    errno.ENOSPC: "the disk is full. Free some space, then go on with --resume",
    errno.EDQUOT: "the disk quota is used up. Free some space, then go on with --resume",
    errno.EACCES: "permission denied. Choose a folder that you may write to (runs_dir=...)",
    errno.EPERM: "not permitted. Choose a folder that you may write to (runs_dir=...)",
    errno.EROFS: "this file system is read-only. Choose another folder (runs_dir=...)",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "this is a folder, a file was expected",
}


def report_error(error: BaseException) -> int:
    """Print what is to be said about `error` to stderr; returns the exit code."""
    error = _innermost(error)
    code, message = classify(error)
    if code == 1:
        traceback.print_exception(error)
    if isinstance(error, BrokenPipeError):
        # The reader is gone; without this Python complains once more while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    elif message:
        print(f"rollpacker: {message}", file=sys.stderr)
    return code


def classify(error: BaseException) -> tuple[int, str]:
    """Exit code and message of an exception."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    for name, code in _BY_NAME.items():
        if name in names:
            return code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, BrokenPipeError):
        return 5, ""
    if isinstance(error, OSError) and error.errno in _OS_ADVICE:
        where = f"{error.filename}: " if error.filename is not None else ""
        return 5, where + _OS_ADVICE[error.errno]
    if "No space left on device" in str(error):  # libraries that wrap the operating system's error
        return 5, f"{_OS_ADVICE[errno.ENOSPC]} ({error})"
    if names & _USER_ERRORS or (isinstance(error, ValueError) and _is_ours(error)):
        return 2, str(error)
    return 1, (
        "this is not your mistake but ours. Please report it with the lines above, "
        "the command and the config."
    )


def _is_ours(error: ValueError) -> bool:
    """Whether this package wrote the message: its own class, or raised in its own code.

    A `ValueError` out of a library is a bug that keeps its traceback.
    """
    if type(error).__module__.startswith("rollpacker."):
        return True
    if type(error) is not ValueError:
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    if frame is None:
        return False
    return str(frame.tb_frame.f_globals.get("__name__", "")).startswith("rollpacker.")


def _innermost(error: BaseException) -> BaseException:
    """The first real error of an exception group (several tasks may fail at once)."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
