"""What the benchmarks of rewards share: the small code run, its log, and the workers behind it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import ROOT

import rollpacker

CONFIG = ROOT / "configs" / "code-tiny.yaml"
WARMUP = ROOT / "configs" / "code-tiny-warmup.yaml"
DEMONSTRATIONS = ROOT / "runs" / "code-tasks" / "one-liners" / "demonstrations.jsonl"
QUICK_START = ("rewards.0.arguments={reference_column: null}", "eval.max_prompts=1")
"""The rows' own solutions are not tried first; that is not what is measured."""


def prepare() -> None:
    """Tasks and the warmed-up model, unless they are there."""
    if not (ROOT / "runs" / "code-tiny-warmup" / "config.json").exists():
        raise SystemExit(
            "the small model is missing: python examples/code/make_tasks.py &&"
            " rollpacker warmup configs/code-tiny-warmup.yaml"
        )


def train(name: str, overrides: Sequence[str], folder: Path) -> Path:
    """A run of the small code config; its event log."""
    run = rollpacker.train(
        CONFIG,
        [*QUICK_START, f"name={name}", f"runs_dir={folder}", *overrides],
        overwrite=True,
    )
    return run.folder / "events.jsonl"


def entries(log: Path) -> Iterator[dict[str, Any]]:
    """The log's lines as plain JSON, nothing of rollpacker in between."""
    for line in log.read_text("utf-8").splitlines():
        yield json.loads(line)


def step_ends(log: Path) -> list[float]:
    """When each step was committed, on the run's clock."""
    return [entry["t"] for entry in entries(log) if entry.get("event") == "Committed"]


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str
    command: str


def descendants() -> list[Process]:
    """Every living process below this one."""
    found: dict[int, Process] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            )
        except OSError:
            continue
        pid = int(folder.name)
        found[pid] = Process(pid, int(after_name[1]), after_name[0], command)
    below, grown = {os.getpid()}, True
    while grown:
        more = {p.pid for p in found.values() if p.parent in below} - below
        below |= more
        grown = bool(more)
    return [found[pid] for pid in sorted(below - {os.getpid()}) if pid in found]


def sandbox_workers() -> list[Process]:
    """The interpreters that programs are forked from, one per worker: children of bubblewrap's own
    process 1. What they fork has their command line, and is no worker."""
    found = descendants()
    inside = [p for p in found if "rollpacker.sandbox.zygote" in p.command]
    shells = {p.pid for p in inside if "--unshare-all" in p.command}
    zygotes = [p for p in inside if p.parent in shells and p.pid not in shells]
    return [p for p in zygotes if p.state not in "ZX"]


class Warnings(logging.Handler):
    """A log handler that keeps each line with its time."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.created, record.getMessage()))
