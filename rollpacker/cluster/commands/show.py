"""Shows people the service's answer to `status`: a table of jobs, one job, or the cluster live."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollpacker.did_you_mean import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESH_S = 1.0
NUM_EVENTS = 8
ENDED = ("done", "failed", "cancelled")
_COLOURS = {
    "running": "green",
    "waiting": "yellow",
    "stopping": "yellow",
    "lost": "red",
    "failed": "red",
    "cancelled": "bright_black",
    "done": "bright_black",
}
Status = Mapping[str, Any]
"""The service's answer to `status`, as plain values (`cluster/service/status.py`)."""


def run(args: argparse.Namespace) -> int:
    """Do the command `jobs`, `show`, `top`, `cancel` or `drain`, and print what it tells. Raises
    `ValueError` if the service does not answer, or knows no such job or node."""
    from rollpacker.cluster.commands.desk import open_desk
    from rollpacker.run.output import console

    desk = open_desk(args.cluster)

    def ask() -> Status:
        status: Status = desk.ask("status", {})
        return status

    match args.action:
        case "jobs":
            status = ask()
            _print(jobs_table(status), status["jobs"] if args.json else None)
        case "show":
            job = find_job(ask(), args.job)
            _print(job_lines(job), job if args.json else None)
        case "top" if args.json:
            _print([], ask())
        case "top":
            with contextlib.suppress(KeyboardInterrupt):
                show_top(ask, console())
        case "cancel":
            find_job(ask(), args.job)
            job = desk.ask("cancel", {"job": args.job, "now": args.now})
            print(told_cancelled(job, now=args.now))
        case "drain":
            check_node(ask(), args.node)
            facts = {"node": args.node, "restore": args.restore}
            jobs = desk.ask("drain", facts)["jobs"]
            if args.restore:
                print(f"{args.node} may have jobs again")
            else:
                moves = f", which move at their next commit: {', '.join(jobs)}" if jobs else ""
                print(f"{args.node} gets no more jobs; it has {len(jobs)}{moves}")
    return 0


def _print(lines: Sequence[str], plain: object | None) -> None:
    print("\n".join(lines) if plain is None else json.dumps(plain, indent=1))


def check_node(status: Status, name: str) -> None:
    """Raises `ValueError` if the cluster has no node of this name."""
    pool, _, number = name.rpartition("/")
    nodes = {one["name"]: one["nodes"] for one in status["pools"]}
    if pool not in nodes or not number.isdigit() or int(number) >= nodes[pool]:
        known = ", ".join(
            f"{one}/0" + (f" to {one}/{num - 1}" if num > 1 else "") for one, num in nodes.items()
        )
        raise ValueError(f"cluster {status['name']} has no node {name}. Its nodes are {known}")


# -- a job -------------------------------------------------------------------------


def find_job(status: Status, name: str) -> Mapping[str, Any]:
    """Return the job of this name from the status. Raises `ValueError` if there is none."""
    jobs = {job["job"]: job for job in status["jobs"]}
    if name not in jobs:
        raise ValueError(
            f"cluster {status['name']} has no job {name}.{did_you_mean(name, jobs)} "
            "rollpacker cluster jobs lists them"
        )
    found: Mapping[str, Any] = jobs[name]
    return found


def doing(job: Mapping[str, Any]) -> str:
    """Return in a few words what the job does now, such as the phase whose nodes it holds."""
    since = seconds(job["since_s"])
    if job["holds"]:
        return f"{job['holds']} for {since}"
    if job["state"] != "running":
        why = job["why"] if job["state"] == "done" else ""
        return f"waits {since} for {job['waits_for']}" if job["waits_for"] else why or "-"
    if job["waits_for"]:
        why = f": {job['why']}" if job["why"] else ""
        return f"waits {since} for {job['waits_for']}{why}"
    return job["why"] or "-"


def seconds(number: float) -> str:
    """Write seconds in a readable unit, such as 8 s, 3 min, 2.5 h."""
    if number < 100:
        return f"{number:.0f} s"
    return f"{number / 60:.0f} min" if number < 6000 else f"{number / 3600:.1f} h"


def _slowdown(job: Mapping[str, Any]) -> str:
    slowdown = job.get("slowdown")
    return f"{'-' if slowdown is None else f'{slowdown:.2f}'} of {job['slo']:g}"


def _row(job: Mapping[str, Any]) -> list[str]:
    nodes = " ".join([*job["rollout_nodes"], *job["train_nodes"]]) or "-"
    return [
        *(job["job"], job["owner"] or "-", job["state"], doing(job), nodes),
        *(f"{job['steps']:,}/{job['of_steps']:,}", _slowdown(job)),
    ]


HEAD = ("job", "owner", "state", "now", "nodes", "steps", "slowdown")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the rows as columns, and return one line for each row, whatever its cells contain."""
    from rollpacker.report.table import lines

    return lines(rows, numbers=False, rule=False, gap=2)


def jobs_table(status: Status) -> list[str]:
    """Return the lines of a table of all jobs, in the order in which they were submitted."""
    if not status["jobs"]:
        return [f"cluster {status['name']} has no jobs: rollpacker cluster submit RUN.yaml"]
    return columns([HEAD, *map(_row, status["jobs"])])


def job_lines(job: Mapping[str, Any]) -> list[str]:
    """Return the lines that `show` prints on one job: its state, its nodes and its last output."""
    from rollpacker.writing import printable

    shown = {
        "job": job["job"],
        "state": job["state"],
        "now": doing(job),
        "why": job["why"],
        "owner": job["owner"] or "-",
        "priority": str(job["priority"]),
        "steps": f"{job['steps']:,} of {job['of_steps']:,}",
        "slowdown": f"{_slowdown(job)} (SLO)",
        "group": "-" if job["group"] is None else str(job["group"]),
        "shares with": ", ".join(job["with"]) or "nobody",
        "rollout nodes": " ".join(job["rollout_nodes"]) or "-",
        "train nodes": " ".join(job["train_nodes"]) or "-",
        "starts": str(job["incarnation"]),
        "exit code": "" if job["exit_code"] is None else str(job["exit_code"]),
        "folder": job["folder"],
        "command": " ".join(job["command"]),
    }
    lines = columns([[f"{name}:", value] for name, value in shown.items() if value])
    return [*lines, *(f"  | {printable(line)}" for line in job["last_lines"])]


def told_cancelled(job: Mapping[str, Any], *, now: bool) -> str:
    if job["state"] in ENDED:
        return f"{job['job']} has ended: {job['state']}"
    if now:
        return f"{job['job']} is being ended; it can be resumed from its last checkpoint"
    return f"{job['job']} ends at its next commit; --now ends it at once"


# -- the whole ---------------------------------------------------------------------


def pools_line(status: Status) -> str:
    parts = [
        f"{pool['name']} {pool['used']} of {pool['nodes']} nodes"
        + (f", draining {' '.join(pool['drained'])}" if pool["drained"] else "")
        for pool in status["pools"]
    ]
    return f"{status['name']}: {'; '.join(parts)}; {status['price_per_h']:,.2f} per hour"


def _screen(status: Status, height: int) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from rollpacker.writing import printable

    jobs = sorted(status["jobs"], key=lambda job: (job["state"] in ENDED, job["group"] or 0))
    lines = columns([HEAD, *map(_row, jobs)]) if jobs else ["no jobs"]
    styles = ["bold", *(_COLOURS.get(job["state"], "") for job in jobs)]
    room = max(height - 4 - min(NUM_EVENTS, len(status["events"])), 3)
    shown: list[Text] = [Text(pools_line(status), style="bold"), Text()]
    shown += [
        Text(line, style=style, no_wrap=True, overflow="ellipsis")
        for line, style in zip(lines[:room], styles, strict=False)
    ]
    if len(lines) > room:
        shown.append(Text(f"and {len(lines) - room} more", style="dim"))
    shown.append(Text())
    for event in status["events"][-NUM_EVENTS:]:
        at = time.strftime("%H:%M:%S", time.localtime(event["at_s"]))
        line = f"{at}  {printable(event['text'])}"
        shown.append(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*shown)


def show_top(ask: Callable[[], Status], console: Console) -> None:
    """Show the jobs on a terminal until Ctrl-C; if the output is no terminal, print them once.
    `ask` gets the service's status; its `ValueError`s are shown, except at the first call."""
    from rich.live import Live
    from rich.text import Text

    from rollpacker.writing import printable

    status = ask()
    if not console.is_terminal or console.is_dumb_terminal:
        _print([pools_line(status), "", *jobs_table(status)], None)
        return
    with Live(
        _screen(status, console.height), console=console, screen=True, auto_refresh=False
    ) as live:
        while True:
            time.sleep(REFRESH_S)
            try:
                shown: RenderableType = _screen(ask(), console.height)
            except ValueError as error:  # it may be served again
                shown = Text(f"{printable(str(error))}. Still asking; Ctrl-C ends this")
            live.update(shown, refresh=True)
