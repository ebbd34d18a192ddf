"""The one object that a user of TRL needs: data set, rollout function and callback in one."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from packaging.version import Version
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rollpacker.config.load import config_of, to_plain
from rollpacker.core.ids import PromptId, SampleId
from rollpacker.core.job.config import JobConfig
from rollpacker.core.rounds.tail_batching import TailBatchingConfig
from rollpacker.data.dataset import PromptRow
from rollpacker.engines.engine import EngineConfig, GenerationRequest, Response, SamplingParams
from rollpacker.engines.ranks import Ranks
from rollpacker.engines.vllm.lent import LentVllm
from rollpacker.integrations.trl import vllm
from rollpacker.integrations.trl.cursor import SamplerCursor
from rollpacker.integrations.trl.late_rows import LateDataset, Row
from rollpacker.integrations.trl.policy import LentModel, close, prompt_tokens
from rollpacker.integrations.trl.rollouts import EngineHost, Rollouts, collect
from rollpacker.scheduler import has_state

NAME = "rollpacker.integrations.trl"
ALL_THREE = (
    "GRPOTrainer(..., train_dataset=rollout.dataset, rollout_func=rollout, callbacks=[rollout])"
)


def rollout_function(
    dataset: Dataset,
    *,
    generation_s: float = 600.0,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    **tail_batching: Any,
) -> RolloutFunction:
    """Tail batching for TRL's `GRPOTrainer`, on RollPacker's engine and the trainer's own weights.

        rollout = rollout_function(dataset)
        GRPOTrainer(..., train_dataset=rollout.dataset, rollout_func=rollout, callbacks=[rollout])

    `dataset` is what `train_dataset` would be. `tail_batching` are the keys of `tail_batching.*`,
    such as `prompt_factor=1.5` or `enabled=False`; `engine` those of `rollout.engine.*`. A
    generation that shows no sign of life for `generation_s` seconds ends the training, and the
    message names what it waited for.

    Raises `ValueError` for what cannot be combined with TRL.
    """
    known = TailBatchingConfig.__dataclass_fields__
    unknown = sorted(tail_batching.keys() - known.keys())
    if unknown:
        raise ValueError(
            f"rollout_function has no {unknown[0]}. It takes generation_s, engine and the keys of "
            f"tail_batching: {', '.join(known)}"
        )
    if engine is None or isinstance(engine, EngineConfig):
        config = engine or EngineConfig()
    elif isinstance(engine, Mapping):
        config = config_of(dict(engine), (), EngineConfig, where="engine of rollout_function")
    else:
        raise ValueError(
            f"engine of rollout_function is a dict with the keys of rollout.engine, not"
            f" {type(engine).__name__}"
        )
    batching = config_of(to_plain(tail_batching), (), TailBatchingConfig, where="rollout_function")
    return RolloutFunction(dataset, batching, config, generation_s)


class RolloutFunction(TrainerCallback):
    """Tail batching for a TRL trainer. It must be given three times:
    `train_dataset=rollout.dataset`, `rollout_func=rollout`, `callbacks=[rollout]`."""

    def __init__(
        self,
        dataset: Dataset,
        tail_batching: TailBatchingConfig,
        engine: EngineConfig,
        generation_s: float,
    ) -> None:
        """Raises `ValueError` if arguments (`rollout_function`) do not go with TRL."""
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"rollout_function takes a datasets.Dataset, not a {type(dataset).__name__}: rows "
                "are taken up out of order, so load the data without streaming"
            )
        _check_tail_batching(tail_batching)
        self.dataset = LateDataset.of(dataset, self._decide)
        """The trainer's data set. A step's rows are chosen when TRL first reads one."""
        self._rows = dataset
        self._tail_batching = tail_batching
        self._engine_config = engine
        self._generation_s = generation_s
        self._engine: Any = None
        """What generates in this process: an engine, or TRL's server."""
        self._lent: LentModel | None = None
        """The model that the engine works on; None: vLLM has its own."""
        self.trainer: Any = None
        """The trainer. With `use_vllm`, to be set before the training begins."""
        self._rollouts: Rollouts | None = None
        self._ranks: Ranks | None = None
        """What the training's processes say to each other. None: there is only one."""
        self._step: list[Response] = []
        """The responses that the present step trains on, in this process."""
        self._drawn: list[Row] = []
        """A copy of the prompt's row for each of them."""
        self._asked = False
        """Whether the trainer has asked for responses."""
        self._num_evaluations = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutFunction:
        """Return the object itself: a training has only one, but data sets are copied when a column
        is renamed."""
        return self

    # -- what the trainer calls --------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Begin this training's rollouts. Raises `ValueError` for settings that cannot be used."""
        _check_arguments(args, self._rows)
        if not args.use_vllm:
            self.trainer = None  # of an earlier training
        elif self.trainer is None or self.trainer.args is not args:
            raise ValueError("with use_vllm, set rollout.trainer = trainer before trainer.train()")
        self._asked, self._rollouts, self._ranks = False, None, None  # of an earlier training
        tokenizer = parts["processing_class"]
        per_step = args.generation_batch_size // args.num_generations
        if len(self._rows) < per_step:
            raise ValueError(f"a step has {per_step} prompts, and the data {len(self._rows)}")
        prompts = Prompts(self._rows, tokenizer, args.chat_template_kwargs or {})
        _check_context(args, parts["model"], prompts)
        carry = "none" if args.use_vllm else self._tail_batching.carry
        config = JobConfig(
            prompts_per_step=per_step,
            samples_per_prompt=args.num_generations,
            max_steps=None,  # the cursor ends where the steps do
            max_response_tokens=args.max_completion_length,
            tail_batching=replace(self._tail_batching, carry=carry),
            min_verdicts=1,
        )
        cursor = SamplerCursor(
            len(self._rows),
            prompts_per_step=per_step,
            num_steps=num_generations(args, state.max_steps, len(self._rows) // per_step),
            shuffle=args.shuffle_dataset,
            seed=args.seed,
        )
        resume = _checkpoint(args, state.global_step) if state.global_step else None
        if resume is not None and not has_state(resume):
            batches = len(self._rows) // per_step
            cursor.skip(per_step * num_generations(args, state.global_step, batches))
        engine = self._ready(parts["model"], tokenizer, prompts)
        is_server = args.use_vllm and args.vllm_mode == "server"
        if args.world_size > 1:
            self._ranks = Ranks(
                None if is_server else engine,
                lambda sample: prompts[sample.prompt.row].tokens,
                args.ddp_timeout,
            )
        if args.process_index == 0:
            host = EngineHost(self._ranks or engine, prompts, _sampling(args))
            self._rollouts = Rollouts(
                config,
                host=engine if is_server else host,
                cursor=cursor,
                seed=args.seed,
                generation_s=self._generation_s,
                resume=resume,
            )

    def _decide(self) -> list[Row]:
        """Generate the responses of the next step, and return each one's row of the data."""
        if self._rollouts is None and self._ranks is None:
            raise ValueError(f"rollout_function is no callback of this trainer: {ALL_THREE}")
        with self._generating():
            self._step = self._next_step()
        self._drawn = [dict(self._rows[one.sample.prompt.row]) for one in self._step]
        return self._drawn

    def _next_step(self) -> list[Response]:
        """Generate the responses of the next step, and return those that this process trains on."""
        ranks = self._ranks
        if self._rollouts is None:
            assert ranks is not None, "rank 0 has the rollouts"
            return ranks.follow()
        if ranks is None:
            return self._rollouts.next_step()
        try:
            return ranks.turn(self._rollouts.next_step(ranks.turn))
        except BaseException as error:
            ranks.end(error)
            raise

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return the responses to these prompts, and the log-probability of each token. TRL calls
        this as its `rollout_func`."""
        self.trainer, self._asked = trainer, True
        if trainer.tools:
            raise ValueError(f"{NAME} does not go with tools or environment_factory")
        if not trainer.model.training:
            kwargs = trainer.args.chat_template_kwargs or {}
            encoded = prompt_tokens(prompts, trainer.processing_class, kwargs)
            if trainer.args.use_vllm:
                return vllm.evaluate(trainer, encoded)
            responses = self._evaluate(encoded, trainer)
        else:
            if [row["prompt"] for row in self._drawn] != prompts:
                raise ValueError(f"TRL asks for prompts of other data: {ALL_THREE}")
            responses = self._step
        return {
            "prompt_ids": [list(response.prompt_tokens) for response in responses],
            "completion_ids": [list(response.tokens) for response in responses],
            "logprobs": [list(response.log_probs) for response in responses],
        }

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Note that the weights were updated, once all of a generation's updates are done. Raises
        `ValueError` if TRL generates responses by itself, without asking this object."""
        if not self._asked:
            self._close()
            raise ValueError(
                f"this trainer has not asked rollout_function for the first step: {ALL_THREE}"
            )
        every = args.steps_per_generation * args.num_iterations
        if self._rollouts is None or self.trainer._step % every:
            return
        for name, value in self._rollouts.scheduler.trained().items():
            self.trainer._metrics["train"][f"rollpacker/{name}"].append(value)

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Save the state of the rollouts, with the prompts that were put off to a later step,
        beside TRL's checkpoint."""
        if self._rollouts is not None and state.is_world_process_zero:
            self._rollouts.save(_checkpoint(args, state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Print where the training's seconds went, and close the engine."""
        if self._rollouts is not None and state.is_world_process_zero:
            print(self.report())
        self._close()

    # -- what a user may ask -----------------------------------------------------------------

    def report(self) -> str:
        """Return a line of text with the seconds of the training by cause."""
        assert self._rollouts is not None, "there was no training"
        return self._rollouts.scheduler.report()

    # -- the engine --------------------------------------------------------------------------

    def _ready(self, model: Any, tokenizer: Any, prompts: Sequence[PromptRow] = ()) -> Any:
        """Return what generates in this process, and make it if this trainer has none yet. Raises
        `ValueError` if it cannot be used."""
        if self._lent is not None and self._lent.is_of(model):
            return self._engine
        self._close()  # another trainer's
        if self.trainer is None or not self.trainer.args.use_vllm:
            self._lent = LentModel(model, tokenizer, self._engine_config)
            self._engine = self._lent.engine
        elif self.trainer.vllm_mode == "colocate":
            llm, args = self.trainer.vllm_generation.llm, self.trainer.args
            self._engine = LentVllm(llm, self.trainer.model, vllm.sampling(args))
        elif self.trainer.args.process_index == 0:
            self._engine = vllm.TrlServer(self.trainer, prompts)
        return self._engine

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """A context in which the engine generates with the present weights. Any error closes it, so
        that nothing runs beside the trainer after an interruption or a passed deadline."""
        try:
            if self._lent is None:
                vllm.sync(self.trainer)
            with nullcontext() if self._lent is None else self._lent.lent():
                yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._engine is not None:
            close(self._engine)
        self._lent = self._engine = None

    def _evaluate(self, encoded: list[tuple[int, ...]], trainer: Any) -> list[Response]:
        """The responses to the prompts of an evaluation, without tail batching, since an evaluation
        needs all of its prompts."""
        engine = self._ready(trainer.model, trainer.processing_class)
        self._num_evaluations += 1
        sampling = _sampling(trainer.args)
        requests = [
            GenerationRequest(
                sample=SampleId(PromptId("eval", self._num_evaluations, place), place, 0),
                prompt_tokens=tokens,
                sampling=sampling,
            )
            for place, tokens in enumerate(encoded, len(encoded) * trainer.args.process_index)
        ]
        with self._generating():
            return collect(engine, requests, self._generation_s)


class Prompts(Sequence[PromptRow]):
    """The data set's prompts, tokenized when they are first used."""

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: dict[str, Any],
    ) -> None:
        self._rows = rows
        self._tokens = functools.cache(self._tokenize)
        self._tokenizer = tokenizer
        self._chat_template_kwargs = chat_template_kwargs

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: Any) -> Any:
        return self._tokens(row)

    def _tokenize(self, row: int) -> PromptRow:
        prompt = self._rows[row]["prompt"]
        (tokens,) = prompt_tokens([prompt], self._tokenizer, self._chat_template_kwargs)
        return PromptRow(prompt=prompt, tokens=tokens, columns={})


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def num_generations(args: Any, max_steps: int, batches_per_epoch: int) -> int:
    """Number of times that TRL asks for responses in `max_steps` optimizer steps. An epoch has
    `batches_per_epoch` of these requests; what is left at its end makes a smaller optimizer
    step."""
    every: int = args.steps_per_generation * args.num_iterations
    accumulated: int = args.gradient_accumulation_steps
    micro_steps = batches_per_epoch * every
    epochs, steps = divmod(max_steps, math.ceil(micro_steps / accumulated))
    rest = min(steps * accumulated, micro_steps)
    return epochs * batches_per_epoch + math.ceil(rest / every)


def _sampling(args: Any) -> SamplingParams:
    return SamplingParams(
        max_response_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        seed=args.seed,
    )


def _check_tail_batching(config: TailBatchingConfig) -> None:
    """Raise `ValueError` for settings of tail batching that need the trainer or the rewards
    to do what TRL's do not."""
    if config.carries and config.carry == "weighted":
        raise ValueError("carry=weighted needs token weights in the loss: not with TRL; use exact")
    if config.debias != "none":
        raise ValueError("debias needs sample weights in the loss, which TRL has not: leave it out")
    if config.race == "scored":
        raise ValueError("race=scored needs verdicts while others generate: not with TRL")


def _check_context(args: Any, model: Any, prompts: Prompts) -> None:
    """Raise `ValueError` if the first prompt with the longest response allowed does not fit
    into the model's context."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    num_prompt = len(prompts[0].tokens)
    if context is not None and num_prompt + args.max_completion_length > context:
        raise ValueError(
            f"max_completion_length={args.max_completion_length} and the first prompt's"
            f" {num_prompt} tokens do not fit the model's context of {context}: lower"
            " max_completion_length, or drop long prompts"
        )


def _check_arguments(args: Any, rows: Dataset) -> None:
    """Raise `ValueError` for TRL's settings that the engine's responses would not follow."""
    in_process = args.use_vllm and args.vllm_mode == "colocate"
    refused = {
        "deepspeed or fsdp": bool(args.deepspeed or args.fsdp),
        "use_vllm before TRL 1.16": args.use_vllm and Version(version("trl")) < Version("1.16"),
        "vllm_enable_sleep_mode": in_process and args.vllm_enable_sleep_mode,
        "vllm_tensor_parallel_size": in_process and args.vllm_tensor_parallel_size > 1,
        "vllm_structured_outputs_regex": bool(args.vllm_structured_outputs_regex),
        "dispatch_batches": bool(args.accelerator_config.dispatch_batches),
        "dataloader_num_workers": args.dataloader_num_workers > 0,
        "remove_unused_columns=True": args.remove_unused_columns,
        "repetition_penalty without vLLM": not args.use_vllm and args.repetition_penalty != 1.0,
        "min_p without vLLM": not args.use_vllm and args.min_p is not None,
        "generation_kwargs without vLLM": not args.use_vllm and bool(args.generation_kwargs),
        "images": bool({"image", "images"} & set(rows.column_names)),
    }
    for what in (name for name, is_set in refused.items() if is_set):
        raise ValueError(f"{NAME} does not go with {what}")
