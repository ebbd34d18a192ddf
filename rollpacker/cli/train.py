"""`rollpacker train CONFIG [key=value ...]`: trains a model, the main command."""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollpacker.cli.arguments import add_overrides
from rollpacker.run.driving import INTERRUPTED, ending_as_interrupt, not_begun
from rollpacker.run.output import print_line

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig
    from rollpacker.data.dataset import DatasetConfig

DRY_RUN_INTERRUPTED = "interrupted; nothing was written"
MAX_COUNTED_BYTES = 64 << 20
"""Maximum size in bytes of a data file whose rows are counted for the first line that a run prints.
To count those of such a file takes a tenth of a second."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a model by reinforcement learning",
        description="Train a model by reinforcement learning, as a config file says.",
    )
    parser.add_argument("config", help="YAML file")
    add_overrides(parser)
    parser.add_argument("--resume", action="store_true", help="go on exactly where the run stopped")
    parser.add_argument(
        "--resume=auto",
        action="store_true",
        dest="resume_auto",
        help="the same if there is a run to go on with, else begin: for jobs that are restarted",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch arithmetic, a memory estimate and the first prompt, and try your own "
        "functions; no model is loaded",
    )


def run(args: argparse.Namespace) -> int:
    """Train a model, and return the exit code. Raises what `train` raises."""
    told = (DRY_RUN_INTERRUPTED,) if args.dry_run else ()
    with not_begun(*told), ending_as_interrupt():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.run.train import run_to_end
    from rollpacker.trainer.launch import Torchrun

    torchrun = Torchrun.from_environment()
    if torchrun is not None and torchrun.rank > 0:
        if not args.dry_run:
            from rollpacker.trainer import worker

            worker.main()  # reads no config: what is wrong with that, the first process says
        return 0
    if args.dry_run:
        from rollpacker.cli.dry_run import print_dry_run

        config = load_config(args.config, args.overrides, RunConfig)
        print_dry_run(config, num_rows=_num_rows(config.data.train))
        return 0
    resume: bool | Literal["auto"] = "auto" if args.resume_auto else args.resume
    if resume and args.overwrite:
        raise ValueError(
            "--resume and --overwrite exclude each other: one goes on, one begins anew"
        )
    config = load_config(args.config, args.overrides, RunConfig)
    if torchrun is not None:
        config = _with_processes(config, torchrun.world_size)
    print_line(_first_line(config))
    result = run_to_end(
        config, resume=resume, overwrite=args.overwrite, display=True, is_command=True
    )
    if result.reason != INTERRUPTED:
        return 0
    again = "The same command" if resume == "auto" else "The same command with --resume"
    with contextlib.suppress(OSError):  # the terminal is gone (SIGHUP)
        print(f"Interrupted. {again} goes on from here.", file=sys.stderr)
    return 130


def _first_line(config: RunConfig) -> str:
    """A line on the run that begins (model, data, rewards, folder), before anything is loaded."""
    data = config.data.train
    source = data.path or data.kind
    num_rows = _num_rows(data)
    rows = "rows" if num_rows is None else f"{num_rows:,} rows"
    rewards = ", ".join(str(reward.function) for reward in config.rewards)
    line = (
        f"{config.name}: {config.model.path}, {rows} of {source}, rewards {rewards}, "
        f"into {config.runs_dir}/{config.name}"
    )
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


def _num_rows(data: DatasetConfig) -> int | None:
    """Number of rows of a data set. None if counting them would take long or cannot be done. In a
    JSONL file lines that are not empty count; a Parquet file records its number."""
    if data.kind == "reasoning_gym":
        return data.size
    if data.path is None or data.kind not in ("jsonl", "parquet"):
        return None
    try:
        file = Path(data.path).expanduser()
        if not file.is_file():
            return None
        if data.kind == "parquet":
            from pyarrow import parquet

            num_rows: int = parquet.read_metadata(file).num_rows
        elif file.stat().st_size <= MAX_COUNTED_BYTES:
            with file.open("rb") as lines:
                num_rows = sum(bool(line.strip()) for line in lines)
        else:
            return None
    except (OSError, ValueError):  # pyarrow's errors are of these
        return None
    return num_rows if data.size is None else min(num_rows, data.size)


def _with_processes(config: RunConfig, num_processes: int) -> RunConfig:
    """Returns the config with the number of trainer processes that torchrun started. Raises
    `ValueError` if the config asks for another number."""
    wanted = config.train.processes
    if wanted not in (None, num_processes):
        raise ValueError(
            f"train.processes={wanted}, but torchrun started {num_processes} processes: leave "
            "train.processes out, or start as many"
        )
    return replace(config, train=replace(config.train, processes=num_processes))
