"""The TRL side of vs_trl.py: `GRPOTrainer` on a RollPacker config's model, prompts and rewards."""

from __future__ import annotations

import asyncio
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from step_times import StepTime

from rollpacker.config.schema import RunConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.rewards.reward import Reward, RewardInput, Scored


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrlSetting:
    """A way to use TRL. `samples_per_pass` None: the whole step in one forward and backward."""

    name: str
    samples_per_pass: int | None
    options: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] | None = None
    """Arguments of `rollpacker.integrations.trl.rollout_function`; None: TRL alone."""


def continuous_batching(samples: int, num_blocks: int) -> dict[str, Any]:
    """Transformers' paged generation with its pages and batch sized for the workload.

    As they come, its sizes follow the machine's memory; on a CPU that was several times slower.
    """
    return {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {
            "page_size": 32,
            "num_blocks": num_blocks,
            "max_batch_tokens": samples,
        },
    }


def trl_steps(config: RunConfig, num_steps: int, setting: TrlSetting) -> list[StepTime]:
    """The steps of `trl_run`."""
    return trl_run(config, num_steps, setting).steps


def trl_run(config: RunConfig, num_steps: int, setting: TrlSetting) -> Clock:
    """Train `num_steps` steps from the config's start weights, on its rows in their order."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rollpacker.data.prompts import load_prompts
    from rollpacker.rewards.build import build_reward

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    path = config.model.path
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompts, _ = load_prompts(config.data, tokenizer)
    rows = prompts.rows[: num_steps * config.rollout.prompts_per_step]
    assert all(tuple(tokenizer(row.prompt)["input_ids"]) == row.tokens for row in rows)
    clock = Clock()
    reward = _reward_function(build_reward(config.rewards), rows, tokenizer.eos_token_id, clock)
    data = Dataset.from_list(
        [{"prompt": row.prompt, "row": number} for number, row in enumerate(rows)]
    )
    parts: dict[str, Any] = {"train_dataset": data, "callbacks": [_callback(clock)]}
    if setting.rollout is not None:
        parts = _with_rollpacker(data, setting.rollout, parts["callbacks"], clock)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=GRPOConfig(output_dir=folder, **_arguments(config, num_steps, setting)),
            processing_class=tokenizer,
            **parts,
        )
        if setting.rollout is None:
            trainer._generate = clock.timed(trainer._generate)
        trainer.train()
    return clock


def _with_rollpacker(
    data: Any, keys: Mapping[str, Any], callbacks: Sequence[Any], clock: Clock
) -> dict[str, Any]:
    """The three lines. What is timed is the step's generation, wherever it happens."""
    from rollpacker.integrations.trl import rollout_function

    rollout = rollout_function(data, **keys)
    rollout.dataset._decide = clock.timed(rollout.dataset._decide)
    return {
        "train_dataset": rollout.dataset,
        "rollout_func": rollout,
        "callbacks": [*callbacks, rollout],
    }


def _arguments(config: RunConfig, num_steps: int, setting: TrlSetting) -> dict[str, Any]:
    rollout, train = config.rollout, config.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    per_pass = setting.samples_per_pass or samples
    return {
        **{"use_cpu": True, "bf16": False, "seed": config.seed, "max_steps": num_steps},
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": samples // per_pass,
        "num_generations": rollout.samples_per_prompt,
        "max_completion_length": rollout.max_response_tokens,
        **{name: getattr(rollout, name) for name in ("temperature", "top_p", "top_k")},
        **{"beta": 0.0, "learning_rate": train.learning_rate, "lr_scheduler_type": "constant"},
        **{"adam_beta1": train.betas[0], "adam_beta2": train.betas[1]},
        **{"weight_decay": train.weight_decay, "max_grad_norm": train.max_grad_norm or 0.0},
        **{"shuffle_dataset": False, "gradient_checkpointing": False},
        **{f"{what}_strategy": "no" for what in ("eval", "save", "logging")},
        **{"report_to": "none", "disable_tqdm": True},
        **setting.options,
    }


class Clock:
    """Collects a run's steps from the trainer's calls."""

    def __init__(self) -> None:
        self.steps: list[StepTime] = []
        self.rewards: list[float] = []
        """Mean of each step's verdicts."""
        self._began_s = 0.0
        self._generation_s = 0.0
        self._lengths: tuple[int, ...] = ()
        self._computed_per_real = 1.0

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def timed(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            result = generate(*arguments, **options)
            self._generation_s = time.perf_counter() - began_s
            return result

        return call

    def saw(self, prompts: Sequence[int], responses: Sequence[int]) -> None:
        """Lengths of the step's prompts and responses. TRL pads all to the longest of each."""
        self._lengths = tuple(responses)
        padded = len(responses) * (max(prompts) + max(responses))
        self._computed_per_real = padded / (sum(prompts) + sum(responses))

    def end_step(self) -> None:
        now = time.perf_counter()
        self.steps.append(
            StepTime(
                now - self._began_s, self._generation_s, self._lengths, self._computed_per_real
            )
        )
        self._began_s = now


def _callback(clock: Clock) -> Any:
    from transformers import TrainerCallback

    class Ticks(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.end_step()

    return Ticks()


def _reward_function(
    reward: Reward, rows: Sequence[PromptRow], eos: int, clock: Clock
) -> Callable[..., list[float | None]]:
    """RollPacker's reward in TRL's shape: the same scorer judges both sides."""
    loop = asyncio.new_event_loop()  # one for all calls: its workers stay

    def score(
        completions: list[str], completion_ids: list[list[int]], row: list[int], **_: Any
    ) -> list[float | None]:
        clock.saw([len(rows[n].tokens) for n in row], [len(ids) for ids in completion_ids])
        inputs = [
            RewardInput(
                prompt=rows[number].prompt,
                completion=text,
                completion_tokens=tuple(ids),
                finish_reason="stop" if ids[-1] == eos else "length",
                columns=rows[number].columns,
            )
            for number, text, ids in zip(row, completions, completion_ids, strict=True)
        ]
        verdicts = loop.run_until_complete(reward.score(inputs))
        values = [v.value if isinstance(v, Scored) else None for v in verdicts]
        clock.rewards.append(statistics.fmean(value for value in values if value is not None))
        return values

    return score
