"""One process's share of a run: it takes the folder, loads and joins the parts, drives them."""

from __future__ import annotations

import contextlib
import datetime
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollpacker.run import interrupts
from rollpacker.run.driving import INTERRUPTED, Caller, drive
from rollpacker.run.output import print_line, progress

if TYPE_CHECKING:
    from rollpacker.callbacks import Callback
    from rollpacker.config.schema import RunConfig
    from rollpacker.core.records import Observer
    from rollpacker.report.live import LiveReport
    from rollpacker.rewards.hosts import HostedReward
    from rollpacker.run.audience import Audience
    from rollpacker.run.checkpoint import Checkpoint
    from rollpacker.run.driver import Controller, Parts
    from rollpacker.run.engines import Engines
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.parts.parts import Policy
    from rollpacker.run.parts.seats import RunSeat
    from rollpacker.run.run_folder import RunFolder
    from rollpacker.run.salvage import Salvage
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Session:
    """One process's share of a run."""

    config: RunConfig
    hosts: Hosts
    folder: RunFolder
    stack: ExitStack
    _: KW_ONLY
    seat: RunSeat
    resume: bool
    overwrite: bool
    is_command: bool
    """The process is this run's alone."""
    display: bool
    observers: Sequence[Observer]
    callbacks: Sequence[Callback]
    _caller: Caller = field(default_factory=Caller, init=False)
    _controller: Controller | None = field(default=None, init=False)
    _is_folder_taken: bool = field(default=False, init=False)
    has_begun: bool = field(default=False, init=False)
    """There is something to save."""

    def prepare(self, watch: float) -> None:
        """Load everything and put it together. `watch` is when the process began to work."""
        from rollpacker.run.driver import Parts
        from rollpacker.run.event_log import LogWriter
        from rollpacker.run.parts import parts as build
        from rollpacker.run.parts.identity import identity_of, tokenizer_fingerprint
        from rollpacker.run.samples import SampleWriter

        config, folder = self.config, self.folder
        self._check_training()
        checkpoint = self._find_checkpoint()
        if self.resume and checkpoint is None:
            self._check_config()  # what is thrown away is a beginning of this run, no other's
            logger.warning("the run ended before its first checkpoint; it begins anew")
        before = folder.read_identity() if checkpoint else {}
        ranks = build.start_trainer_processes(config, self.hosts)
        if ranks is not None:
            self.stack.callback(ranks.close)
        self.seat.load_libraries()
        interrupts.check()  # libraries catch whatever is raised while they are imported
        with self.seat.holding("rollout"):
            policy = self._load_policy(before.get("threads"))
            identity = identity_of(config, policy)
            if checkpoint is not None:
                self._check_resume(before, identity, checkpoint)
            cursor = build.build_cursor(config, policy, checkpoint)
            job = self._job(checkpoint, cursor, policy)
            tokenizer = tokenizer_fingerprint(policy)
            carried = build.build_carried(config, checkpoint, job, tokenizer)
            engines, reward_hosts = self._engines_and_reward_hosts(policy)
        salvage = self._take_folder(checkpoint, identity, job.version)
        trainer = self._begin_training(checkpoint, policy, ranks, engines)
        time_s = checkpoint.state["time_s"] if checkpoint else 0.0
        log = LogWriter(folder.events)
        self.stack.callback(log.close)
        live, audience = self._report_and_audience(checkpoint, policy)
        watching = [live, *self.observers, *self.seat.observers()]
        for observer in watching:
            self.stack.callback(observer.close)
        samples = SampleWriter(folder.path)
        parts = Parts(
            job=job,
            engines=engines,
            trainer=trainer,
            reward=reward_hosts or policy.reward,
            prompts=policy.train_prompts,
            eval_prompts=policy.eval_prompts,
            cursor=cursor,
            build_samples=build.build_samples_function(config),
            decode=policy.decode,
            render=policy.render,
            log=log,
            samples=samples if config.save_samples else None,
            carried=carried,
            tokenizer=tokenizer,
            observers=watching,
            audience=audience,
            player=policy.player,
        )
        self._open(parts, watch, time_s, build.marks(config, policy, reward_hosts), salvage)

    def _engines_and_reward_hosts(self, policy: Policy) -> tuple[Engines, HostedReward | None]:
        """Before the run has a folder: what one refuses in its process leaves nothing behind."""
        from rollpacker.run.parts.engines import all_made, build_engines
        from rollpacker.run.parts.reward_hosts import start_reward_hosts, wait_for_reward_hosts
        from rollpacker.run.shared_devices import let_go_of_all

        reward_hosts = start_reward_hosts(self.config, policy, self.hosts, self.stack)
        if policy.inputs.turns is not None:
            policy.inputs.turns.be_on(self.hosts)
        shares = self.seat.shares_pools
        engines = build_engines(self.config, policy, self.hosts, shares_pools=shares)
        self.stack.callback(lambda: Caller().run(engines.close()))
        Caller().run(all_made(engines))
        if (
            self.config.train.colocate or shares
        ):  # until weights are handed over: the trainer is to load
            Caller().run(let_go_of_all(engines))
        wait_for_reward_hosts(reward_hosts, policy)
        return engines, reward_hosts

    def _begin_training(
        self, checkpoint: Checkpoint | None, policy: Policy, ranks: Ranks | None, engines: Engines
    ) -> Trainer:
        """With the checkpoint's state. Engines have its weights then, or will when they wake up."""
        from rollpacker.run.hand_over import hand_over_weights, publish_weights
        from rollpacker.run.parts.parts import build_trainer

        if self.seat.shares_pools and ranks is not None:
            ranks.connect()  # once they have loaded their libraries, for which they need no device
        with self.seat.holding("train"):
            trainer = build_trainer(self.config, policy, ranks, self.folder.path)
            self.stack.callback(trainer.close)
            _load(trainer, checkpoint)
            if self.seat.shares_pools:
                publish = self.hosts.publish
                Caller().run(publish_weights(trainer, engines, trainer.version, publish))
            else:
                Caller().run(hand_over_weights(trainer, engines, trainer.version))
        return trainer

    def _open(
        self,
        parts: Parts,
        watch: float,
        time_s: float,
        marks: tuple[str, ...],
        salvage: Salvage | None,
    ) -> None:
        """Begin the session in the log. `time_s`: where the run's clock goes on."""
        from rollpacker.run.driver import Controller

        seconds = time.perf_counter() - watch - self.seat.waited_s  # other jobs' time
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

    def _load_policy(self, threads: int | None) -> Policy:
        from rollpacker.pipeline.stages.check import check_longest_sample
        from rollpacker.run.parts.parts import load_policy

        shown: dict[str, Any] = {"tell": print_line, "progress": progress} if self.display else {}
        policy = load_policy(self.config, threads=threads, **shown)
        if policy.inputs.turns is not None:
            self.stack.callback(policy.inputs.turns.close)
        longest = max(len(row.tokens) for row in policy.train_prompts.rows)
        check_longest_sample(self.config, longest)
        _warn_of_few_rows(self.config, len(policy.train_prompts.rows))
        return policy

    def _check_training(self) -> None:
        """Stages and algorithm; and say what that comes to, where it is not what its name says."""
        from rollpacker.pipeline.stages.check import check_stages
        from rollpacker.run.parts.parts import check_algorithm

        check_stages(self.config)
        check_algorithm(self.config)
        if not self.config.algorithm.is_as_named:
            (print_line if self.display else logger.info)(self.config.algorithm.told)

    def _find_checkpoint(self) -> Checkpoint | None:
        """Where a resume goes on, if its config alone does not make another run of it."""
        from rollpacker.run.parts.resuming import check_config

        if not self.resume:
            return None
        found = self.folder.find_checkpoint(carries=self.config.tail.carries)
        if found is not None:
            check_config(self.config, self.folder, found.step)
        return found

    def drive(self) -> str:
        """Run to the end, or to the first Ctrl-C or SIGTERM. Returns the reason. See `drive`."""
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
        """A new run that is interrupted or refused while it starts up leaves nothing that the same
        command would take for a run."""
        ended = kind is not None and issubclass(kind, KeyboardInterrupt | ValueError)
        if ended and self._is_folder_taken and not (self.has_begun or self.resume):
            self.folder.clear()

    def end(self, reason: str | None) -> None:
        """Tell callbacks and trackers that it is over, once. Raises `CallbackError`."""
        if self._controller is not None:
            self._controller.parts.audience.end(reason)

    def _check_resume(
        self, before: dict[str, Any], identity: dict[str, Any], checkpoint: Checkpoint
    ) -> None:
        """It is the same run that goes on, and says from where."""
        self._check_identity(before, identity, checkpoint.step, checkpoint.state["job"])
        where = checkpoint.folder.relative_to(self.folder.path)
        self._tell(f"resuming after step {checkpoint.step} ({where})")

    def _tell(self, line: str) -> None:
        if self.display:
            print_line(line)
        else:
            logger.info("%s", line)

    def _check_config(self) -> None:
        """A run that wrote no checkpoint has no identity to go on with, but a config."""
        from rollpacker.run.parts.resuming import SAME

        if self.folder.config.exists():
            self._check_identity(SAME, SAME, 0, {})

    def _check_identity(
        self, before: Mapping[str, Any], now: Mapping[str, Any], step: int, job: dict[str, Any]
    ) -> None:
        """A resume after `step` must find what the run began with. The state of its job is told the
        cap on responses, which earlier versions did not write there."""
        from rollpacker.config.load import changes_since
        from rollpacker.run.parts.resuming import config_before
        from rollpacker.run.run_folder import check_resume

        old = config_before(self.folder)
        for change in check_resume(changes_since(old, self.config), before, now):
            logger.warning("resuming after step %d with a change: %s", step, change)
        job.setdefault("max_response_tokens", old.get("rollout", {}).get("max_response_tokens"))

    def _take_folder(
        self, checkpoint: Checkpoint | None, identity: dict[str, Any], version: int
    ) -> Salvage | None:
        """Cut it back to the checkpoint, or empty it, and write down what the run depends on.
        Returns what had finished after a checkpoint with this version of the weights."""
        from rollpacker.config.load import save_config
        from rollpacker.run.event_log import cut_back
        from rollpacker.run.salvage import Salvage
        from rollpacker.run.samples import cut_back as cut_back_samples

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

    def _job(self, checkpoint: Checkpoint | None, cursor: Any, policy: Policy) -> Any:
        from rollpacker.core.job.pooled_job import make_job, restore_job
        from rollpacker.run.parts.environments import sources_of
        from rollpacker.run.parts.parts import reward_kinds

        turns, sources = policy.inputs.turns, sources_of(self.config, policy.train_prompts)
        config = self.config.job(
            prompt_tokens=policy.mean_prompt_tokens,
            reward_kinds=reward_kinds(self.config, policy),
            acting=None if turns is None else turns.acting(sources),
        )
        config = replace(config, shares_pools=self.seat.shares_pools)
        if checkpoint is None:
            return make_job(config)
        return restore_job(config, checkpoint.state["job"], data_ended=cursor.ended)

    def _report_and_audience(
        self, checkpoint: Checkpoint | None, policy: Policy
    ) -> tuple[LiveReport, Audience]:
        """Metrics and display, and who is told of what they hold."""
        from rollpacker.config.load import to_plain
        from rollpacker.report.live import LiveReport
        from rollpacker.run.audience import Audience, ToldRun
        from rollpacker.run.output import console, in_notebook
        from rollpacker.run.parts.parts import build_trackers

        config = self.config
        steps = config.num_steps(len(policy.train_prompts.rows))
        live = LiveReport(
            self.folder.path,
            total_steps=steps,
            resume=checkpoint is not None,
            slots=config.rollout.max_slots,
            max_response_tokens=config.rollout.max_response_tokens,
            console=console(goes_on=True) if self.display else None,
            show=self.display,
            notebook=config.name if in_notebook() else None,
        )
        run = ToldRun(
            name=config.name,
            folder=self.folder.path,
            config=to_plain(config),
            total_steps=steps,
            resumed_step=None if checkpoint is None else checkpoint.step,
        )
        audience = Audience(
            run,
            callbacks=self.callbacks,
            trackers=build_trackers(config),
            call=self._caller.call,
            row_so_far=live.row_so_far,
        )
        live.on_row = audience.row_written
        return live, audience


def _load(trainer: Trainer, checkpoint: Checkpoint | None) -> None:
    from rollpacker.run.errors import RunError
    from rollpacker.trainer.trainer import TrainerStateError

    try:
        if checkpoint is not None:
            trainer.load(checkpoint.folder)
    except TrainerStateError as error:
        raise RunError(
            f"{error}. The run cannot go on from there (`--overwrite` begins anew)"
        ) from error


def _warn_of_few_rows(config: RunConfig, num_rows: int) -> None:
    """A step takes no prompt of the next epoch where each ends with the queue empty."""
    tail, asked = config.tail, config.rollout.prompts_per_step
    if num_rows < asked and (tail.flush_each_epoch or not tail.enabled):
        logger.warning(
            "rollout.prompts_per_step=%d is more than the %d prompts of data.train: no step has"
            " more than these. Lower it, or bring more rows",
            asked,
            num_rows,
        )
