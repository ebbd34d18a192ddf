"""The built-in reward `reward_model`: a sequence classification model scores prompt and completion.

Runs in a worker process of its own. Only safetensors are loaded, and no code from the model's
folder is run.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from rollpacker.chat_template import SpecialTokens
from rollpacker.rewards.reward import RewardError
from rollpacker.warn_once import WarnOnce

logger = logging.getLogger(__name__)

MAX_TOKENS = 4096
"""Most tokens of prompt and completion if neither the config nor the model has a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig:
    """The reward `reward_model`'s `arguments`. Raises `ValueError` for a wrong value."""

    WORKERS: ClassVar[int] = 1
    """Number of workers if the config sets none. Each worker holds a copy of the model."""

    model_path: str
    """A Hugging Face folder with the model. Chat prompts go through its chat template, with the
    completion as the assistant's message; a text prompt is followed by the completion as it is."""
    max_tokens: int | None = None
    """Most tokens of prompt and completion together. Longer ones lose their beginning, since the
    score is read at the end. None: the model's own limit, which also bounds other values."""
    batch_size: int = 8
    """Most completions (with their prompts) in one forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that the model runs on. auto: CUDA if there is a device, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The model's number format. auto: bfloat16 on CUDA, else float32. In float32 a score does not
    depend on the rest of the batch, but for rounding (relative error below 1e-5); bfloat16 rounds
    to about 1e-2."""
    normalize: Literal["none", "sigmoid"] = "none"
    """The value is `(output - mean) / std` of the model's output with "none", and the sigmoid of
    that, from 0 to 1, with "sigmoid"."""
    mean: float = 0.0
    std: float = 1.0
    threads: int = 1
    """Number of torch threads on a CPU."""

    def __post_init__(self) -> None:
        least = min(
            self.batch_size, self.threads, 1 if self.max_tokens is None else self.max_tokens
        )
        if least < 1:
            raise ValueError("max_tokens, batch_size and threads must be at least 1.")
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise ValueError(f"mean and std must be numbers, std > 0, not {self.mean, self.std}.")
        for name, allowed in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("normalize", ("none", "sigmoid")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}."
                )


def make(**arguments: Any) -> RewardModel:
    """Make the reward from its `arguments`. Called in the worker process."""
    return RewardModel(RewardModelConfig(**arguments))


class RewardModel:
    """Scores completions with a model that has one output (`num_labels=1`). The model is loaded
    when this object is made; `RewardError` if it cannot be."""

    __name__ = "reward_model"

    def __init__(self, config: RewardModelConfig) -> None:
        self._config = config
        self._path = checked_folder(config.model_path)
        self._warn_once = WarnOnce(logger)
        self._load(config.device, config.dtype, config.threads)
        own = self._own_limit()
        self._max_tokens = min(config.max_tokens or own, own)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[float]:
        """Return one value per completion, in order. NaN: the model's output is not a number."""
        tokens = [self._tokens(*pair) for pair in zip(prompts, completions, strict=True)]
        order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
        values = [math.nan] * len(tokens)
        size = self._config.batch_size if self._pad is not None else 1
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            outputs = self._outputs([tokens[index] for index in batch])
            for index, output in zip(batch, outputs, strict=True):
                values[index] = self._value(output)
        return values

    # -- the model ---------------------------------------------------------------------

    def _load(self, device: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._device = _device(device)
        if self._device.type == "cpu":
            torch.set_num_threads(threads)
        number = dtype
        if dtype == "auto":
            number = "bfloat16" if self._device.type == "cuda" else "float32"
        try:
            with _quiet():
                self._tokenizer = AutoTokenizer.from_pretrained(
                    self._path, trust_remote_code=False, local_files_only=True
                )
                model, info = AutoModelForSequenceClassification.from_pretrained(
                    self._path,
                    dtype=getattr(torch, number),
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # so that the message below can name one
                )
        except Exception as error:  # whatever transformers and safetensors raise on a bad folder
            said = str(error).strip().split("\n")[0]
            raise RewardError(
                f"reward_model: cannot load {self._path}: {type(error).__name__}: {said}"
            ) from error
        wrong = [*sorted(info["missing_keys"]), *(key[0] for key in info["mismatched_keys"])]
        if wrong:
            raise RewardError(
                f"reward_model: {self._path} has no weights for {wrong[0]}. It must be a reward"
                " model (a sequence classification model with one output), not a language model."
            )
        self._special = SpecialTokens(self._tokenizer)
        self._model = model.to(self._device).eval()
        self._pad = self._model.config.get_text_config().pad_token_id

    def _own_limit(self) -> int:
        config = self._model.config.get_text_config()
        limits = [
            getattr(config, "max_position_embeddings", None),
            self._tokenizer.model_max_length,
        ]
        sound = [limit for limit in limits if isinstance(limit, int) and 0 < limit < 10**9]
        return min(sound, default=MAX_TOKENS)

    def _outputs(self, batch: list[list[int]]) -> list[float]:
        """The model's output for each text (list of tokens), padded on the right and masked."""
        import torch

        width = max(map(len, batch))
        pad = 0 if self._pad is None else self._pad
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in batch])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids.to(self._device), attention_mask=mask.to(self._device)
            ).logits
        outputs: list[float] = logits.float().reshape(len(batch)).tolist()
        return outputs

    # -- texts and values --------------------------------------------------------------

    def _tokens(self, prompt: Any, completion: Any) -> list[int]:
        answer = completion if isinstance(completion, str) else str(completion[-1]["content"])
        answer = self._special.spelt_out(answer)  # it must not end its own turn
        if isinstance(prompt, str):
            text, special = prompt + answer, True
        else:
            if not getattr(self._tokenizer, "chat_template", None):
                raise RewardError(
                    f"reward_model: the prompts are chat messages, but {self._path} has no chat"
                    " template."
                )
            messages = [*prompt, {"role": "assistant", "content": answer}]
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
            special = False
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return self._cut(list(ids))

    def _cut(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError("prompt and completion have no tokens")
        if len(ids) > self._max_tokens:
            self._warn_once(
                "reward_model: a text of %d tokens loses its beginning (max_tokens=%d)",
                len(ids),
                self._max_tokens,
            )
        return ids[-self._max_tokens :]

    def _value(self, output: float) -> float:
        value = (output - self._config.mean) / self._config.std
        if self._config.normalize == "none" or math.isnan(value):
            return value
        return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def checked_folder(path: str) -> str:
    """The path of a model folder that can be loaded without running its code. Raises `RewardError`
    for any other folder."""
    folder = Path(path).expanduser()
    config = _json(folder / "config.json", path)
    if "auto_map" in config:
        raise RewardError(
            f"reward_model: {path} brings code of its own (auto_map in config.json), which is never"
            " run. Take a model of an architecture that transformers has."
        )
    if not any(folder.glob("*.safetensors")):
        raise RewardError(
            f"reward_model: {path} has no weights in safetensors, the only kind that is loaded."
        )
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, Mapping) else config.get("num_labels", 2)
    if num_labels != 1:
        raise RewardError(
            f"reward_model: {path} has {num_labels} outputs (num_labels); a reward model has one."
        )
    tokenizer = folder / "tokenizer_config.json"
    if tokenizer.is_file() and "auto_map" in _json(tokenizer, path):
        raise RewardError(
            f"reward_model: the tokenizer of {path} brings code of its own (auto_map in"
            " tokenizer_config.json), which is never run."
        )
    return str(folder)


def _json(file: Path, path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise RewardError(f"reward_model: model_path {path} has no {file.name}.") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RewardError(f"reward_model: {file.name} of {path} is no JSON object.")
    return found


def _device(name: str) -> Any:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise RewardError("reward_model: device=cuda, but torch sees no CUDA device.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' reports and progress bars while a model is loaded; missing weights are
    reported as an error instead."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # theirs
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
