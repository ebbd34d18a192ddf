"""An engine on a model that TRL trains. The model is lent to it while responses are generated.

TRL trains with attention masks, transformers' own attention and a forward pass that it has
replaced; RollPacker's engine has an attention of its own and runs the modules as they were built.
Both use the same weights, so the model is switched between the two forms.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig


class LentModel:
    """The model that a trainer owns, lent to an engine that generates with it, and this engine."""

    def __init__(
        self, model: Any, tokenizer: PreTrainedTokenizerBase, config: EngineConfig
    ) -> None:
        """Make the engine with `config`. `model` may be wrapped by peft. Raises
        `UnsupportedModelError` for an architecture that cannot run in the engine."""
        self._model = _without_wrapper(model)
        with self.lent():
            self.engine = TorchEngine(model=self._model, tokenizer=tokenizer, config=config)

    def is_of(self, model: Any) -> bool:
        """Whether `model` is the model that was lent, with or without peft's wrapper."""
        return _without_wrapper(model) is self._model

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which the engine can use the model, and the trainer must not run it."""
        model = self._model
        attention = model.config._attn_implementation
        replaced = vars(model).pop("forward", None)
        try:
            install_attention(model)
            yield
        finally:
            model.set_attn_implementation(attention)
            if replaced is not None:
                model.forward = replaced


def close(engine: Any) -> None:
    """End the engine's thread. Its memory is freed once nothing refers to the engine."""
    thread = threading.Thread(target=asyncio.run, args=(engine.close(),))
    thread.start()  # in a notebook this thread has an event loop that runs
    thread.join()


def _without_wrapper(model: Any) -> PreTrainedModel:
    by_peft = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    found: PreTrainedModel = model.get_base_model() if by_peft else model
    return found


def prompt_tokens(
    prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any]
) -> list[tuple[int, ...]]:
    """The token ids of these prompts, as TRL makes them: from texts as they are, from messages by
    the chat template."""
    encoded: Any
    if isinstance(prompts[0], str):
        encoded = tokenizer(text=list(prompts))
    else:
        encoded = tokenizer.apply_chat_template(
            conversation=list(prompts),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **chat_template_kwargs,
        )
    return [tuple(tokens) for tokens in encoded["input_ids"]]
