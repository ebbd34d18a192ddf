"""A run in this process: has its parts built (`parts/`), connects them and drives them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from rollpacker.run import interrupts
from rollpacker.run.driver import Controller, Parts
from rollpacker.run.driving import INTERRUPTED, Caller, drive
from rollpacker.run.folder.event_log import LogWriter, cut_back
from rollpacker.run.folder.run_folder import check_resume
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.folder.samples import cut_back as cut_back_samples
from rollpacker.run.output import print_line, progress
from rollpacker.run.parts.audience import build_audience
from rollpacker.run.parts.engines import open_engines
from rollpacker.run.parts.identity import identity_of, tokenizer_fingerprint
from rollpacker.run.parts.job import build_carried, build_cursor, build_job
from rollpacker.run.parts.resuming import SAME, check_config, config_before
from rollpacker.run.parts.rewards import start_reward_hosts, wait_for_reward_hosts
from rollpacker.run.parts.trainer import (
    build_samples_function,
    build_trainer,
    check_algorithm,
    load_state,
    start_trainer_processes,
)
from rollpacker.run.ports.hand_over import hand_over_weights, publish_weights
from rollpacker.run.ports.salvage import Salvage

if TYPE_CHECKING:
    from rollpacker.callbacks import Callback
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.records import Observer
    from rollpacker.rewards.hosts import HostedReward
    from rollpacker.rewards.weighted import WeightedReward
    from rollpacker.run.folder.checkpoint import Checkpoint
    from rollpacker.run.folder.run_folder import RunFolder
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.policy import LoadedPolicy
    from rollpacker.run.parts.seats import RunSeat
    from rollpacker.run.ports.audience import Audience
    from rollpacker.run.ports.engines import Engines
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class RunSession:
    """A run in one process: `prepare` builds its parts, `drive` runs them, and `end` tells
    callbacks that the run is over."""

    config: RunConfig
    hosts: Hosts
    folder: RunFolder
    stack: ExitStack
    _: KW_ONLY
    seat: RunSeat
    resume: bool
    overwrite: bool
    is_command: bool
    """Whether this is the process of a command, which a second interrupt ends at once."""
    display: bool
    observers: Sequence[Observer]
    callbacks: Sequence[Callback]
    _caller: Caller = field(default_factory=Caller, init=False)
    _controller: Controller | None = field(default=None, init=False)
    _is_folder_taken: bool = field(default=False, init=False)
    has_begun: bool = field(default=False, init=False)
    """Whether `drive` was called. An interrupt before that clears a new run's folder."""

    def prepare(self, began: float) -> None:
        """Build all parts of the run in the order in which they need each other, and connect them.
        `began`: value of `time.perf_counter()` when the work on this run began."""
        config, hosts, stack, folder = self.config, self.hosts, self.stack, self.folder
        shares_pools = self.seat.shares_pools
        self._check_training()
        checkpoint = self._find_checkpoint()
        before = folder.read_identity() if checkpoint else {}
        ranks = start_trainer_processes(config, hosts)
        if ranks is not None:
            stack.callback(ranks.close)
        self.seat.load_libraries()
        interrupts.check()  # libraries catch whatever is raised while they are imported
        with self.seat.holding("rollout"):
            policy = self._load_policy(before.get("threads"))
            identity = identity_of(config, policy)
            if checkpoint is not None:
                self._check_resume(before, identity, checkpoint)
            cursor = build_cursor(config, policy, checkpoint)
            job = build_job(config, policy, cursor, checkpoint, shares_pools=shares_pools)
            tokenizer = tokenizer_fingerprint(policy)
            carried = build_carried(config, checkpoint, job, tokenizer)
            # What one of these refuses in its process leaves no folder behind.
            reward_hosts = start_reward_hosts(config, policy.reward, hosts, stack)
            if policy.inputs.turns is not None:
                policy.inputs.turns.be_on(hosts)
            engines = open_engines(config, policy, hosts, stack, shares_pools=shares_pools)
            wait_for_reward_hosts(reward_hosts, policy.reward)
        salvage = self._take_folder(checkpoint, identity, job.version)
        trainer = self._begin_training(checkpoint, policy, ranks, engines)
        log, observers, audience = self._listeners(checkpoint, len(policy.train_prompts.rows))
        parts = Parts(
            job=job,
            engines=engines,
            trainer=trainer,
            reward=reward_hosts or policy.reward,
            prompts=policy.train_prompts,
            eval_prompts=policy.eval_prompts,
            cursor=cursor,
            build_samples=build_samples_function(config),
            decode=policy.decode,
            render=policy.render,
            log=log,
            samples=SampleWriter(folder.path) if config.save_samples else None,
            carried=carried,
            tokenizer=tokenizer,
            observers=observers,
            audience=audience,
            player=policy.player,
        )
        marks = _marks(config, policy.reward, reward_hosts)
        time_s = checkpoint.state["time_s"] if checkpoint else 0.0
        self._open(parts, salvage, marks, time_s=time_s, began=began)

    def _begin_training(
        self,
        checkpoint: Checkpoint | None,
        policy: LoadedPolicy,
        ranks: Ranks | None,
        engines: Engines,
    ) -> Trainer:
        """Build the trainer, load the checkpoint (None: a new run), and hand the weights to the
        engines; if other jobs share devices, copy them to the engines' hosts. Returns the
        trainer."""
        if self.seat.shares_pools and ranks is not None:
            ranks.connect()  # once they have loaded their libraries, for which they need no device
        with self.seat.holding("train"):
            trainer = build_trainer(self.config, policy, ranks, self.folder.path)
            self.stack.callback(trainer.close)
            if checkpoint is not None:
                load_state(trainer, checkpoint)
            if self.seat.shares_pools:
                publish = self.hosts.publish
                Caller().run(publish_weights(trainer, engines, trainer.version, publish))
            else:
                Caller().run(hand_over_weights(trainer, engines, trainer.version))
        return trainer

    def _listeners(
        self, checkpoint: Checkpoint | None, num_rows: int
    ) -> tuple[LogWriter, Sequence[Observer], Audience]:
        """Returns the event log, the observers of its entries, and the object that calls callbacks
        and trackers."""
        log = LogWriter(self.folder.events)
        self.stack.callback(log.close)
        live, audience = build_audience(
            self.config,
            self.folder.path,
            num_rows=num_rows,
            resumed_step=None if checkpoint is None else checkpoint.step,
            callbacks=self.callbacks,
            call=self._caller.call,
            display=self.display,
        )
        observers = [live, *self.observers, *self.seat.observers()]
        for observer in observers:
            self.stack.callback(observer.close)
        return log, observers, audience

    def _open(
        self,
        parts: Parts,
        salvage: Salvage | None,
        marks: tuple[str, ...],
        *,
        time_s: float,
        began: float,
    ) -> None:
        """Make the controller, and write the first log entries. `marks`: warnings about the run's
        numbers. `time_s`: seconds that the run's clock showed when loading began. `began`: value of
        `time.perf_counter()` then."""
        seconds = time.perf_counter() - began - self.seat.waited_s  # other jobs' time
        self._controller = Controller(
            self.config,
            parts,
            checkpoints=self.folder.checkpoints,
            time_s=time_s + seconds,
            salvage=salvage,
            seat=self.seat.seat,
            publish=self.hosts.publish,
        )
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._controller.open(started_at=now, began_s=time_s, marks=marks)

    def _load_policy(self, threads: int | None) -> LoadedPolicy:
        from rollpacker.pipeline.stages.check import check_longest_sample
        from rollpacker.run.parts.policy import load_policy

        shown: dict[str, Any] = {"tell": print_line, "progress": progress} if self.display else {}
        policy = load_policy(self.config, hosts=self.hosts, threads=threads, **shown)
        if policy.inputs.turns is not None:
            self.stack.callback(policy.inputs.turns.close)
        longest = max(len(row.tokens) for row in policy.train_prompts.rows)
        check_longest_sample(self.config, longest)
        _warn_of_few_rows(self.config, len(policy.train_prompts.rows))
        return policy

    def _check_training(self) -> None:
        """Check pipeline stages and algorithm. If switches in the config differ from those of the
        algorithm that it names, show which."""
        from rollpacker.pipeline.stages.check import check_stages

        check_stages(self.config)
        check_algorithm(self.config)
        if not self.config.algorithm.is_as_named:
            (print_line if self.display else logger.info)(self.config.algorithm.told)

    def _find_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint that a resume goes on from; None for a new run, or if a run ended
        before its first one. Raises `RunError` if a changed config key would alter results."""
        if not self.resume:
            return None
        found = self.folder.find_checkpoint(carries=self.config.tail.carries)
        if found is not None:
            check_config(self.config, self.folder, found.step)
            return found
        if self.folder.config.exists():  # what is thrown away is a beginning of this run
            self._check_identity(SAME, SAME, 0, {})
        logger.warning("the run ended before its first checkpoint; it begins anew")
        return None

    def drive(self) -> str:
        """Drive the run to its end, or to an interrupt. Returns why the run ended."""
        assert self._controller is not None
        first = self._controller.parts.job.step
        self.has_begun = True
        self.hosts.watch(self._controller.fail)
        self.seat.watch_over(self._controller)
        reason = drive(self._controller, self._caller, is_command=self.is_command)
        if self.resume and self._controller.parts.job.step == first and reason != INTERRUPTED:
            logger.warning("nothing was left to do: %s", reason)
        if reason == INTERRUPTED:  # whoever sent the signal may not wait for what follows
            with contextlib.suppress(OSError):  # the terminal is gone (SIGHUP)
                step = self._controller.parts.job.step
                print(f"Step {step} is saved; writing the reports.", file=sys.stderr)
        return reason

    def forget_if_not_begun(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Clear a new run's folder if the run is interrupted or refused before it begins, so that
        the same command can start it again. Called as a context manager's `__exit__`."""
        ended = kind is not None and issubclass(kind, KeyboardInterrupt | ValueError)
        if ended and self._is_folder_taken and not (self.has_begun or self.resume):
            self.folder.clear()

    def end(self, reason: str | None) -> None:
        """Tell callbacks and trackers that the run is over. `reason`: why; None: by an error.
        Raises `CallbackError` if a callback fails."""
        if self._controller is not None:
            self._controller.parts.audience.end(reason)

    def _check_resume(
        self, before: dict[str, Any], identity: dict[str, Any], checkpoint: Checkpoint
    ) -> None:
        """Check by fingerprints (`before`: at the run's beginning, `identity`: now) that a resume
        goes on with the same run, and show the checkpoint."""
        self._check_identity(before, identity, checkpoint.step, checkpoint.state["job"])
        where = checkpoint.folder.relative_to(self.folder.path)
        self._tell(f"resuming after step {checkpoint.step} ({where})")

    def _tell(self, line: str) -> None:
        if self.display:
            print_line(line)
        else:
            logger.info("%s", line)

    def _check_identity(
        self, before: Mapping[str, Any], now: Mapping[str, Any], step: int, job: dict[str, Any]
    ) -> None:
        """Raise `RunError` if changes of config or fingerprints (`before`, `now`) would alter
        results. `step`: the checkpoint's. `job`: the core's state, which gets the old cap on
        responses."""
        from rollpacker.config.load import changes_since

        old = config_before(self.folder)
        for change in check_resume(changes_since(old, self.config), before, now):
            logger.warning("resuming after step %d with a change: %s", step, change)
        job.setdefault("max_response_tokens", old.get("rollout", {}).get("max_response_tokens"))

    def _take_folder(
        self, checkpoint: Checkpoint | None, identity: dict[str, Any], version: int
    ) -> Salvage | None:
        """Cut the files of the run's folder back to the checkpoint, or remove them, and write
        config and identity. `version`: that of the checkpoint's weights. Returns the responses that
        finished after the checkpoint; None for a run that begins anew."""
        from rollpacker.config.load import save_config

        folder, salvage = self.folder, None
        self._is_folder_taken = True
        if checkpoint is not None:
            state = checkpoint.state
            cut_back(folder.events, state["log_bytes"], state["log_sha256"])
            cut_back_samples(folder.samples, checkpoint.step)
            cut_back_samples(folder.evaluations, checkpoint.step)
            in_order = self.config.rollout.is_repeatable
            salvage = Salvage(folder.path, checkpoint.folder, version, in_order=in_order)
            samples, tokens = salvage.num_found
            if samples:
                told = f"{samples:,} finished responses ({tokens:,} tokens) of the next round"
                self._tell(f"{told} are there, and are not generated again")
        elif self.overwrite or self.resume:
            folder.clear()
        save_config(self.config, folder.config)
        folder.write_identity(identity)
        return salvage


def _marks(
    config: RunConfig, reward: WeightedReward, reward_hosts: HostedReward | None
) -> tuple[str, ...]:
    """Returns warnings for the log that belong to all numbers, such as `unsandboxed`."""
    tail = config.tail_batching
    found = {
        "unsandboxed": reward.shared.unsandboxed
        or (reward_hosts is not None and reward_hosts.unsandboxed),
        "weighted_carrying": tail.carries and tail.carry == "weighted",
    }
    return tuple(mark for mark, holds in found.items() if holds)


def _warn_of_few_rows(config: RunConfig, num_rows: int) -> None:
    """Warn if `data.train` has fewer rows than a step asks for, and no step can use rows of the
    next epoch, so that every step is smaller than asked for."""
    tail, asked = config.tail, config.rollout.prompts_per_step
    if num_rows < asked and (tail.flush_each_epoch or not tail.enabled):
        logger.warning(
            "rollout.prompts_per_step=%d is more than the %d prompts of data.train: no step has"
            " more than these. Lower it, or bring more rows",
            asked,
            num_rows,
        )
