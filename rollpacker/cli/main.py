"""`rollpacker VERB ...`: runs the command of this verb, and turns errors into one message and an
exit code. Next to nothing is imported at the top, since signals are handled only after imports."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from rollpacker.run import interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

GOES_ON_AFTER_SIGTERM = ("train",)
"""Verbs (commands) that SIGTERM and SIGHUP stop as Ctrl-C does. Others end without clean-up."""

WITH_MODELS = ("serve", "train", "warmup")
"""Verbs that need the packages of the extra `train`, whatever they are given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (None: `sys.argv`); returns the exit code (see `EXIT_CODES`)."""
    import importlib

    from rollpacker.cli.verbs import VERBS, build_parser, parse, unknown_verb
    from rollpacker.imports import require, silence_noise
    from rollpacker.run.error_messages import report_error

    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        arguments = ["--help"]
    verb = arguments[0]
    if not verb.startswith("-") and verb not in VERBS:
        print(unknown_verb(verb), file=sys.stderr)
        return 2
    try:
        args = parse(build_parser(), arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    if args.verb not in GOES_ON_AFTER_SIGTERM:
        interrupts.leave()
    silence_noise()
    if args.verbose:
        _show_information()
    try:
        if args.verb in WITH_MODELS:
            require("torch", extra="train", what=f"rollpacker {args.verb}")
        return int(importlib.import_module(f"rollpacker.cli.{args.verb}").run(args))
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich makes an exit of it
            return report_error(stop.__context__)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    # The outermost frame: whatever got here ends the process, and with a message.
    except BaseException as error:
        return report_error(error)


def _show_information() -> None:
    """Print messages of level INFO as Python prints warnings; a command sets up no logging."""
    import logging

    logging.getLogger("rollpacker").setLevel(logging.INFO)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.INFO)


def entry() -> NoReturn:
    """Run the command in `sys.argv`, and end the process with its exit code."""
    try:
        interrupts.heed()
        code = main()
    except KeyboardInterrupt:  # while this package was imported
        os.write(2, b"rollpacker: interrupted before it began; the same command starts again\n")
        code = 130
    # A KeyboardInterrupt that left an `exec` of text, as of a dataclass that was being made, lets
    # `python -m` end by SIGINT whatever became of it, until a text is executed again.
    exec("")
    sys.stdout.flush()
    sys.stderr.flush()
    from rollpacker.run.error_messages import DEADLINE_EXIT_CODE

    if code == DEADLINE_EXIT_CODE:  # what hangs in a thread would keep the process from ending
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    entry()
