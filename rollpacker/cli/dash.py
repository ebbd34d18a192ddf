"""`rollpacker dash [RUNS]`: live pages of runs, in a browser on this machine."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "dash",
        help="watch runs in a browser, live",
        description="Serves the page of every run below a folder on 127.0.0.1, and follows those "
        "that are still going. It only reads files: a run does not notice. Ctrl-C ends it.",
    )
    parser.add_argument(
        "runs", metavar="RUNS", nargs="?", default="runs", help="a folder of runs, or one run"
    )
    parser.add_argument(
        "--port", type=int, default=None, help="default 8765, or the next one that is free"
    )


def run(args: argparse.Namespace) -> int:
    from rollpacker.report.page.server import serve

    return serve(args.runs, args.port)
