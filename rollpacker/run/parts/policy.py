"""Builds the policy: the model, its prompts, and the rewards and environments that judge
responses."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rollpacker.chat_template import Detokenizer
from rollpacker.config.schema import RunConfig
from rollpacker.run.parts.environments import TurnParts, check_turns, load_turns, with_tools

if TYPE_CHECKING:
    from rollpacker.data.dataset import PromptSet
    from rollpacker.engines.engine import Engine, EngineConfig
    from rollpacker.rewards.shared import Progress
    from rollpacker.rewards.weighted import WeightedReward
    from rollpacker.run.parts.hosts import Hosts
    from rollpacker.run.ports.player import Player
    from rollpacker.trainer.model import LoadedModel

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A loaded model for generation and training, with its prompts, rewards and environments."""

    loaded: LoadedModel
    inputs: Inputs
    threads: int
    seed: int
    engine_config: EngineConfig

    @cached_property
    def engine(self) -> Engine:
        """The engine in this process, on the model's own tensors; made at first use."""
        return engine_in_process(self.loaded, self.engine_config)

    @cached_property
    def _text(self) -> Detokenizer:
        return Detokenizer(self.loaded.tokenizer)

    @property
    def player(self) -> Player | None:
        """A new player, which plays samples of several turns with environments. None without
        environments."""
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
        """Returns the text of these tokens, special tokens included, as the model saw it."""
        return self._text(tokens, skip_special_tokens=False)

    @property
    def mean_prompt_tokens(self) -> int:
        """Mean number of tokens in a training prompt, rounded to a whole number."""
        rows = self.train_prompts.rows
        return round(sum(len(row.tokens) for row in rows) / len(rows))


def engine_in_process(
    loaded: LoadedModel, config: EngineConfig, *, sleeps: bool = False, **own: Any
) -> Engine:
    """Returns the engine that `config` names, in this process and on the model's own tensors.
    `sleeps`: whether the engine has to release its device at times. `own`: further arguments that
    this kind of engine takes."""
    from rollpacker.engines.table import ENGINES, TOLD_TO_SLEEP
    from rollpacker.imports import load_function

    make: Any = load_function(ENGINES[config.name])
    if sleeps and config.name in TOLD_TO_SLEEP:
        own["sleeps"] = True
    engine: Engine = make(model=loaded.model, tokenizer=loaded.tokenizer, config=config, **own)
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The prompts of a run, and the rewards and environments that judge its responses."""

    train_prompts: PromptSet
    eval_prompts: PromptSet | None
    reward: WeightedReward
    turns: TurnParts | None = None
    """The environments and what belongs to them. None if each sample is a single response."""
    doubts: tuple[str, ...] = ()
    """Warnings about the rewards, each a sentence; empty if nothing looks wrong."""

    @property
    def prompt_sets(self) -> dict[str, PromptSet]:
        """The sets of prompts by name: `train`, and `eval` if there are held-out prompts."""
        held_out = {} if self.eval_prompts is None else {"eval": self.eval_prompts}
        return {"train": self.train_prompts} | held_out


def load_inputs(
    config: RunConfig,
    *,
    model_path: str | None = None,
    hosts: Hosts | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> Inputs:
    """Load prompts and rewards, and try the rewards out, before the model is loaded. `hosts`: as in
    `load_reward`. `tell` is given lines to show, `progress` how far the rewards' checks are. Raises
    `ValueError` and `RewardError`."""
    from rollpacker.data.prompts import load_prompts
    from rollpacker.run.parts.rewards import as_input, load_reward

    reward = load_reward(config, hosts)
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
def _closed_on_error(turns: TurnParts | None) -> Iterator[None]:
    """A context that closes the environments' processes if an error is raised in it."""
    try:
        yield
    except BaseException:
        if turns is not None:
            turns.close()
        raise


def of_tokenizer(config: RunConfig, path: str) -> dict[str, Any]:
    """Returns the tokenizer, its chat template's arguments, the context length and the end tokens,
    by name. `path`: the model's folder, or its name on the hub."""
    from rollpacker.trainer.model import context_tokens, end_tokens, load_tokenizer

    return {
        "tokenizer": load_tokenizer(path),
        "chat_template_kwargs": config.model.chat_template_kwargs,
        "max_context_tokens": context_tokens(path),
        "end_tokens": end_tokens(path),
    }


def load_policy(
    config: RunConfig,
    *,
    model_path: str | None = None,
    hosts: Hosts | None = None,
    threads: int | None = None,
    tell: Tell | None = None,
    progress: Progress | None = None,
) -> LoadedPolicy:
    """Load prompts and rewards, which fail fast, then the model. `model_path`: other weights and
    tokenizer than the config's. `hosts`: as in `load_reward`. `threads` replaces `train.threads`,
    unless None. `tell` is given lines to show, `progress` shows how far long work is. If engines
    and trainer have processes of their own, the model has names and shapes alone, without
    memory."""
    from rollpacker.engines.embedded.attention import install_attention, other_layers
    from rollpacker.engines.table import BRING_THEIR_OWN_MODEL
    from rollpacker.trainer.model import load_model

    model_config = config.model
    if model_path is not None:
        # A checkpoint's model is whole: its adapter is merged, and it is not of 4 bits.
        model_config = dataclasses.replace(model_config, path=model_path, quantization=None)
    inputs = load_inputs(config, model_path=model_path, hosts=hosts, tell=tell, progress=progress)
    for doubt in inputs.doubts:
        logger.warning("%s", doubt)
    computes = model_path is not None or config.run_computes
    loaded = load_model(model_config, without_weights=not computes)
    if computes and not (
        config.rollout.engine.name in BRING_THEIR_OWN_MODEL and other_layers(loaded.model)
    ):
        install_attention(loaded.model)
    threads = set_threads(config, loaded, threads)
    return LoadedPolicy(
        loaded=loaded,
        inputs=inputs,
        threads=threads,
        seed=config.seed,
        engine_config=config.engine,
    )


def set_threads(config: RunConfig, loaded: LoadedModel, threads: int | None) -> int:
    """Set how many threads torch computes with in this process, and return the number: `threads`,
    or if that is None `train.threads`, which may ask for a measurement."""
    import torch

    wanted = threads if threads is not None else config.train.threads
    if wanted == "auto":
        wanted = _measured_threads(config, loaded)
    torch.set_num_threads(wanted)
    return wanted


def _measured_threads(config: RunConfig, loaded: LoadedModel) -> int:
    import torch

    if loaded.model.device.type != "cpu":  # a GPU, or no weights to measure with
        return torch.get_num_threads()
    rows = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    tokens = torch.zeros((min(rows, 64), 16), dtype=torch.long)

    def step() -> None:
        with torch.inference_mode():
            loaded.model(tokens, use_cache=False)

    threads = measure_threads(step)
    logger.info("%d torch threads (measured; set train.threads to choose)", threads)
    return threads


ROUNDS = 5
MARGIN = 0.9
"""A larger number of threads is chosen only if its time is less than this fraction of a smaller
number's, as more threads suffer more on a busy machine."""


def measure_threads(step: Callable[[], None], candidates: Sequence[int] | None = None) -> int:
    """Returns the number of torch threads with which `step` runs fastest; of nearly equal ones the
    smallest. `candidates`: numbers to try; None: 1, 2, 4 ... and the number of cores. Runs `step`
    six times for each, in turns, and compares the fastest runs. The number in use stays as it
    was."""
    import torch

    if candidates is None:
        num_cores = os.cpu_count() or 1
        candidates = [*(1 << power for power in range((num_cores - 1).bit_length())), num_cores]
    if not candidates or min(candidates) < 1:
        raise ValueError("candidates must be thread counts of at least 1")
    before = torch.get_num_threads()
    best_s = dict.fromkeys(sorted(candidates), float("inf"))
    try:
        for round_number in range(ROUNDS + 1):
            for count in best_s:
                torch.set_num_threads(count)
                start = time.perf_counter()
                step()
                if round_number:
                    best_s[count] = min(best_s[count], time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    chosen = min(best_s)
    for count, seconds in best_s.items():
        if seconds < MARGIN * best_s[chosen]:
            chosen = count
    return chosen
