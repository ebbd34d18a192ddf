"""`rollpacker cluster submit RUN.yaml ...`: everything about a job that can be found out before it
starts is checked first, and then one message asks the service for it."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import math
import secrets
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cluster.decide.job import ClusterJob
    from rollpacker.cluster.sim.spec import ClusterSpec
    from rollpacker.config.schema import RunConfig

REDONE_S = 1800.0
"""Seconds of work: if a crash of the job may cost more than these, `submit` prints a note."""


def run(args: argparse.Namespace) -> int:
    """Submit a job and print whether it runs or waits. Raises `ValueError` if it is refused."""
    from rollpacker.cluster.commands.desk import open_desk
    from rollpacker.cluster.decide.nodes import check_job
    from rollpacker.cluster.sim.spec import ClusterSpec
    from rollpacker.codec import to_plain
    from rollpacker.config.load import config_of

    check_slo(args.slo)
    is_program = args.config.endswith(SUFFIX)
    config = None if is_program else _checked(args)
    desk = open_desk(args.cluster)
    spec = config_of(dict(desk.facts.spec), (), ClusterSpec, where=str(desk.folder))
    if config is None:
        job, facts = job_of_program(args, _owner(args)), facts_of_program(args)
    else:
        path = new_file(config)
        job, facts = going_on(job_of(args, config, spec), config), facts_of(config, path)
    check_job(job, spec.core_pools())
    check_reachable(job)
    with contextlib.nullcontext() if config is None else kept(config, path):
        answer = desk.ask("submit", {"job": to_plain(job), **facts})
    if args.json:
        print(json.dumps({name: value for name, value in answer.items() if name != "about"}))
    else:
        print(told(answer, desk.folder))
        if config is not None and (advice := saves_seldom(config, job)):
            print(advice)
    return 0


def told(answer: Mapping[str, Any], folder: Path) -> str:
    """Return a sentence on where a job runs or what it waits for, from the service's `answer`."""
    job, see = answer["job"], f"rollpacker cluster show {answer['job']} --cluster {folder}"
    if answer["state"] == "waiting":
        return f"{job} waits: {answer['why']}. {see} says when it starts"
    if answer["state"] != "running":
        return f"{job} is {answer['state']}. {see} tells more"
    nodes = " and ".join(" ".join(answer[name]) for name in ("rollout_nodes", "train_nodes"))
    others = ", ".join(answer["with"])
    return f"{job} starts on {nodes}, {f'beside {others}' if others else 'alone'}. {see} tells more"


def saves_seldom(config: RunConfig, job: ClusterJob) -> str:
    """Return a note if the run saves its state so seldom that a crash of the job may cost more than
    `REDONE_S` seconds of work. Empty if it costs less."""
    steps = config.checkpoint.every_steps
    again_s = min(steps, job.steps) * math.fsum(job.mean)
    if again_s <= REDONE_S:
        return ""
    return (
        f"Note: {job.name} saves every {steps} steps (checkpoint.every_steps): if it is lost, up "
        f"to {again_s / 3600:.1f} hours are done again"
    )


def _checked(args: argparse.Namespace) -> RunConfig:
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.parts.seats import check_shares

    config = load_config(args.config, args.overrides, RunConfig)
    check_no_program(args)
    check_shares(config)
    check_devices(config)
    check_seconds(args, config)
    return config


def _owner(args: argparse.Namespace) -> str:
    """Return the job's owner: the value of --owner, or else the user of this process; empty if the
    user has no name. Raises `ValueError` if --owner is empty."""
    if args.owner is not None:
        if not args.owner.strip():
            raise ValueError("--owner is empty: give a name, or leave it out")
        return str(args.owner)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        return ""


def facts_of(config: RunConfig, path: Path) -> dict[str, Any]:
    """Return the command, the folder and the environment with which a run is started and resumed.
    The command uses the copy of the config at `path`: later edits of the user's file do nothing."""
    train = [sys.executable, "-m", "rollpacker.cli.main", "train", str(path)]
    return {
        "command": [*train, "--resume=auto"],
        "resume": [],  # the command does so by itself
        "environ": {},
        "folder": str(Path.cwd()),
        "run": str(_run_folder(config)),
    }


def _run_folder(config: RunConfig) -> Path:
    return (Path(config.runs_dir).expanduser() / config.name).resolve()


def new_file(config: RunConfig) -> Path:
    """Return a path for a copy of the submitted config, in the run's folder, which all hosts of the
    job see. No other submission has this path, so that a refused one can remove its copy safely."""
    return _run_folder(config) / f"submitted-{secrets.token_hex(4)}.yaml"


@contextlib.contextmanager
def kept(config: RunConfig, path: Path) -> Iterator[None]:
    """Save the config at `path`; the body of the `with` then submits the job. The file is removed
    only if the service refuses the job: one that did not answer may still start it. Raises
    `ValueError` if saving fails."""
    from rollpacker.cluster.commands.desk import Refused
    from rollpacker.config.load import save_config

    made = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_config(config, path, comment="As it was submitted to a cluster.")
    except OSError as error:
        raise ValueError(f"the config cannot be kept in the run's folder: {error}") from error
    try:
        yield
    except Refused:
        for one in made:
            with contextlib.suppress(OSError):
                one.unlink() if one == path else one.rmdir()
        raise


# -- what a job may not be ---------------------------------------------------------


def check_slo(slo: float) -> None:
    """Raises `ValueError` unless the SLO (highest slowdown promised) is finite and at least 1."""
    if not (math.isfinite(slo) and slo >= 1):
        raise ValueError(
            f"--slo {slo:g}: alone a job has a slowdown of 1, and sharing makes no job faster. "
            "Give 1 or more, such as 1.3"
        )


def check_seconds(args: argparse.Namespace, config: RunConfig) -> None:
    """Raises `ValueError` unless the times of phases come from one of --profile and --phases."""
    if (args.profile is None) == (args.phases is None):
        given = [one for one in args.overrides if not one.startswith(("name=", "train.steps="))]
        own = " ".join([*given, f"name={config.name}-alone", "train.steps=8"])
        again = f"rollpacker train {args.config} {own}"
        raise ValueError(
            "--profile and --phases exclude each other: leave one out"
            if args.profile
            else f"how long {config.name}'s phases take is not known, and placing it needs that. "
            f"Run it alone for a few steps ({again}) and give --profile {config.runs_dir}/"
            f"{config.name}-alone; or give mean seconds, --phases ROLLOUT,TRAIN"
        )


def check_reachable(job: ClusterJob) -> None:
    """Raises `ValueError` if moving the job off its devices and back in each iteration makes it
    slower than its SLO (highest slowdown promised), even with no other job on the nodes."""
    work_s = math.fsum(job.mean)
    switches_s = job.rollout_switch_s + job.train_switch_s
    least = 1 + switches_s / work_s
    if job.slo < least:
        least = math.ceil(least * 100) / 100
        raise ValueError(
            f"--slo {job.slo:g} cannot be kept: to park and to wake takes {switches_s:.2g} s of "
            f"each iteration of {work_s:.3g} s, even if {job.name} shares with nobody. Give "
            f"{least:g} or more"
        )


# -- what a job is -----------------------------------------------------------------


def job_of(args: argparse.Namespace, config: RunConfig, spec: ClusterSpec) -> ClusterJob:
    """Return the job of a run, with times of phases measured in another run (--profile) or given
    (--phases). Raises `ValueError` if the times or the numbers of devices are not possible."""
    from rollpacker.cluster.profile.job_profile import job_of_run

    own: dict[str, Any] = {
        "name": config.name,
        "slo": args.slo,
        "priority": args.priority,
        "owner": _owner(args),
    }
    if args.phases is not None:
        return _of_phases(args.phases, config, spec, own)
    return job_of_run(
        args.profile,
        config=config,
        on_gpus=any(pool.gpu is not None for pool in spec.pools),
        pools=spec.core_pools(),
        **own,
    )


def going_on(job: ClusterJob, config: RunConfig) -> ClusterJob:
    """Return the job with only the steps that remain after the run's newest checkpoint."""
    from msgspec.structs import replace

    from rollpacker.cluster.profile.job_profile import saved_step

    done = min(saved_step(_run_folder(config)), job.steps - 1)
    return replace(job, steps=job.steps - done, steps_before=done)


def check_devices(config: RunConfig) -> None:
    """Raises `ValueError` for `devices: all` in the run's placement: a cluster needs numbers."""
    from rollpacker.config.placement import num_devices

    lines = config.placement
    if lines is not None and None in (
        num_devices(lines.rollout.devices),
        num_devices(lines.train.devices),
    ):
        raise ValueError(
            f"placement of {config.name} has devices: all, and a cluster's are not all its own. "
            "Give numbers"
        )


def _of_phases(
    text: str, config: RunConfig, spec: ClusterSpec, own: Mapping[str, Any]
) -> ClusterJob:
    """Return the job of a run whose --phases give the seconds. Its memory, which a profile would
    have measured, is estimated: 12 bytes per parameter in the trainer, and 2 or 4 in an engine."""
    from rollpacker.cluster.decide.job import ClusterJob, RoundTimes
    from rollpacker.cluster.profile.job_profile import devices_of, needs_of, steps_of
    from rollpacker.trainer.estimate import estimate

    rollout_s, train_s = seconds_of(text)
    known = estimate(config)
    count = known.num_parameters or 0
    needs = needs_of(
        model_bytes=count * (4 if known.dtype == "float32" else 2),
        trainer_bytes=count * 12,
        devices=devices_of(config),
        num_copies=config.rollout.engines,
        pools=spec.core_pools(),
    )
    rounds = (RoundTimes(rollout_s=(rollout_s,), train_s=(train_s,)),)
    return ClusterJob(**needs, **own, rounds=rounds, steps=steps_of(config, None, config.name))


SUFFIX = ".py"


def job_of_program(args: argparse.Namespace, owner: str) -> ClusterJob:
    """Return the job of a user's own program. Raises `ValueError` for wrong or missing options."""
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
    """Raises `ValueError` if an option is given that is for programs only, not for runs."""
    for name in ("arguments", "name", "steps", "devices", "memory_gib"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option} is for a program: {args.config} says it itself. Leave it out"
            )


def facts_of_program(args: argparse.Namespace) -> dict[str, Any]:
    """Return command and folder of a user's program; the same command resumes it."""
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
    """Parse the value of `--phases`: return the mean seconds of a rollout and of a training. Raises
    `ValueError` unless these are two numbers above 0."""
    try:
        rollout_s, train_s = map(float, text.split(","))
        if not all(math.isfinite(one) and one > 0 for one in (rollout_s, train_s)):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--phases {text}: give mean seconds of a rollout and of a training, such as 12.5,8"
        ) from None
    return rollout_s, train_s
