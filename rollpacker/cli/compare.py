"""`rollpacker compare RUN RUN ...`: what differs between runs, as a table and as one page."""

from __future__ import annotations

import argparse
from typing import Any

NO_END = 100_000
"""Characters of a line; more than any that is written."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="several runs beside each other",
        description="Prints results, seconds by cause, lengths and differing settings of several "
        "runs beside each other, and writes compare.html, a page with their curves over each "
        "other. Works on runs that are still going.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folders of runs, two or more")
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="compare.html",
        help="where the page is written (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from rich.text import Text

    from rollpacker.cli.log_progress import log_progress
    from rollpacker.report.log import EventLog, events_path
    from rollpacker.report.page.compare import MAX_RUNS, render_comparison
    from rollpacker.report.page.document import write_page
    from rollpacker.report.page.own_code import code_that_differs
    from rollpacker.report.page.paired import paired_differences
    from rollpacker.report.page.run_book import read_run
    from rollpacker.report.page.seeds import seed_groups
    from rollpacker.report.writing import printable
    from rollpacker.run import output
    from rollpacker.run.error_messages import naming

    if not 2 <= len(args.runs) <= MAX_RUNS:
        raise ValueError(f"compare takes 2 to {MAX_RUNS} runs, not {len(args.runs)}")
    out = Path(args.out)
    if out.is_dir():
        out = out / "compare.html"
    books = []
    for run in args.runs:
        log = EventLog(events_path(run))
        with log_progress(log) as tell:
            tell(f"reading {printable(log.path.parent.resolve().name)}")
            books.append(read_run(run, log))
    folders = [book.folder for book in books]
    plain = [book.plain() for book in books]
    parts = zip(plain, paired_differences(folders), code_that_differs(folders, plain), strict=True)
    runs = [
        {**run, "paired": paired, "settings": [*run["settings"], *code]}
        for run, paired, code in parts
    ]
    groups = seed_groups(runs)
    console = output.console()
    is_narrow = console.is_terminal or "COLUMNS" in os.environ
    if not is_narrow:  # a file, a pager: lines as long as they are
        console.width = NO_END
    width = console.width if is_narrow else None
    console.print(render_comparison(runs, groups, width=width))
    with naming(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_page(out, runs, [], groups=[group.plain() for group in groups])
    console.print(Text(f"Wrote {printable(str(out))}."), soft_wrap=True)
    return 0
