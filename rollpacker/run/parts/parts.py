"""Builds the parts of a run from its config: the one place that knows every implementation."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.chat_template import Detokenizer
from rollpacker.config.schema import RunConfig
from rollpacker.core.checks.reward_schedule import RewardKindConfig
from rollpacker.data.dataset import TRAIN
from rollpacker.run.parts.environments import Turns, check_turns, load_turns, with_tools

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollpacker.callbacks import Callback
    from rollpacker.core.job.job import Job
    from rollpacker.data.dataset import PromptRow, PromptSet
    from rollpacker.engines.engine import Engine, EngineConfig
    from rollpacker.rewards.hosts import HostedReward
    from rollpacker.rewards.reward import RewardInput
    from rollpacker.rewards.shared import Progress
    from rollpacker.rewards.weighted import WeightedReward
    from rollpacker.run.carried import CarriedTokens
    from rollpacker.run.checkpoint import Checkpoint
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.player import Player
    from rollpacker.trainer.launch import Ranks
    from rollpacker.trainer.model import LoadedModel
    from rollpacker.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """A model that generates and can be trained, and what it is asked and judged by."""

    loaded: LoadedModel
    inputs: Inputs
    threads: int
    seed: int
    engine_config: EngineConfig

    @cached_property
    def engine(self) -> Engine:
        """In this process, on the model's own tensors; made when it is first asked for."""
        return make_engine(self.loaded, self.engine_config)

    @cached_property
    def _text(self) -> Detokenizer:
        return Detokenizer(self.loaded.tokenizer)

    @property
    def player(self) -> Player | None:
        """Of samples that take turns with environments."""
        turns = self.inputs.turns
        return None if turns is None else turns.player(self.seed)

    @property
    def train_prompts(self) -> PromptSet:
        return self.inputs.train_prompts

    @property
    def eval_prompts(self) -> PromptSet | None:
        return self.inputs.eval_prompts

    @property
    def reward(self) -> WeightedReward:
        return self.inputs.reward

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text(tokens, skip_special_tokens=True)

    def render(self, tokens: Sequence[int]) -> str:
        """The text with special tokens: what the model saw."""
        return self._text(tokens, skip_special_tokens=False)

    @property
    def mean_prompt_tokens(self) -> int:
        """Mean number of tokens of a training prompt, rounded."""
        rows = self.train_prompts.rows
        return round(sum(len(row.tokens) for row in rows) / len(rows))


def make_engine(loaded: LoadedModel, config: EngineConfig) -> Engine:
    """In this process, on the model's own tensors."""
    from rollpacker.engines.table import ENGINES
    from rollpacker.imports import load_function

    make = load_function(ENGINES[config.name])
    engine: Engine = make(model=loaded.model, tokenizer=loaded.tokenizer, config=config)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a policy is asked and judged by."""

    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    reward: WeightedReward
    turns: Turns | None = None
    """Of samples that take turns with environments."""
    doubts: tuple[str, ...] = ()
    """What may be wrong with the rewards, a sentence each."""

    @property
    def prompt_sets(self) -> dict[str, PromptSet]:
        """By their names in the config."""
        held_out = {} if self.eval_prompts is None else {"eval": self.eval_prompts}
        return {"train": self.train_prompts} | held_out


def load_inputs(
    config: RunConfig,
    *,
    model_path: str | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> Inputs:
    """Prompts and rewards, tried out: all that can fail before the model loads. `tell` is given
    lines for people, `progress` shows how far checks are. Raises `ValueError` and `RewardError`."""
    from rollpacker.data.prompts import load_prompts
    from rollpacker.rewards.build import build_reward

    if config.rewards_hosts is not None:
        from rollpacker.rewards.hosts import refuse_bound

        refuse_bound(config.rewards)
    reward = build_reward(
        config.rewards, sandbox=config.sandbox, engine_completer=_engine_completer
    )
    if progress is not None:
        reward.shared.progress = progress
    of_model = of_tokenizer(config, model_path or config.model.path)
    turns = load_turns(config, of_model)
    with _closed_on_error(turns):
        train_prompts, eval_prompts = load_prompts(
            config.data,
            max_response_tokens=max(
                config.rollout.max_response_tokens, config.eval.max_response_tokens or 0
            ),
            brought=None if turns is None else turns.environments.rows,
            **with_tools(of_model, turns),
        )
        inputs = Inputs(
            train_prompts=train_prompts, eval_prompts=eval_prompts, reward=reward, turns=turns
        )
        if turns is not None:
            check_turns(turns, inputs.prompt_sets, tell or (lambda line: None))
        for prompts in inputs.prompt_sets.values():
            if tell is not None:
                for line in prompts.told:
                    tell(line)
            reward.check([(row.task, row.columns) for row in prompts.rows])
        doubts = reward.try_out(
            [
                as_input(row, config, config.num_steps(len(train_prompts.rows)))
                for row in train_prompts.rows
            ]
        )
    largest = reward.largest()
    if eval_prompts is not None and largest is not None and largest < config.eval.pass_threshold:
        doubts.append(
            f"no response can reach eval.pass_threshold={config.eval.pass_threshold:g}: the weights"
            f" of the rewards add up to {largest:g} at most. Lower the threshold"
        )
    return dataclasses.replace(inputs, doubts=tuple(doubts))


@contextlib.contextmanager
def _closed_on_error(turns: Turns | None) -> Iterator[None]:
    """Processes of environments do not outlive what else is wrong."""
    try:
        yield
    except BaseException:
        if turns is not None:
            turns.close()
        raise


def of_tokenizer(config: RunConfig, path: str) -> dict[str, Any]:
    """How prompts become tokens for this model."""
    from rollpacker.trainer.model import context_tokens, end_tokens, load_tokenizer

    return {
        "tokenizer": load_tokenizer(path),
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "max_context_tokens": context_tokens(path),
        "end_tokens": end_tokens(path),
    }


def as_input(row: PromptRow, config: RunConfig, num_steps: int) -> RewardInput:
    """The row for rewards that are tried out, without a completion."""
    from rollpacker.environments.environment import Episode
    from rollpacker.rewards.reward import Progress, RewardInput

    return RewardInput(
        prompt=row.prompt,
        completion="",
        completion_tokens=(),
        finish_reason="stop",
        columns=row.columns,
        task=row.task,
        messages=row.messages,
        progress=Progress(0, num_steps),
        episode=None if config.environment is None else Episode(messages=()),
    )


def load_policy(
    config: RunConfig,
    *,
    model_path: str | None = None,
    threads: int | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> Policy:
    """Prompts and rewards first, since they fail fast; then the model.

    `model_path` loads other weights (and their tokenizer) than the config's; `threads` overrides;
    `tell` is given lines for people, `progress` shows how far what takes long is.
    """
    from rollpacker.engines.embedded.attention import install_attention, other_layers
    from rollpacker.engines.table import BRING_THEIR_OWN_MODEL
    from rollpacker.run.parts.threads import set_threads
    from rollpacker.trainer.model import load_model

    model_config = config.model
    if model_path is not None:
        # A checkpoint's model is whole: its adapter is merged, and it is not of 4 bits.
        model_config = dataclasses.replace(model_config, path=model_path, quantization=None)
    inputs = load_inputs(config, model_path=model_path, tell=tell, progress=progress)
    for doubt in inputs.doubts:
        logger.warning("%s", doubt)
    loaded = load_model(model_config)
    if config.rollout.engine.name not in BRING_THEIR_OWN_MODEL or not other_layers(loaded.model):
        install_attention(loaded.model)
    threads = set_threads(config, loaded, threads)
    return Policy(
        loaded=loaded,
        inputs=inputs,
        threads=threads,
        seed=config.seed,
        engine_config=config.rollout.engine,
    )


def _engine_completer(model_path: str, *, max_reply_tokens: int, concurrency: int) -> Any:
    """A judge's model on an engine of its own, beside the actor's."""
    from rollpacker.engines.completer import EngineCompleter
    from rollpacker.engines.embedded.attention import install_attention
    from rollpacker.trainer.model import load_model
    from rollpacker.trainer.trainer import ModelConfig

    loaded = load_model(ModelConfig(path=model_path))
    install_attention(loaded.model)
    return EngineCompleter(
        model=loaded.model,
        tokenizer=loaded.tokenizer,
        max_reply_tokens=max_reply_tokens,
        concurrency=concurrency,
    )


def reward_kinds(config: RunConfig, policy: Policy) -> dict[str, RewardKindConfig]:
    """Workers and deadlines of the checks, by source of prompts."""
    kinds = {}
    for task, (workers, deadline) in policy.reward.kinds().items():
        if workers is not None or deadline is not None:
            source = TRAIN if task is None else task
            kinds[source] = RewardKindConfig(workers=workers, deadline=deadline)
    return kinds


def marks(
    config: RunConfig, policy: Policy, reward_hosts: HostedReward | None = None
) -> tuple[str, ...]:
    """What every number of the run must be read with."""
    tail = config.tail_batching
    found = {
        "unsandboxed": policy.reward.shared.unsandboxed
        or (reward_hosts is not None and reward_hosts.unsandboxed),
        "weighted_carrying": tail.carries and tail.carry == "weighted",
    }
    return tuple(mark for mark, holds in found.items() if holds)


def check_algorithm(config: RunConfig) -> None:
    """Try the advantage and the loss that the config names from outside of the package, and look
    for the package that fewer bits need. Raises `ValueError`, one message, for what is wrong."""
    if config.model.quantization is not None or config.train.optimizer == "adamw_8bit":
        from rollpacker.imports import require

        require("bitsandbytes", extra="quantized", what="model.quantization and adamw_8bit")
    algorithm = config.algorithm
    algorithm.reload_own()
    if algorithm.own_advantages is None and algorithm.own_loss is None:
        return
    from rollpacker.algo.own_check import check_own, grouped_advantages

    size = config.rollout.samples_per_prompt
    check_own(algorithm, samples_per_prompt=size)
    own = algorithm.own_advantages
    if own is None or not config.stream_trainer.enabled:
        return
    if not grouped_advantages(algorithm, samples_per_prompt=size):
        raise ValueError(
            f"{own.said_by} compares the groups of a step, which are not all known when a streamed "
            "gradient begins: switch stream_trainer.enabled off, or compare samples of one group"
        )


def start_trainer_processes(config: RunConfig, hosts: Hosts | None = None) -> Ranks | None:
    """Let them load their libraries while this process loads its own. None if there are none."""
    if config.train.processes is None:
        return None
    from rollpacker.trainer.launch import Ranks

    if hosts is None or hosts.plan is None:
        return Ranks(config.train.processes)
    return Ranks(config.train.processes, hosts.of_ranks(), hosts.address)


def build_trainer(
    config: RunConfig, policy: Policy, ranks: Ranks | None, folder: Path | None = None
) -> Trainer:
    """In place, on the engine's own weights; or apart from it: with an adapter, of which the engine
    has a copy, in processes of its own, and where the engines are in processes of theirs. `folder`:
    the run's."""
    from rollpacker.pipeline.stages.check import read_order, with_links_of
    from rollpacker.trainer.model import model_device
    from rollpacker.trainer.process_trainer import ProcessTrainer
    from rollpacker.trainer.setup import LearnerSetup, build_learner
    from rollpacker.trainer.torch_trainer import TorchTrainer

    setup = LearnerSetup(
        model=config.model,
        train=with_links_of(config.train, model_device(config.model.device).type),
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        total_steps=config.train.steps,
        threads=max(policy.threads // (config.train.processes or 1), 1),
        order_csv=read_order(config),
    )
    if config.train.critic.path is not None and not config.algorithm.needs_critic:
        logger.warning(
            "train.critic.path is set and does nothing: algorithm.name=%s trains no critic; "
            "algorithm.name=ppo does",
            config.algorithm.name,
        )
    if config.model.quantization is not None:
        logger.info(
            "the base is kept in 4 bits; a checkpoint's adapter/ goes beside it, and its model/ is "
            "the merged model in %s, made of what the codes stand for",
            str(policy.loaded.dtype).removeprefix("torch."),
        )
    loaded = policy.loaded
    if ranks is None and config.engines_are_apart:
        learner = build_learner(setup, model=loaded.model, tokenizer=loaded.tokenizer)
        return TorchTrainer(learner, in_place=False, shared=True, threads=policy.threads)
    give_adapter(config, loaded.model)
    if ranks is not None:
        named = loaded.model.named_parameters()
        weights = [(n, p) for n, p in named if p.requires_grad]
        return ProcessTrainer(setup, ranks, weights, journal_in=folder)
    in_place = config.model.lora is None
    learner = (
        build_learner(setup, model=loaded.model, tokenizer=loaded.tokenizer)
        if in_place
        else build_learner(setup)
    )
    return TorchTrainer(learner, in_place=in_place, threads=policy.threads)


def give_adapter(config: RunConfig, model: PreTrainedModel) -> None:
    """Let the model that an engine of this process decodes with have the adapter that the config
    asks for, unless it has it: before the engine is made, which may want to know."""
    from rollpacker.trainer.lora import add_adapter, has_adapter

    if config.model.lora is not None and not has_adapter(model):
        add_adapter(model, config.model.lora)


def build_samples_function(config: RunConfig) -> Any:
    from rollpacker.trainer.samples import build_train_samples

    return partial(
        build_train_samples,
        config=config.algorithm,
        max_response_tokens=config.rollout.max_response_tokens,
    )


def build_cursor(config: RunConfig, policy: Policy, checkpoint: Checkpoint | None) -> Any:
    from rollpacker.data.cursor import PromptCursor

    rows = policy.train_prompts.rows
    cursor = PromptCursor(
        TRAIN,
        len(rows),
        config.seed,
        config.data.shuffle,
        config.train.epochs,
        sources=[row.task or TRAIN for row in rows] if config.routed else None,
    )
    if checkpoint is not None:
        cursor.restore(checkpoint.state["cursor"])
    return cursor


def build_carried(
    config: RunConfig, checkpoint: Checkpoint | None, job: Job, tokenizer: str
) -> CarriedTokens:
    """What deferred prompts had generated when the checkpoint was written. Without carrying it is
    let go."""
    from rollpacker.run.carried import CarriedTokens, read_carried

    tail = config.tail
    if checkpoint is None or not tail.carries:
        return CarriedTokens(tail)
    waiting = [*job.queues.long, *(one for tier in job.queues.tiers for one in tier)]
    expected = {one.prompt: [carried.tokens for carried in one.carried] for one in waiting}
    kept = read_carried(checkpoint.folder, tokenizer, expected)
    return CarriedTokens(tail, kept, cut_off_at=job.queues.cut_off_at)


def build_trackers(config: RunConfig) -> list[Callback]:
    """Who shows the run elsewhere. Each is told of a step when its row of `metrics.jsonl` is
    written."""
    from rollpacker.trackers.by_name import make_tracker

    return [make_tracker(tracker) for tracker in config.tracker_configs]
