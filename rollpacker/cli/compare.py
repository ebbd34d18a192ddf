"""`rollpacker compare RUN RUN ...`: what differs between runs, as a table."""

from __future__ import annotations

import argparse
from typing import Any

NO_END = 100_000
"""Width of a line in characters that no line reaches, so that none is folded."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="several runs beside each other",
        description="Prints results, seconds by cause, lengths and differing settings of several "
        "runs beside each other. Works on runs that are still going.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs, two or more")


def run(args: argparse.Namespace) -> int:
    import os

    from rollpacker.cli.log_progress import log_progress
    from rollpacker.report.compare import MAX_RUNS, read_compared, render_comparison
    from rollpacker.report.log import EventLog, events_path
    from rollpacker.report.summary import summarize_entries
    from rollpacker.run import output
    from rollpacker.writing import printable

    if not 2 <= len(args.runs) <= MAX_RUNS:
        raise ValueError(f"compare takes 2 to {MAX_RUNS} runs, not {len(args.runs)}")
    runs = []
    for run in args.runs:
        log = EventLog(events_path(run))
        with log_progress(log) as tell:
            tell(f"reading {printable(log.path.parent.resolve().name)}")
            runs.append(read_compared(log.path.parent, summarize_entries(log)))
    console = output.console()
    is_narrow = console.is_terminal or "COLUMNS" in os.environ
    if not is_narrow:  # a file, a pager: lines as long as they are
        console.width = NO_END
    console.print(render_comparison(runs, width=console.width if is_narrow else None))
    return 0
