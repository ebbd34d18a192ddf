"""What the service answers to who looks at the cluster, as JSON has it."""

from __future__ import annotations

from typing import Any

from rollpacker.cluster.book import Book, Record, node_name
from rollpacker.cluster.seat import START
from rollpacker.core.cluster import Cluster
from rollpacker.core.coexecution.nodes import Node, Pool

NUM_NOTES = 50
LONG_HELD = 10.0
"""A pool that is held so many times the longest phase of the job's profile is worth a word."""


def status(
    name: str, cluster: Cluster, book: Book, asked: set[str], *, now_s: float, began_s: float
) -> dict[str, Any]:
    """`asked`: jobs that have been heard. Times of notes are seconds since 1970, all others
    seconds until now."""
    used = {node for record in book.placed() for node in record.nodes(record.incarnation)}
    return {
        "name": name,
        "jobs": [
            job_status(record, cluster, book, record.job.name in asked, now_s)
            for record in book.records.values()
        ],
        "pools": [_pool(pool, used, book.drained) for pool in cluster.pools],
        "price_per_h": sum(cluster.state.nodes.pools[n.pool].node_price_per_h for n in used),
        "events": [
            {"at_s": began_s + note.at_s, "text": note.text}
            for note in list(book.notes)[-NUM_NOTES:]
        ],
    }


def job_status(
    record: Record, cluster: Cluster, book: Book, is_heard: bool, now_s: float
) -> dict[str, Any]:
    job, turn = record.job, record.turn
    start = record.starts[-1] if record.is_placed else None
    holds = turn.phase if turn.token else None
    waits_for = turn.phase if not turn.token else None
    return {
        "job": job.name,
        "owner": getattr(job, "owner", ""),
        "priority": job.priority,
        "state": _state(record),
        "holds": holds,
        "waits_for": waits_for if waits_for or record.is_placed or record.outcome else "nodes",
        "since_s": now_s - (turn.since_s if turn.phase else record.waits_since_s),
        "why": _why(record, cluster, book, is_heard, now_s),
        "rollout_nodes": [] if start is None else list(map(node_name, start.rollout_nodes)),
        "train_nodes": [] if start is None else list(map(node_name, start.train_nodes)),
        "group": None if start is None else start.group,
        "with": [
            other.job.name
            for other in book.placed()
            if start is not None and other is not record and other.starts[-1].group == start.group
        ],
        "steps": record.steps,
        "of_steps": max(job.steps_before + job.steps, record.steps),
        "slowdown": _slowdown(record, now_s),
        "slo": job.slo,
        "incarnation": record.incarnation,
        "folder": record.facts["folder"],
        "command": record.facts["command"],
        "exit_code": record.told.get("exit_code"),
        "last_lines": str(record.told.get("last_lines", "")).splitlines(),
    }


def _state(record: Record) -> str:
    if record.outcome:
        return record.outcome
    if record.is_cancelled:
        return "stopping"
    return "running" if record.is_placed else "waiting"


def _slowdown(record: Record, now_s: float) -> float | None:
    """Elapsed over elapsed without waits."""
    now_s = record.ended_s or now_s
    waited_s = record.waited_s
    turn = record.turn
    if not record.outcome:
        if turn.phase and not turn.token:
            waited_s += now_s - turn.since_s
        elif not record.is_placed:
            waited_s += now_s - record.waits_since_s
    elapsed_s = now_s - record.submitted_s
    return elapsed_s / (elapsed_s - waited_s) if elapsed_s - waited_s > 1e-9 else None


def _why(record: Record, cluster: Cluster, book: Book, is_heard: bool, now_s: float) -> str:
    """What there is to say of its state."""
    if record.outcome:
        return str(record.told.get("why", ""))
    if not record.is_placed:
        return _what_is_missing(cluster, book)
    if record.turn.purpose == START:  # no phase of its profile
        return "starts"
    if record.turn.token:
        held_s = now_s - record.turn.since_s
        worst = record.job.worst
        longest_s = worst.rollout_s if record.turn.phase == "rollout" else worst.train_s
        if held_s > LONG_HELD * longest_s:
            return (
                f"has held {record.turn.phase} for {held_s:,.1f} s, and its profile says "
                f"{longest_s:,.1f}: rollpacker cluster cancel {record.job.name} --now ends it"
            )
        return ""
    if record.turn.phase is None and not is_heard:
        return "starts"
    return ""


def _what_is_missing(cluster: Cluster, book: Book) -> str:
    for pool in cluster.pools:
        hostless = sorted(node_name(node) for node in book.hostless if node.pool == pool.name)
        if hostless:
            return f"{', '.join(hostless)} of pool {pool.name} may have jobs once there is a host"
        num_drained = sum(node.pool == pool.name for node in book.drained)
        if num_drained == pool.nodes:
            return (
                f"every node of pool {pool.name} is drained: rollpacker cluster drain "
                f"{pool.name}/0 --restore gives one back"
            )
    return "on no nodes would every SLO, quota, max_group and host memory be kept now"


def _pool(pool: Pool, used: set[Node], drained: set[Node]) -> dict[str, Any]:
    return {
        "name": pool.name,
        "phase": pool.phase,
        "nodes": pool.nodes,
        "used": sum(node.pool == pool.name for node in used),
        "drained": sorted(node_name(node) for node in drained if node.pool == pool.name),
    }
