"""The whole configuration of a run: `RunConfig`. The class of each section stands beside the code
that uses it. Every default is on its field and nowhere else, units are in names, and a loaded
config is frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rollpacker.algo.config import AlgorithmConfig
from rollpacker.config.devices import check_devices
from rollpacker.config.placement import PlacementConfig, RewardHostsConfig, check_placement
from rollpacker.config.rollout import RolloutConfig
from rollpacker.config.running import (
    CheckpointConfig,
    DeadlineConfig,
    EvalConfig,
    RewardSchedulerConfig,
)
from rollpacker.core.checks.acting import ActingConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.core.fleet.parallelism import ParallelismConfig
from rollpacker.core.fleet.stream_plan import DeviceLayout, StreamConfig
from rollpacker.core.job.cadence import Cadence
from rollpacker.core.job.config import JobConfig, check_look_ahead
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.dataset import DataConfig
from rollpacker.engines.engine import EngineConfig, SamplingParams
from rollpacker.environments.environment import EnvironmentConfig
from rollpacker.rewards.reward import RewardConfig
from rollpacker.sandbox.sandbox import SandboxConfig
from rollpacker.trackers.tracker import TrackerConfig, TrackerName
from rollpacker.trainer.trainer import ModelConfig, TrainConfig

OF_RELEASES = ("kinds", "window", "every", "released_share", "min_new_share")
"""Keys of `stream_trainer` that say when engines give devices to the trainer during generation.
They have no effect if engines and trainer share no device."""

MAX_TRAINER_LOSSES = 3
"""Number of losses of trainer processes, with no step committed in between, that end a run."""

ENVIRONMENT = "environment"
"""Name, in `rewards`, of the reward that an environment itself returns for a trajectory."""

MAX_NAME_BYTES = 200
"""Most bytes of a run's name: file systems take 255 bytes, and the name gets suffixes."""


# One field for each key of a config file: grouping them would rename the users' keys.
@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything that a run depends on; saved in the run's folder with all defaults filled in."""

    name: str
    """Name of the run, whose folder is `runs_dir/name`."""
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    train: TrainConfig
    rewards: tuple[RewardConfig, ...]
    """Rewards whose weighted sum is the reward of a sample."""
    warmup: str | None = None
    """Path of a config for `rollpacker warmup` (supervised fine-tuning), which is run first if the
    folder `model.path` does not exist, and writes that folder. None: no warmup."""
    seed: int = 0
    runs_dir: str = "runs"
    runtime: Literal["local", "ray"] = "local"
    """Where the run's processes start. local: on this machine alone. ray: on a cluster of hosts."""
    placement: PlacementConfig | None = None
    rewards_hosts: RewardHostsConfig | None = None
    reward_scheduler: RewardSchedulerConfig = field(default_factory=RewardSchedulerConfig)
    environment: EnvironmentConfig | None = None
    """Tools or an environment that answer the model's messages. Samples are then whole trajectories
    of several turns, which are trained on. None: a sample is a single response."""
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    tail_batching: TailBatchingConfig = field(default_factory=TailBatchingConfig)
    stream_trainer: StreamConfig = field(default_factory=StreamConfig)
    """How gradients start before a round (one batch of generation) is over. With `train.processes`
    the trainer begins on every group that is complete, in rounds of all kinds. Without, the run's
    process has no device to give away, and only `reward_wait` and `max_share` count. Which groups
    come early depends on when verdicts arrive, so that runs are repeatable up to rounding, not bit
    by bit. `kinds`, `window`, `every`, `released_share` and `min_new_share` decide when engines
    release devices, which happens with `train.colocate` and in `rollpacker simulate`."""
    parallelism_planner: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How many devices each engine has: more after rounds in which engines ran out of memory for
    keys and values and preempted samples, fewer after others. With vLLM only."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    deadlines: DeadlineConfig = field(default_factory=DeadlineConfig)
    trackers: tuple[TrackerName | TrackerConfig, ...] = ()
    """Experiment trackers that show the run, such as `[wandb]`; a name alone stands for `{name:
    wandb}`. A tracker that fails never ends the run. Empty: no tracker."""
    save_samples: bool = True
    """Whether to write the text of every trained sample to `samples/`, and of every evaluated
    sample to `evaluations/`, as parquet."""

    def __post_init__(self) -> None:
        if not self.rewards:
            raise ValueError("rewards must name at least one reward function")
        self._check_algorithm()
        self._check_quantization()
        check_devices(self.rollout, self.train, self.parallelism_planner, self.model)
        self._check_placement()
        self._check_stream_trainer()
        self._check_carrying()
        self._check_environment()
        if self.tail_batching.race == "scored" and not self.reward_scheduler.overlap:
            raise ValueError(
                "tail_batching.race=scored needs reward_scheduler.overlap=true: without it nothing"
                " is scored before the rollout ends"
            )
        slowest = max(reward.timeout_s for reward in self.rewards)
        if self.deadlines.reward_s < 2 * slowest:
            raise ValueError(
                f"deadlines.reward_s ({self.deadlines.reward_s:g}) must be at least twice the "
                f"longest timeout_s of a reward ({slowest:g}), or one slow call ends the run"
            )
        names = [tracker.name for tracker in self.tracker_configs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"trackers names {twice} twice: a run is one run of each tracker")
        if not _is_folder_name(self.name):
            raise ValueError(
                f"name must be a plain folder name (no slash, no control character, at most"
                f" {MAX_NAME_BYTES} bytes, not beginning with . - or ~), not {_shown(self.name)}"
            )

    def _check_algorithm(self) -> None:
        algorithm = self.algorithm
        prompts, updates = self.rollout.prompts_per_step, self.train.updates_per_round
        if prompts % updates:
            raise ValueError(
                f"train.updates_per_round ({updates}) must divide rollout.prompts_per_step "
                f"({prompts}), so that every update has as many prompts"
            )
        truncated = self.rollout.top_p < 1 or self.rollout.top_k > 0
        for setting, compares in (
            ("old_logprobs=rollout", algorithm.old_logprobs == "rollout"),
            (
                f"mismatch_correction={algorithm.mismatch_correction}",
                algorithm.mismatch_correction != "none",
            ),
        ):
            if compares and truncated:
                raise ValueError(
                    f"algorithm.{setting} does not go with top_p or top_k: the engine's log-probs "
                    "are then those of a truncated distribution, the trainer's are not"
                )
        if algorithm.needs_groups and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt must be at least 2: algorithm.name="
                f"{algorithm.name} compares the samples of a prompt, and a group of one has nothing"
                " to compare with (reinforce_pp, ppo and distillation go without groups)"
            )
        if algorithm.needs_teacher and self.model.teacher is None:
            raise ValueError(
                f"algorithm.name={algorithm.name} needs a teacher: set model.teacher to a model "
                "with the same vocabulary"
            )
        if self.model.teacher is not None and not algorithm.needs_teacher:
            raise ValueError(
                f"model.teacher is set, but algorithm.name={algorithm.name} asks none; "
                "algorithm.name=distillation does"
            )

    def _check_quantization(self) -> None:
        if self.model.quantization is None:
            return
        if (self.train.processes or 1) > 1:
            raise ValueError(
                f"model.quantization={self.model.quantization} does not go with several processes "
                "(train.processes): codes of 4 bits are not sharded. Set train.processes=1, or "
                "leave model.quantization out"
            )
        engine = self.rollout.engine
        if not engine.takes_quantized:
            raise ValueError(
                f"model.quantization={self.model.quantization} does not go with "
                f"rollout.engine.name={engine.name}: set rollout.engine.name=torch, or leave "
                "model.quantization out"
            )
        if self.algorithm.needs_critic:
            raise ValueError(
                f"model.quantization={self.model.quantization} does not go with a critic, which is "
                "trained as a whole: use an algorithm without one (algorithm.advantage=reward)"
            )

    def _check_placement(self) -> None:
        if self.rewards_hosts is not None and self.runtime == "local":
            raise ValueError(
                "rewards_hosts is for several hosts: set runtime=ray, or leave rewards_hosts out"
            )
        if self.placement is not None:
            planner = self.parallelism_planner
            check_placement(self.placement, self.rollout, self.train, planner)
            self._check_reward_models(self.placement)

    def _check_reward_models(self, placement: PlacementConfig) -> None:
        if placement.reward is None:
            return
        if not any(one.takes_device for one in self.rewards):
            raise ValueError(
                "placement.reward has devices, and no reward is a reward_model that could be on "
                "them: leave placement.reward out"
            )
        if self.rewards_hosts is not None:
            raise ValueError(
                "placement.reward does not go with rewards_hosts, whose processes judge on the "
                "engines' hosts: leave one of them out"
            )

    def _check_stream_trainer(self) -> None:
        stream = self.stream_trainer
        if stream.enabled and self.algorithm.needs_whole_batch:
            raise ValueError(
                "stream_trainer.enabled does not go with statistics of the whole step, which are "
                "not known before its last sample: set algorithm.whiten=false and "
                "algorithm.normalize_mean and normalize_std to group or none, or switch streaming "
                "off"
            )
        if stream.enabled and self.train.updates_per_round > 1:
            raise ValueError(
                "stream_trainer.enabled does not go with train.updates_per_round above 1: which "
                "groups an update has is known when the round is over, and streaming trains on "
                "them before"
            )
        check_look_ahead(
            self.tail_batching, streams=stream.enabled, acts=self.environment is not None
        )
        if stream.enabled and self.tail_batching.debias != "none":
            raise ValueError(
                "tail_batching.debias does not go with stream_trainer.enabled: a sample's weight "
                "is known when its round is over, and streaming trains on it before"
            )
        if stream.enabled and not stream.reward_wait and self.train.processes is None:
            raise ValueError(
                "stream_trainer.enabled needs a trainer in processes of its own (train.processes), "
                "which works while the engine generates, or stream_trainer.reward_wait=true"
            )

    def _check_carrying(self) -> None:
        tail, engine, algorithm = self.tail_batching, self.rollout.engine, self.algorithm
        if not tail.carries:
            return
        if not engine.takes_up_carried:
            raise ValueError(
                f"tail_batching.carry={tail.carry} needs an engine that goes on from the tokens of "
                f"an earlier launch, which rollout.engine.name={engine.name} does not: set "
                "tail_batching.carry=none"
            )
        if tail.carry == "weighted" and not algorithm.mismatch_correction.startswith("token"):
            raise ValueError(
                "tail_batching.carry=weighted trains on tokens of older weights, each with its own "
                "clipped importance ratio: set algorithm.mismatch_correction=token-truncate (or "
                "token-mask) and algorithm.old_logprobs=recomputed, or tail_batching.carry=exact"
            )

    def _check_environment(self) -> None:
        environment = self.environment
        is_brought = self.data.train.kind == "environment"
        if is_brought and (environment is None or environment.function is None):
            raise ValueError(
                "data.train.kind=environment takes the rows that an environment brings along, and"
                " there is none: set environment.function"
            )
        if environment is None:
            if any(reward.function == ENVIRONMENT for reward in self.rewards):
                raise ValueError(
                    f"the reward {ENVIRONMENT} is what an environment says, and there is none: set"
                    " environment.function"
                )
            return
        if not environment.tools and environment.function is None:
            raise ValueError("environment must name tools or a function")
        if environment.tools and any(reward.function == ENVIRONMENT for reward in self.rewards):
            raise ValueError(
                f"rewards: the reward {ENVIRONMENT} is what an environment says, and tools alone"
                " say none: name a function of yours instead, which gets the whole dialogue"
            )
        if self.deadlines.generation_s < 2 * environment.timeout_s:
            raise ValueError(
                f"deadlines.generation_s ({self.deadlines.generation_s:g}) must be at least twice "
                f"environment.timeout_s ({environment.timeout_s:g}), or one slow answer ends the "
                "run"
            )
        if self.rewards_hosts is not None:
            raise ValueError(
                "rewards_hosts does not go with environment: what was said in several turns is not"
                " sent to other hosts yet. Leave rewards_hosts out"
            )
        if self.tail_batching.carries and self.tail_batching.carry == "weighted":
            raise ValueError(
                "tail_batching.carry=weighted does not go with environment: trajectories are"
                " played anew, and tokens of older weights cannot stay as they are. Leave it out"
            )

    @property
    def engine(self) -> EngineConfig:
        """`rollout.engine`, where batch_invariant=auto remains only if tokens are carried exactly,
        which is what it is for."""
        engine, tail = self.rollout.engine, self.tail_batching
        if engine.batch_invariant == "auto" and not (tail.carries and tail.carry != "weighted"):
            return replace(engine, batch_invariant=False)
        return engine

    @property
    def engines_are_apart(self) -> bool:
        """Whether engines run in processes of their own."""
        of_several = self.parallelism_planner.of_several
        return self.rollout.engines > 1 or of_several or self.runtime == "ray"

    @property
    def run_computes(self) -> bool:
        """Whether the run's own process generates responses or trains."""
        return not self.engines_are_apart or self.train.processes is None

    @property
    def trainer_apart(self) -> bool:
        """Whether the trainer has devices of its own, which no engine uses."""
        return self.train.processes is not None and not self.train.colocate

    @property
    def tracker_configs(self) -> tuple[TrackerConfig, ...]:
        """The configs of all `trackers`. A tracker that is only named has default settings."""
        return tuple(
            TrackerConfig(name=one) if isinstance(one, str) else one for one in self.trackers
        )

    @property
    def layout(self) -> DeviceLayout:
        """The layout (which devices form an engine or a replica) of the devices that engines share
        with the trainer; `DeviceLayout()` if they share none."""
        if not self.train.colocate:
            return DeviceLayout()
        assert self.train.processes is not None
        degree = self.parallelism_planner.initial
        return DeviceLayout(
            gpus=self.rollout.engines * degree,
            gpus_per_node=self.rollout.engines * degree,
            tensor_parallel=degree,
            train_group=self.train.processes // self.train.replicas,
        )

    @property
    def _releases(self) -> bool:
        return bool(self.layout.releasable(self.stream_trainer.released_share))

    @property
    def without_effect(self) -> str | None:
        """A sentence that names `stream_trainer` settings without effect. None: all have one."""
        stream, default = self.stream_trainer, StreamConfig()
        keys = [k for k in OF_RELEASES if getattr(stream, k) != getattr(default, k)]
        if self.train.colocate and stream.enabled and not self._releases:
            return (
                "stream_trainer with train.colocate: no engine will release its device, since "
                f"train.replicas={self.train.replicas} leaves each replica more of them than "
                "stream_trainer.released_share; train.replicas="
                f"{self.train.processes} gives each device its own"
            )
        if not keys or self.train.colocate:
            return None
        names = ", ".join(f"stream_trainer.{key}" for key in keys)
        return (
            f"{names}: without effect, since engines release devices only with train.colocate, and"
            " in simulate"
        )

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of responses that are trained on."""
        rollout = self.rollout
        return SamplingParams(
            max_response_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop=rollout.stop,
            seed=self.seed,
        )

    @property
    def eval_sampling(self) -> SamplingParams:
        """Sampling parameters of the responses of an evaluation."""
        tokens, temperature = self.eval.max_response_tokens, self.eval.temperature
        training = self.sampling
        return replace(
            training,
            max_response_tokens=training.max_response_tokens if tokens is None else tokens,
            temperature=training.temperature if temperature is None else temperature,
        )

    @property
    def routed(self) -> bool:
        """Whether some reward is for certain tasks only, so that prompts have tasks as sources."""
        return any(reward.tasks is not None for reward in self.rewards)

    def num_steps(self, num_prompts: int) -> int:
        """Number of optimizer steps of the whole run, given its number of training prompts."""
        if self.train.steps is not None:
            return self.train.steps
        assert self.train.epochs is not None
        return math.ceil(num_prompts * self.train.epochs / self.rollout.prompts_per_step)

    @property
    def tail(self) -> TailBatchingConfig:
        """The settings of tail batching, changed if there is an environment. `complement`, which
        keeps lengths of continued responses unbiased, is then off. If the chat template rewrites
        earlier turns, each turn has a prompt of its own, and no tokens are carried either."""
        tail, environment = self.tail_batching, self.environment
        if environment is None:
            return tail
        if tail.complements:
            tail = replace(tail, complement=False)
        if tail.carries and environment.rewrites == "prefixes":
            tail = replace(tail, carry="none")
        return tail

    def job(
        self,
        *,
        prompt_tokens: int = 0,
        reward_kinds: Mapping[str, RewardKindConfig] | None = None,
        acting: ActingConfig | None = None,
    ) -> JobConfig:
        """The scheduling core's config of the run. `prompt_tokens`: mean length of a prompt.
        `reward_kinds`: workers and deadlines of checks by source of prompts; None: no limits.
        `acting`: limits of turns with environments; None: samples are single responses."""
        longest = None if acting is None else acting.limits.max_trajectory_tokens
        return JobConfig(
            prompts_per_step=self.rollout.prompts_per_step,
            samples_per_prompt=self.rollout.samples_per_prompt,
            max_steps=self.train.steps,
            max_response_tokens=longest or self.rollout.max_response_tokens,
            prompt_tokens=prompt_tokens,
            tail_batching=self.tail,
            dynamic_sampling=self.rollout.dynamic_sampling,
            rewards=self.reward_scheduler.schedule(self.tail_batching.race, reward_kinds or {}),
            stream=self.stream_trainer,
            trainer_apart=self.trainer_apart,
            layouts=(self.layout,),
            min_verdicts=2 if self.algorithm.needs_groups else 1,
            parallelism=self.parallelism_planner,
            fleet=self.rollout.fleet(self.parallelism_planner) if self.engines_are_apart else None,
            max_trainer_losses=None if self.train.processes is None else MAX_TRAINER_LOSSES,
            acting=acting,
            cadence=Cadence(
                checkpoint_every_steps=self.checkpoint.every_steps,
                evaluates=self.data.eval is not None or self.data.eval_fraction > 0,
                eval_every_steps=self.eval.every_steps,
            ),
        )


def _is_folder_name(name: str) -> bool:
    """Whether the name of a run is a plain folder name: printable, short, without slashes, and not
    beginning with `.`, `-` or `~`."""
    plain = name == name.strip() and name.isprintable() and not set("/\\") & set(name)
    return plain and bool(name) and name[0] not in ".-~" and len(name.encode()) <= MAX_NAME_BYTES


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else repr(text[:60]) + "..."
