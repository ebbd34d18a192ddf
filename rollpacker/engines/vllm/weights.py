"""vLLM's copy of the weights. After every update, and after vLLM's sleep, its log-probabilities of
a fixed prompt are compared with those of the transformers module; nothing is generated if they
differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.engines.engine import EngineError, SamplingParams
from rollpacker.engines.vllm.adapters import base_weights, has_adapter, load_adapter
from rollpacker.engines.vllm.draws import Draw
from rollpacker.engines.vllm.parallel import Workers
from rollpacker.engines.vllm.setup import pack_output_layer

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

PROBE_TOKENS = 16
"""Number of tokens in the fixed prompt whose log-probabilities both sides compute."""
TOLERANCE = {torch.float32: 1e-3}
TOLERANCE_HALF = 1.0
"""Largest allowed difference of a token's log-probability between vLLM and the transformers module
for weights in other formats than float32, for which it is `TOLERANCE`."""


class Copy:
    """vLLM's copy of the weights of one engine's model, and its comparison with that model."""

    def __init__(
        self,
        model: PreTrainedModel,
        vllm: LLMEngine,
        workers: Workers | None,
        *,
        hand_over: Callable[..., object],
        forget: Callable[[Sequence[int]], None],
    ) -> None:
        """`workers`: the worker processes if several devices share the engine, else None.
        `hand_over`: the engine's method that hands a request to vLLM; `forget`: the one that drops
        the `Draw`s of ended requests."""
        self._model = model
        self._vllm = vllm
        self._workers = workers
        self._hand_over = hand_over
        self._forget = forget
        self._has_base = False

    @torch.no_grad()
    def load(self) -> None:
        """Copy the model's weights into vLLM: all at first, and later only the adapter if there is
        one. Raises `EngineError` if vLLM then gives a fixed prompt other log-probabilities."""
        if not (self._has_base and has_adapter(self._model)):
            self._load_base()
            self._has_base = True
        if has_adapter(self._model):
            load_adapter(self._model, self._vllm)
        self._reset_prefix_cache()
        self._compare()

    def _load_base(self) -> None:
        """Copy all weights but the adapter's into vLLM, which then drops its adapter."""
        named = list(base_weights(self._model))
        if self._workers is not None:
            self._workers.load(named)
        else:
            self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named)})
            self._vllm.apply_model(pack_output_layer)

    @property
    def can_sleep(self) -> bool:
        """Whether vLLM was opened with the ability to free its memory."""
        return bool(self._vllm.model_config.enable_sleep_mode)

    def sleep(self) -> None:
        """Move vLLM's weights to host memory and drop its keys and values. (vLLM's sleep level 2
        would drop the weights too, with buffers that are never sent again.)"""
        self._vllm.sleep(level=1)

    def wake_up(self) -> None:
        """Undo `sleep`: bring back the weights, then allocate an empty cache. Raises `EngineError`
        if some of vLLM's memory is missing, or it computes other log-probabilities than the
        model."""
        for stage in ("weights", "kv_cache"):
            is_whole = self._vllm.wake_up(tags=[stage])
        if not is_whole or self._vllm.is_sleeping():
            raise EngineError("vLLM did not wake up: some of its memory is not there")
        self._reset_prefix_cache()
        self._compare()

    def _reset_prefix_cache(self) -> None:
        if not self._vllm.reset_prefix_cache():
            raise EngineError("vLLM kept keys and values of older weights in its prefix cache")

    @torch.no_grad()
    def _compare(self) -> None:
        """Raise `EngineError` if vLLM's log-probabilities of a fixed prompt are not the model's."""
        config = self._model.config.get_text_config()
        max_positions = getattr(config, "max_position_embeddings", None) or PROBE_TOKENS
        size = min(PROBE_TOKENS, config.vocab_size, max_positions - 1)
        stride = max(1, config.vocab_size // size)
        prompt = [place * stride for place in range(size)]
        wanted, found = self._model_says(prompt), self._vllm_says(prompt)
        if not wanted.isfinite().all():  # the samples will say so
            return
        difference = float((wanted - found).abs().max())
        tolerance = TOLERANCE.get(self._model.dtype, TOLERANCE_HALF)
        if not difference <= tolerance:
            raise EngineError(
                f"vLLM does not compute what the model does: log-probabilities of a fixed prompt "
                f"differ by up to {difference:.3g} (allowed: {tolerance:g}). Nothing was generated "
                "with these weights; set rollout.engine.name=torch if it stays so"
            )

    def _model_says(self, prompt: list[int]) -> Tensor:
        """The model's log-probabilities of the prompt's tokens from the second one on."""
        ids = torch.tensor([prompt], device=self._model.device)
        was_training = self._model.training
        self._model.train(False)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        self._model.train(was_training)
        log_probs: Tensor = logits.log_softmax(-1).gather(1, ids[0, 1:, None])
        return log_probs[:, 0].cpu()

    def _vllm_says(self, prompt: list[int]) -> Tensor:
        """vLLM's log-probabilities of the prompt's tokens from the second one on."""
        number = -1
        draw = Draw(SamplingParams(max_response_tokens=1, temperature=0.0), key=0)
        self._hand_over(number, draw, prompt, max_tokens=1, prompt_logprobs=0)
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = self._vllm.step()
        self._forget([number])
        (output,) = outputs
        assert output.prompt_logprobs is not None
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([said[token].logprob for token, said in pairs if said is not None])
