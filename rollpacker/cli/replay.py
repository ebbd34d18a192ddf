"""`rollpacker replay RUN`: gives a run's events again to the core (the code that answers events
with commands), and compares the commands with those in the log."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "replay",
        help="feed a run's event log back to the core: same commands, or the first difference",
        description="Feed a run's events back to the core and compare the commands it gives with "
        "those that were recorded.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run's folder, or an events.jsonl")


def run(args: argparse.Namespace) -> int:
    """Replay a log, and return the exit code: 0 for the same commands, 1 for a difference."""
    from rollpacker.core.records import LogError
    from rollpacker.report.log import EventLog, events_path
    from rollpacker.run.replay import replay

    log = EventLog(events_path(args.folder))
    try:
        result = replay(log)
    except LogError as error:
        where = str(log.path)
        raise LogError(str(error) if where in str(error) else f"{where}: {error}") from None
    if log.truncated:
        print("The last line is cut short (a crash); everything before it was replayed.")
    if result.difference is not None:
        print(f"Different commands at {result.difference}")
        return 1
    print(f"{result.num_events} events, {result.num_steps} steps: the same commands.")
    return 0
