"""Turns exceptions into messages and exit codes. Classes are known by their names, so that nothing
heavy is imported.

A user's mistake, or a disk that is full, is one message without a traceback. A bug keeps its
traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE_EXIT_CODE = 4

EXIT_CODES = {
    0: "done",
    1: "a bug in RollPacker, or a part of it that failed: the traceback says where (of doctor:"
    " training cannot start)",
    2: "something in the command, the config or the data is not right",
    3: "NaN or infinity in the loss, a log-prob or the gradient; no update was applied",
    DEADLINE_EXIT_CODE: "a wait passed its deadline; the run can be resumed",
    5: "a file could not be written or read (full disk, permissions)",
    6: "trainer processes, engines or reward hosts ended again and again, or the cluster is gone or"
    " gave the run's devices to another job; the run can be resumed",
    7: "samples get no verdicts, as of a reward that always fails; mended, the run can be resumed",
    75: "another run is at work in this folder; try again later",
    130: "interrupted",
}

_USER_ERRORS = {
    "rollpacker.environments.environment.EnvironmentSetupError",
    "rollpacker.rewards.reward.RewardError",
    "rollpacker.sandbox.sandbox.SandboxUnavailable",
}
"""Names of exception classes that stand for a user's mistake, besides the package's
`ValueError`s."""

_BY_NAME = {
    "rollpacker.trainer.trainer.NonFiniteError": 3,
    "rollpacker.run.errors.DeadlineExceeded": DEADLINE_EXIT_CODE,
    "rollpacker.trainer.trainer.TrainerProcessError": 6,
    "rollpacker.run.errors.EnginesLost": 6,
    "rollpacker.run.errors.HostsLost": 6,
    "rollpacker.cluster.seats.seat.LeaseLost": 6,
    "rollpacker.rewards.hosts.RewardHostsLost": 6,
    "rollpacker.run.errors.RewardsFailed": 7,
    "rollpacker.run.errors.FolderInUse": 75,
}

_OF_TRAINING = (
    *("cloudpickle", "huggingface_hub", "jinja2", "packaging", "pyarrow", "safetensors"),
    *("tokenizers", "torch", "transformers"),
)
"""Packages of the extra `train`, which simulator, planner and reports do without."""

_ELSEWHERE = "(runs_dir=..., or --out of a report)"
_OS_ADVICE = {
    errno.ENOSPC: "the disk is full. Free some space and try again (a run goes on with --resume)",
    errno.EDQUOT: "the disk quota is used up. Free some space and try again (a run: --resume)",
    errno.EACCES: f"permission denied. Choose a folder that you may write to {_ELSEWHERE}",
    errno.EPERM: f"not permitted. Choose a folder that you may write to {_ELSEWHERE}",
    errno.EROFS: f"this file system is read-only. Choose another folder {_ELSEWHERE}",
    errno.ENOENT: "there is no such file or folder",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.EISDIR: "this is a folder, a file was expected",
    errno.EEXIST: "a file of this name is in the way",
    errno.ENAMETOOLONG: "this name is too long for the file system",
    errno.ELOOP: "its symbolic links go in circles",
    errno.EIO: "the disk or its connection failed. The run can be resumed once it works again",
    errno.ESTALE: "the network file system lost this file. The run can be resumed once it is back",
    errno.EMFILE: "too many open files. Raise the limit (ulimit -n)",
}

_MEMORY_ADVICE = (
    "Lower rollout.engine.kv_cache_gib or train.micro_batch_tokens, or set "
    "model.gradient_checkpointing=true"
)


def report_error(error: BaseException) -> int:
    """Print an error's message to stderr, a bug's after its traceback. Returns the exit code."""
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
    """Returns the exit code for an exception, and the message to print."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    for name, code in _BY_NAME.items():
        if name in names:
            return code, str(error)
    if "torch.OutOfMemoryError" in names or "torch.cuda.OutOfMemoryError" in names:
        return 5, f"the GPU is out of memory. {_MEMORY_ADVICE} ({str(error).splitlines()[0]})"
    if isinstance(error, KeyboardInterrupt):
        return 130, str(error) or "interrupted"
    if isinstance(error, BrokenPipeError):
        return 5, ""
    if isinstance(error, ModuleNotFoundError) and error.name in _OF_TRAINING:
        return 2, (
            f"this needs {error.name}, which is not installed: pip install 'rollpacker[train]' "
            "brings what runs, models and their files need"
        )
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


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """A context for writes into this folder. An `OSError` that says that the disk is full or
    failing, but names no file, is given the folder's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            error.filename = str(folder)
        raise
    except Exception as error:
        if "No space left on device" in str(error):  # a library's wrapping of the system's error
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error
        raise


def _is_ours(error: ValueError) -> bool:
    """Whether this package raised the error: its class or the code that raised it is the package's
    own. A `ValueError` out of a library is a bug, and keeps its traceback."""
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
    """Returns the error; of an exception group (several tasks failed), the first error in it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
