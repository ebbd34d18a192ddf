"""vLLM's weights, which go from where they come from straight into vLLM.

    a module with memory    the trainer's own, or a copy that it hands over to, in this process
    a source                memory that the trainer writes and vLLM's workers read
    a folder                the saved weights, until the trainer hands over newer ones

What vLLM computes with them is compared with the trainer (`weights/comparison.py`), or with the
module where it has memory. Nothing is generated if they do not fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.engines.engine import EngineError, SamplingParams
from rollpacker.engines.vllm.adapters import (
    adapter_weights,
    base_weights,
    has_adapter,
    load_adapter,
)
from rollpacker.engines.vllm.draws import Draw
from rollpacker.weights.buffer import StaleWeightsError, WeightReader, WeightSource
from rollpacker.weights.comparison import Comparison, text_of
from rollpacker.weights.delivery import Delivery, Member, UndeliveredError, whole
from rollpacker.weights.folder import SavedFolder
from rollpacker.weights.probe import Probe

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

Weights = WeightSource | Delivery | SavedFolder | Mapping[str, Tensor]
"""Where weights come from. Worker processes take no tensors, and so no mapping."""

_reader = WeightReader()
_member = Member()


@contextmanager
def opened(
    weights: Weights, worker: int, device: torch.device
) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yield the names and tensors of these weights, to be used inside the `with`. `worker`: number
    of this process among the engine's, on `device`. Raises `StaleWeightsError` if a source has
    another version by now, also at the end, and `UndeliveredError`."""
    if isinstance(weights, Delivery):
        with _member.receiving(weights, device, worker) as (_, arriving):
            yield whole(arriving)
    elif isinstance(weights, WeightSource):
        with _reader.reading(weights) as found:
            yield iter(found.items())
    else:
        yield weights.tensors() if isinstance(weights, SavedFolder) else iter(weights.items())


class Copy:
    """The weights that vLLM computes with, and their comparison with the trainer's."""

    def __init__(
        self,
        model: PreTrainedModel,
        vllm: LLMEngine,
        folder: SavedFolder | None,
        *,
        hand_over: Callable[..., object],
        forget: Callable[[Sequence[int]], None],
    ) -> None:
        """`model`: the module with the weights; one without memory has names and shapes alone, and
        `folder` has its weights. `hand_over`: the engine's method that hands a request to vLLM;
        `forget`: the one that drops the `Draw`s of ended requests."""
        self._model = model
        self._vllm = vllm
        self._folder = folder
        self._hand_over = hand_over
        self._forget = forget
        self._base: Weights | None = None
        """Where the weights of vLLM's base can be read again. None: nowhere, or it has none yet."""
        self._is_half_loaded = False
        """Whether a delivery ended early. vLLM reloads layer by layer, and cannot begin anew."""
        self.is_empty = False
        """Whether vLLM has dropped its weights and has no others yet."""
        self._text = text_of([range(model.config.get_text_config().vocab_size)], self._longest)
        self._before_sleep: Tensor | None = None
        self._comparison = Comparison(str(model.dtype).removeprefix("torch."))
        self._changed = False
        self.probe = ""
        """Hash of the trained weights that vLLM got last (`weight_probe`)."""

    @property
    def _longest(self) -> int:
        return int(self._vllm.vllm_config.model_config.max_model_len)

    def load(self, given: WeightSource | Delivery | Mapping[str, Tensor] | None = None) -> None:
        """Bring weights into vLLM: those that `given` has of the trained parameters, or if it is
        None the module's or the folder's. The base of adapters is brought once. Raises
        `EngineError` if vLLM cannot take them or does not compute what a module with memory
        does."""
        self._drain()
        before = self.probe
        own = self._folder or dict(base_weights(self._model))
        if not has_adapter(self._model):
            self.probe = self._load_base(given or own)
        else:
            if self._base is None:
                self._load_base(own)
            probe = Probe()
            adapter = given or adapter_weights(self._model)
            with opened(adapter, 0, self._model.device) as named:
                load_adapter(self._model, self._vllm, dict(probe.of(named)))
            self.probe = probe.hexdigest()
        self._changed = self.probe != before
        self._settle()
        if self._folder is None:
            self.compare(self._text, self._model_says())

    def _drain(self) -> None:
        """Let vLLM end the steps that it has begun ahead for requests which have left."""
        core: Any = self._vllm.engine_core
        while core.engine_core.batch_queue:
            self._vllm.step()

    def _load_base(self, weights: Weights) -> str:
        """Bring all weights but the adapter's into vLLM, which then drops its adapter. Returns a
        hash of what it got."""
        if self._is_half_loaded:
            raise EngineError("vLLM stopped half-way through an update of its weights")
        found = self._vllm.collective_rpc("receive_weights", args=(weights,))
        for error in (one for _, one in found if one is not None):
            if isinstance(weights, Delivery):
                self._is_half_loaded = True
                raise UndeliveredError(error)
            raise StaleWeightsError(error)
        self._base = None if isinstance(weights, Delivery) else weights
        return str(found[0][0])

    def _settle(self) -> None:
        """Give vLLM its cache of keys and values, if it sleeps, and empty that."""
        if self._vllm.is_sleeping() and not self._vllm.wake_up(tags=["kv_cache"]):
            raise EngineError("vLLM did not wake up: some of its memory is not there")
        if not self._vllm.reset_prefix_cache():
            raise EngineError("vLLM kept keys and values of older weights in its prefix cache")
        self.is_empty = False

    @property
    def can_sleep(self) -> bool:
        """Whether vLLM was opened with the ability to free its memory."""
        return bool(self._vllm.model_config.enable_sleep_mode)

    def sleep(self) -> None:
        """Free vLLM's memory of weights, keys and values. Weights that can be read again are
        dropped (vLLM's sleep level 2, at which it saves its buffers). The base of adapters comes
        from a folder, which may be slow to read: it waits in host memory (level 1)."""
        if not self.is_empty:
            self._before_sleep = self._vllm_says()
        self._drain()
        drops = not has_adapter(self._model) and self._base is not None
        self._vllm.sleep(level=2 if drops else 1)
        self.is_empty = drops

    def wake_up(self) -> None:
        """Allocate vLLM's memory of weights, bring these back, and then allocate an empty cache.
        Weights that are older than what their source now has are not brought back (`is_empty`):
        newer ones must come before anything is generated. Raises `EngineError` if memory is
        missing, or vLLM computes other log-probabilities than before its sleep."""
        self._vllm.wake_up(tags=["weights"])
        if self.is_empty:
            assert self._base is not None
            try:
                self._load_base(self._base)
            except StaleWeightsError:
                return
        self._settle()
        now = self._vllm_says()
        assert self._before_sleep is not None
        difference = self._comparison.difference(self._before_sleep.numpy(), now.numpy())
        if difference is not None:
            raise _wrong(f"before and after its sleep {difference}")

    def compare(self, text: Sequence[int], log_probs: Sequence[float]) -> None:
        """Compare vLLM's log-probs with the trainer's; see `Engine.compare`. Nothing is compared if
        the trainer's are no numbers, as the samples will show: they would stay in vLLM's cache."""
        if not all(map(math.isfinite, log_probs)):
            return
        self._text = tuple(text[: self._longest - 1])
        said = self._vllm_says().tolist()
        difference = self._comparison.add(log_probs[: len(said)], said, changed=self._changed)
        if difference is not None:
            raise _wrong(difference)

    @torch.no_grad()
    def _model_says(self) -> list[float]:
        """The module's log-probabilities of the text's tokens from the second one on."""
        ids = torch.tensor([self._text], device=self._model.device)
        was_training = self._model.training
        self._model.train(False)
        logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        self._model.train(was_training)
        log_probs: list[float] = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()
        return log_probs

    def _vllm_says(self) -> Tensor:
        """vLLM's log-probabilities of the text's tokens from the second one on."""
        number = -1
        draw = Draw(SamplingParams(max_response_tokens=1, temperature=0.0), key=0)
        self._hand_over(number, draw, list(self._text), max_tokens=1, prompt_logprobs=0)
        outputs: list[RequestOutput] = []
        while not outputs:
            outputs = self._vllm.step()
        self._forget([number])
        (output,) = outputs
        assert output.prompt_logprobs is not None
        pairs = zip(self._text[1:], output.prompt_logprobs[1:], strict=True)
        return torch.tensor([said[token].logprob for token, said in pairs if said is not None])


def _wrong(difference: str) -> EngineError:
    return EngineError(
        f"vLLM does not compute what the model does: {difference}. Nothing was generated with "
        "these weights; set rollout.engine.name=torch if it stays so"
    )
