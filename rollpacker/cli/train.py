"""`rollpacker train CONFIG [key=value ...]`: the main job, and `rollpacker.train(...)`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rollpacker.cli.errors import naming

if TYPE_CHECKING:
    from rollpacker.cli.parts import Policy
    from rollpacker.config.schema import RunConfig
    from rollpacker.controller.checkpoint import Checkpoint
    from rollpacker.controller.driver import Controller
    from rollpacker.controller.run_folder import RunFolder
    from rollpacker.core.records import Observer
    from rollpacker.trainer.trainer import Trainer

T = TypeVar("T")
logger = logging.getLogger(__name__)


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "train",
        help="train a model by reinforcement learning",
        description="Train a model by reinforcement learning, as a config file says.",
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="replace single settings"
    )
    parser.add_argument("--resume", action="store_true", help="go on exactly where the run stopped")
    parser.add_argument("--overwrite", action="store_true", help="replace a run of the same name")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the batch arithmetic and a memory estimate; nothing is loaded",
    )


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code. Raises what `train` raises."""
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.trainer.launch import Torchrun

    torchrun = Torchrun.from_environment()
    if torchrun is not None and torchrun.rank > 0:
        if not args.dry_run:
            from rollpacker.trainer import worker

            worker.main()  # reads no config: what is wrong with that, the first process says
        return 0
    if args.dry_run:
        _print_dry_run(load_config(args.config, args.overrides, RunConfig))
        return 0
    if args.resume and args.overwrite:
        raise ValueError(
            "--resume and --overwrite exclude each other: one goes on, one begins anew"
        )
    config = load_config(args.config, args.overrides, RunConfig)
    if torchrun is not None:
        config = _with_processes(config, torchrun.world_size)
    result = train(config, resume=args.resume, overwrite=args.overwrite, display=True)
    if result.reason != INTERRUPTED:
        return 0
    print("Interrupted. The same command with --resume goes on from here.", file=sys.stderr)
    return 130


def _print_dry_run(config: RunConfig) -> None:
    """Batch arithmetic and memory of one step, before anything is loaded."""
    from rollpacker.cli.parts import check_algorithm
    from rollpacker.trainer.estimate import estimate

    check_algorithm(config)
    print(f"{config.name}: {config.model.path}")
    for line in estimate(config).lines():
        print(f"  {line}")
    if config.without_effect is not None:
        print(f"  {config.without_effect}")


def _with_processes(config: RunConfig, num_processes: int) -> RunConfig:
    """The trainer's processes are torchrun's. Raises `ValueError` if the config says otherwise."""
    wanted = config.train.processes
    if wanted not in (None, num_processes):
        raise ValueError(
            f"train.processes={wanted}, but torchrun started {num_processes} processes: leave "
            "train.processes out, or start as many"
        )
    return replace(config, train=replace(config.train, processes=num_processes))


INTERRUPTED = "interrupted"

SWITCH_INTERVAL_S = 0.0005
"""How long a thread of this process keeps Python's lock while another wants it. The engine's thread
takes it many times per decode step, and would wait Python's 5 ms each time that verdicts or samples
are being worked on. `benchmarks/streaming.py` runs with it: there the engine decodes while verdicts
come in and gradients are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What `train` returns."""

    folder: Path
    reason: str
    """Why it ended: "every step is done", "the data ended" or "interrupted"."""
    summary: dict[str, Any]
    """What `summary.json` holds; see docs/metrics.md."""

    @property
    def model(self) -> Path:
        """The trained model, a Hugging Face folder."""
        from rollpacker.controller.checkpoint import newest_checkpoint

        return newest_checkpoint(self.folder / "checkpoints").folder / "model"


def train(
    config: str | Path | RunConfig,
    overrides: Sequence[str] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    display: bool = False,
    observers: Sequence[Observer] = (),
) -> FinishedRun:
    """Run a config to its end.

    `observers` are fed every entry of the event log; `display` shows progress on the terminal.
    Raises `ValueError` (one message, for the user) for what is wrong with config, data, model or
    run folder, `NonFiniteError`, `DeadlineExceeded`, `OSError`; the run can then be resumed.
    """
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.controller.run_folder import RunFolder

    watch = time.perf_counter()
    if not isinstance(config, RunConfig):
        config = load_config(config, overrides, RunConfig)
    elif overrides:
        raise ValueError("overrides go with a config file, not with a RunConfig")
    if config.without_effect is not None:
        logger.warning("%s", config.without_effect)
    path = Path(config.runs_dir).expanduser() / config.name
    with naming(path), ExitStack() as stack:
        folder = RunFolder(path, resume=resume, overwrite=overwrite)
        stack.callback(folder.close)
        session = _Session(config, folder, stack, resume=resume, overwrite=overwrite)
        session.prepare(watch, display=display, observers=observers)
        reason = session.drive()
        stack.pop_all().close()
    return FinishedRun(
        folder=folder.path, reason=reason, summary=_finish(folder.path, display=display)
    )


@dataclass(eq=False, slots=True)
class _Session:
    """One process's share of a run."""

    config: RunConfig
    folder: RunFolder
    stack: ExitStack
    _: KW_ONLY
    resume: bool
    overwrite: bool
    _controller: Controller | None = field(default=None, init=False)

    def prepare(self, watch: float, *, display: bool, observers: Sequence[Observer]) -> None:
        """Load everything and put it together. `watch` is when the process began to work."""
        from rollpacker.cli import parts as build
        from rollpacker.controller.driver import Controller, Parts
        from rollpacker.controller.event_log import LogWriter
        from rollpacker.controller.hand_over import hand_over_weights
        from rollpacker.controller.samples import SampleWriter

        config, folder = self.config, self.folder
        build.check_algorithm(config)
        checkpoint = self._find_checkpoint()
        if self.resume and checkpoint is None:
            logger.warning("the run ended before its first checkpoint; it begins anew")
        before = folder.read_identity() if checkpoint else {}
        ranks = build.start_trainer_processes(config)
        if ranks is not None:
            self.stack.callback(ranks.close)
        policy = build.load_policy(config, threads=before.get("threads"))
        identity = build.identity(config, policy)
        if checkpoint is not None:
            self._check_identity(before, identity)
        cursor = build.build_cursor(config, policy, checkpoint)
        job = self._job(checkpoint, cursor, policy)
        tokenizer = build.tokenizer_fingerprint(policy)
        carried = build.build_carried(config, checkpoint, job, tokenizer)
        self._take_folder(checkpoint, identity)
        trainer = build.build_trainer(config, policy, ranks)
        self.stack.callback(trainer.close)
        if checkpoint is not None:
            _load(trainer, checkpoint.folder)
        _run(hand_over_weights(trainer, policy.engine, trainer.version))
        time_s = checkpoint.state["time_s"] if checkpoint else 0.0
        watching = self._observers(checkpoint, policy, display=display) + list(observers)
        log = LogWriter(folder.events)
        self.stack.callback(log.close)
        for observer in watching:
            self.stack.callback(observer.close)
        parts = Parts(
            job=job,
            engine=policy.engine,
            trainer=trainer,
            reward=policy.reward,
            prompts=policy.train_prompts,
            eval_prompts=policy.eval_prompts,
            cursor=cursor,
            build_samples=build.build_samples_function(config),
            decode=policy.decode,
            log=log,
            samples=SampleWriter(folder.samples) if config.save_samples else None,
            carried=carried,
            tokenizer=tokenizer,
            observers=watching,
        )
        seconds = time.perf_counter() - watch
        self._controller = Controller(
            config, parts, checkpoints=folder.checkpoints, time_s=time_s + seconds
        )
        marks = build.marks(config, policy)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._controller.open(started_at=now, began_s=time_s, marks=marks)

    def _find_checkpoint(self) -> Checkpoint | None:
        if not self.resume:
            return None
        return self.folder.find_checkpoint(carries=self.config.tail_batching.carries)

    def drive(self) -> str:
        """Run to the end, or to the first Ctrl-C or SIGTERM. Returns the reason."""
        assert self._controller is not None
        first = self._controller.parts.job.step
        reason = _run(_drive(self._controller))
        if self.resume and self._controller.parts.job.step == first and reason != INTERRUPTED:
            logger.warning("nothing was left to do: %s", reason)
        return reason

    def _check_identity(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        """A resume must find what the run began with."""
        from rollpacker.config.document import ConfigError, parse_document, read_text
        from rollpacker.config.load import differences, to_plain
        from rollpacker.controller.errors import RunError
        from rollpacker.controller.run_folder import check_resume

        try:
            old, _ = parse_document(read_text(self.folder.config), str(self.folder.config))
        except ConfigError as error:
            raise RunError(
                f"{error} This is what the run was started with, so it cannot be told whether "
                "it is the same run. Restore the file, or begin anew with --overwrite"
            ) from error
        for change in check_resume(differences(old, to_plain(self.config)), before, now):
            logger.warning("resuming with a change: %s", change)

    def _take_folder(self, checkpoint: Checkpoint | None, identity: dict[str, Any]) -> None:
        """Cut it back to the checkpoint, or empty it, and write down what the run depends on."""
        from rollpacker.config.load import save_config
        from rollpacker.controller.event_log import cut_back
        from rollpacker.controller.samples import cut_back as cut_back_samples

        folder = self.folder
        if checkpoint is not None:
            state = checkpoint.state
            cut_back(folder.events, state["log_bytes"], state["log_sha256"])
            if folder.samples.is_dir():
                cut_back_samples(folder.samples, checkpoint.step)
        elif self.overwrite or self.resume:
            folder.clear()
        save_config(self.config, folder.config)
        folder.write_identity(identity)

    def _job(self, checkpoint: Checkpoint | None, cursor: Any, policy: Policy) -> Any:
        from rollpacker.cli.parts import reward_kinds
        from rollpacker.core.job import Job

        config = self.config.job(
            prompt_tokens=policy.mean_prompt_tokens, reward_kinds=reward_kinds(self.config, policy)
        )
        if checkpoint is None:
            return Job(config)
        return Job.restore(config, checkpoint.state["job"], data_ended=cursor.ended)

    def _observers(
        self, checkpoint: Checkpoint | None, policy: Policy, *, display: bool
    ) -> list[Observer]:
        from rollpacker.cli.output import console
        from rollpacker.report.live import LiveReport

        rollout, train = self.config.rollout, self.config.train
        steps = train.steps
        if steps is None:
            assert train.epochs is not None
            rows = len(policy.train_prompts.rows) * train.epochs
            steps = math.ceil(rows / rollout.prompts_per_step)
        return [
            LiveReport(
                self.folder.path,
                total_steps=steps,
                resume=checkpoint is not None,
                slots=rollout.engine.max_slots,
                max_response_tokens=rollout.max_response_tokens,
                console=console() if display else None,
                show=display,
            )
        ]


def _load(trainer: Trainer, checkpoint: Path) -> None:
    from rollpacker.controller.errors import RunError
    from rollpacker.trainer.trainer import TrainerStateError

    try:
        trainer.load(checkpoint)
    except TrainerStateError as error:
        raise RunError(
            f"{error}. The run cannot go on from there (`--overwrite` begins anew)"
        ) from error


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a thread of its own where a loop runs already (a notebook)."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        in_loop = False
    else:
        in_loop = True
    if not in_loop:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def _drive(controller: Controller) -> str:
    import asyncio

    loop = asyncio.get_running_loop()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    asked = False

    def interrupt() -> None:
        nonlocal asked
        if asked:
            _exit_at_once()
        asked = True
        print("Finishing this step, then saving. Ctrl-C again ends at once.", file=sys.stderr)
        controller.request_stop(INTERRUPTED)

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, interrupt)
        except (ValueError, RuntimeError, NotImplementedError):  # not the main thread
            break
    try:
        return await controller.run()
    finally:
        await controller.close()


def _exit_at_once() -> NoReturn:
    """End the process now. What it says goes past the display's buffers, which stay as they are."""
    if os.isatty(1):
        os.write(1, b"\x1b[?25h\r\n")  # the live display hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, b"Ended at once; --resume goes on from the last checkpoint.\n")
    os._exit(130)


def _finish(folder: Path, *, display: bool) -> dict[str, Any]:
    """Write what is made from the whole log, and print the table."""
    from rollpacker.report.files import write_reports

    with naming(folder):
        summary = write_reports(folder)
    if display:
        from rollpacker.cli.output import console
        from rollpacker.report.summary import render

        console().print(render(summary))
    return summary
