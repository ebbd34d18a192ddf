"""The service's answer to a command that asks for the state of the cluster, as JSON values."""

from __future__ import annotations

from typing import Any

from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.nodes import Node, Pool
from rollpacker.cluster.seats.seat import START
from rollpacker.cluster.service.book import Book, JobRecord, node_name
from rollpacker.cluster.service.starts_alive import Alive

NUM_NOTES = 50
LONG_HELD = 10.0
"""Factor: if a job holds a pool for this many times its longest phase, the status says so."""
NO_COMMIT = "no commit was said: a program calls rollpacker.cluster.committed(step) after each"


class Status:
    """The state of a cluster for people. Durations end at `now_s` on the cluster's clock."""

    def __init__(self, cluster: Cluster, book: Book, alive: Alive, now_s: float) -> None:
        self._cluster = cluster
        self._book = book
        self._alive = alive
        self._now_s = now_s

    def whole(self, name: str, began_s: float) -> dict[str, Any]:
        """Return the status of the whole cluster as values by name. `name`: the cluster's.
        `began_s`: Unix time at which the cluster's clock was 0."""
        cluster, book = self._cluster, self._book
        used = {node for record in book.placed() for node in record.nodes(record.incarnation)}
        return {
            "name": name,
            "jobs": [self.of_job(record) for record in book.records.values()],
            "pools": [_pool(pool, used, book.drained) for pool in cluster.pools],
            "price_per_h": sum(cluster.state.nodes.pools[n.pool].node_price_per_h for n in used),
            "events": [
                {"at_s": began_s + note.at_s, "text": note.text}
                for note in list(book.notes)[-NUM_NOTES:]
            ],
        }

    def of_job(self, record: JobRecord) -> dict[str, Any]:
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
            "since_s": self._now_s - (turn.since_s if turn.phase else record.waits_since_s),
            "why": self._why(record),
            "rollout_nodes": [] if start is None else list(map(node_name, start.rollout_nodes)),
            "train_nodes": [] if start is None else list(map(node_name, start.train_nodes)),
            "group": None if start is None else start.group,
            "with": [
                other.job.name
                for other in self._book.placed()
                if start is not None
                and other is not record
                and other.starts[-1].group == start.group
            ],
            "steps": record.steps,
            "of_steps": max(job.steps_before + job.steps, record.steps),
            "slowdown": _slowdown(record, self._now_s),
            "slo": job.slo,
            "incarnation": record.incarnation,
            "folder": record.facts["folder"],
            "command": record.facts["command"],
            "exit_code": record.told.get("exit_code"),
            "last_lines": str(record.told.get("last_lines", "")).splitlines(),
        }

    def _why(self, record: JobRecord) -> str:
        """Return in words why a job is in its state. Empty if that needs no explanation."""
        turn, name = record.turn, record.job.name
        if record.outcome == "done" and record.steps == record.job.steps_before:
            return NO_COMMIT
        if record.outcome:
            return str(record.told.get("why", ""))
        if not record.is_placed:
            return _what_is_missing(record, self._cluster, self._book, self._now_s)
        if turn.purpose == START and turn.token:  # no phase of its profile
            return "starts"
        if turn.token:
            return self._held_for_long(record)
        if turn.phase is not None:
            other = self._cluster.kept_for(name)
            starts = "starts" if turn.purpose == START else ""
            return f"it is {other}'s turn" if other else starts
        is_started = self._alive.is_started(record)
        if is_started and name in self._alive.ever_heard:
            return ""
        pause_s = record.starts_from_s - self._now_s
        if pause_s > 0 and not is_started:
            return f"starts again in {pause_s:,.0f} s: {record.told['why']}"
        awaited = self._alive.in_the_way(record)
        return f"starts once {awaited}" if awaited else "starts"

    def _held_for_long(self, record: JobRecord) -> str:
        held_s = self._now_s - record.turn.since_s
        worst = record.job.worst
        longest_s = worst.rollout_s if record.turn.phase == "rollout" else worst.train_s
        if held_s <= LONG_HELD * longest_s:
            return ""
        return (
            f"has held {record.turn.phase} for {held_s:,.1f} s, and its profile says "
            f"{longest_s:,.1f}: rollpacker cluster cancel {record.job.name} --now ends it"
        )


def _state(record: JobRecord) -> str:
    if record.outcome:
        return record.outcome
    if record.is_cancelled:
        return "stopping"
    return "running" if record.is_placed else "waiting"


def _slowdown(record: JobRecord, now_s: float) -> float | None:
    """Return a job's elapsed seconds over those without waits. None if it did nothing but wait."""
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


def _what_is_missing(record: JobRecord, cluster: Cluster, book: Book, now_s: float) -> str:
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
    return cluster.awaits(record.job.name, now_s) or (
        "on no nodes would every SLO, quota, max_group and host memory be kept now"
    )


def _pool(pool: Pool, used: set[Node], drained: set[Node]) -> dict[str, Any]:
    return {
        "name": pool.name,
        "phase": pool.phase,
        "nodes": pool.nodes,
        "used": sum(node.pool == pool.name for node in used),
        "drained": sorted(node_name(node) for node in drained if node.pool == pool.name),
    }
