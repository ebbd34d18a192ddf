"""`rollpacker cluster submit PROGRAM.py ...`: a program of another framework, which takes its turns
by `rollpacker.cluster.phase`."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cluster.decide.job import ClusterJob

SUFFIX = ".py"


def job_of_program(args: argparse.Namespace, owner: str) -> ClusterJob:
    """Return the job that the options describe. Raises `ValueError`."""
    from rollpacker.cluster.decide.job import ClusterJob, RoundTimes

    path = Path(args.config)
    if not path.is_file():
        raise ValueError(f"there is no program {path}")
    if args.overrides:
        raise ValueError(
            f"{' '.join(args.overrides)}: settings are those of a run. A program's arguments are "
            "given as --arguments='...'"
        )
    if args.profile is not None:
        raise ValueError("--profile is a run's of rollpacker train: give a program --phases")
    for name, value in (("--phases ROLLOUT,TRAIN", args.phases), ("--steps", args.steps)):
        if value is None:
            raise ValueError(
                f"{path} is a program of its own, of which nothing is known: add {name}"
            )
    rollout_s, train_s = seconds_of(args.phases)
    rollout_devices, train_devices = _devices(args.devices)
    return ClusterJob(
        name=path.stem if args.name is None else args.name,
        rounds=(RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),),
        steps=args.steps,
        slo=args.slo,
        priority=args.priority,
        owner=owner,
        rollout_devices=rollout_devices,
        train_devices=train_devices,
        rollout_memory_gib=args.memory_gib,
        train_memory_gib=args.memory_gib,
    )


def check_no_program(args: argparse.Namespace) -> None:
    """A run's config says by itself what only a program has to be told. Raises `ValueError`."""
    for name in ("arguments", "name", "steps", "devices", "memory_gib"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} is for a program: {args.config} says it itself. Leave it out"
            )


def facts_of_program(args: argparse.Namespace) -> dict[str, Any]:
    """How it is started, and started again: it goes on from its own checkpoint."""
    path = Path(args.config).resolve()
    return {
        "command": [sys.executable, str(path), *_arguments(args.arguments)],
        "resume": [],
        "environ": {},
        "folder": str(Path.cwd()),
        "run": f"{path} {args.arguments}",
    }


def _arguments(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"--arguments={text}: a shell could not read this ({error}). Close each quote, and "
            "write \\ before one that is meant as such"
        ) from None


def _devices(text: str | None) -> tuple[int, int]:
    try:
        rollout, train = (1, 1) if text is None else map(int, text.split(","))
    except ValueError:
        raise ValueError(
            f"--devices {text}: give how many it generates on and how many it trains on, such as "
            "8,8"
        ) from None
    return rollout, train


def seconds_of(text: str) -> tuple[float, float]:
    """Return the seconds of a rollout and of a training that `--phases` gives. Raises
    `ValueError`."""
    try:
        rollout_s, train_s = map(float, text.split(","))
        if not all(math.isfinite(one) and one > 0 for one in (rollout_s, train_s)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--phases {text}: give mean seconds of a rollout and of a training, such as 12.5,8"
        ) from None
    return rollout_s, train_s
