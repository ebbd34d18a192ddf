"""`rollpacker report RUN`: prints the summary table, and writes page, timeline and trace anew."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "report",
        help="summary table, page, timeline picture and trace of a run",
        description="Reads a run's event log, prints the summary table, and writes report.html "
        "(one file: curves, timeline, samples; open it in a browser), summary.json, timeline.png "
        "and trace.json (open it at ui.perfetto.dev) into the run's folder. "
        "Works on a run that is still going or that was killed.",
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder, such as runs/quickstart")
    parser.add_argument(
        "--out", metavar="FOLDER", help="write the files here instead of the run's folder"
    )
    parser.add_argument(
        "--steps",
        metavar="FIRST[-LAST]",
        help="steps in timeline.png, such as 5 or 5-9 (default: six steps, around a long round)",
    )
    parser.add_argument(
        "--against",
        metavar="RUN",
        help="a second run, without tail batching: also write comparison.png of the two",
    )
    parser.add_argument(
        "--trace-steps",
        metavar="N",
        type=int,
        default=50,
        help="last steps in trace.json (default %(default)s; every sample is a span)",
    )
    parser.add_argument(
        "--samples",
        metavar="N_OR_ID",
        nargs="?",
        const="3",
        help="instead of all that, print samples as dialogues: so many of the newest step, from "
        "the best to the worst (3 if left out), or the one of this id",
    )


def run(args: argparse.Namespace) -> int:
    from pathlib import Path

    from rich.text import Text

    from rollpacker.cli.log_progress import log_progress
    from rollpacker.imports import require
    from rollpacker.report.files import write_reports
    from rollpacker.report.log import EventLog, events_path
    from rollpacker.report.summary import summarize
    from rollpacker.report.summary_table import render
    from rollpacker.report.timeline import draw_comparison
    from rollpacker.run import output
    from rollpacker.run.error_messages import naming
    from rollpacker.writing import printable

    console = output.console()
    if args.samples is not None:
        return _print_samples(console, args)
    events = events_path(args.run)
    folder = Path(args.out) if args.out else events.parent
    if args.steps or args.against:
        require("matplotlib", extra="report", what="drawing a picture")
    log = EventLog(events)
    try:
        with naming(folder), log_progress(log) as tell:
            summary = write_reports(
                args.run,
                out=folder,
                steps=parse_steps(args.steps),
                trace_steps=args.trace_steps,
                log=log,
                tell=tell,
            )
    except OSError:  # a folder of somebody else's: the table needs no room
        console.print(render(summarize(args.run)))
        raise
    if log.truncated:
        where = printable(str(events))
        told = f"The last line of {where} is cut off (the run was killed while it wrote): left out."
        console.print(Text(told, style="yellow"), soft_wrap=True)
    if summary["steps"]["total"] == 0:
        console.print(Text(f"{printable(str(events))} holds no finished step yet."), soft_wrap=True)
        return 0
    names = ("report.html", "summary.json", "timeline.png", "trace.json")
    written = [name for name in names if (folder / name).exists()]
    if args.against:
        draw_comparison(events, events_path(args.against), folder / "comparison.png")
        written.append("comparison.png")
    console.print(render(summary))
    console.print(
        Text(f"\nWrote {', '.join(written)} to {printable(str(folder))}."), soft_wrap=True
    )
    if summary["steps"]["total"] > args.trace_steps:
        part = f"the last {args.trace_steps} of {summary['steps']['total']:,} steps"
        console.print(Text(f"trace.json holds {part} (--trace-steps)."), soft_wrap=True)
    return 0


def _print_samples(console: Console, args: argparse.Namespace) -> int:
    from rich.text import Text

    from rollpacker.report.sample_view import chosen, lines_of

    for row in chosen(args.run, args.samples):
        for line, style in lines_of(row):
            console.print(Text(line, style=style), soft_wrap=True)
    return 0


def parse_steps(text: str | None) -> range | None:
    """Step numbers from "5" or "5-9"; None for None. Raises `ValueError` for other texts."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdigit() or (dash and not last.isdigit()) or int(last or first) < int(first):
        raise ValueError(f"--steps takes one step or a range, such as 5 or 5-9, not {text!r}")
    return range(int(first), int(last or first) + 1)
