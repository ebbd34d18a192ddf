"""Memory that a model's decoder layers hold while they are trained, found by running them on
torch's meta device, which has shapes and no data.

    config.json -> the model, without weights -> forward (what is kept) -> backward (the peak)

All that torch allocates is counted, whichever family the model is of. Attention counts as fused, as
the trainer's is where it has no window and no cap: beside inputs and output it keeps a float32
number for each query. Torch and transformers are imported by the first trace."""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rollpacker.trainer.trainer import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTrace:
    """Memory that one micro-batch takes in a model's layers, as means over the layers."""

    saved: float
    """Bytes per token that a layer keeps for the backward pass."""
    ends: float
    """Bytes per token that are kept for the backward pass outside of the layers: before the first
    one and behind the last."""
    backward_bytes: int
    """The most bytes that the backward pass allocates at once beyond what the forward pass kept."""
    waiting: float
    """Bytes per token of the inputs and the output gradients of a layer's trained linear layers. A
    pipeline stage keeps them until it computes these layers' weight gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """The settings of training on which the memory of a model's layers depends."""

    dtype: str
    """Name in torch of the dtype that the layers compute in, such as bfloat16."""
    checkpointing: bool
    lora: LoraConfig | None
    rows: int
    row_tokens: int


def trace_layers(folder: Path, settings: TraceSettings, notes: list[str]) -> LayerTrace | None:
    """Trace the model whose `config.json` is in `folder`, without weights. None: transformers
    cannot build or run such a model, and a sentence in `notes` says why."""
    try:
        return _traced((folder / "config.json").read_text(encoding="utf-8"), settings)
    except Exception as error:  # a family's own code, on a device that it was not written for
        first = (str(error).strip().splitlines() or [""])[0]
        notes.append(
            "what is kept for the backward pass, and so the memory, is not known: the model could "
            f"not be traced ({type(error).__name__}: {first})"
        )
        return None


@functools.lru_cache(maxsize=64)
def _traced(config: str, settings: TraceSettings) -> LayerTrace:
    import torch

    from rollpacker.trainer.activation_checkpointing import layers_in_training

    model, checkpointed = _model(json.loads(config), settings)
    decoder = model.get_decoder()
    for parameter in model.parameters():
        if parameter.requires_grad:  # micro-batches before this one have left their sums
            parameter.grad = torch.zeros_like(parameter)
    tokens = settings.rows * settings.row_tokens
    ids = torch.zeros((settings.rows, settings.row_tokens), dtype=torch.int64, device="meta")
    count = len(decoder.layers)
    waiting = _waiting_bytes(decoder, ids) / count / tokens
    live = _live_bytes()
    for there in (*model.parameters(), *model.buffers()):
        live.leave_out(there)
    between: list[int] = []
    """Bytes held by tensors at the entry of each layer, and at the exit of the last."""
    for layer in decoder.layers:
        layer.register_forward_pre_hook(lambda *_: between.append(live.now))
    decoder.layers[-1].register_forward_hook(lambda *_: between.append(live.now))
    with layers_in_training(checkpointed), live:
        hidden = decoder(input_ids=ids, use_cache=False)[0]
        after_forward = live.now
        live.peak = live.now
        between = between[: count + 1]  # checkpointed layers run once more
        torch.autograd.backward(hidden, torch.empty_like(hidden))
    # Local variables hold as much at the entries of two layers, and more at an exit.
    period = _period(getattr(decoder.config, "layer_types", None) or [""] * count)
    whole = (count - 1) // period * period or count
    saved = (between[whole] - between[0]) / whole / tokens
    return LayerTrace(
        saved=saved,
        ends=after_forward / tokens - count * saved,
        backward_bytes=live.peak - after_forward,
        waiting=waiting,
    )


def _period(kinds: Sequence[str]) -> int:
    """Return the smallest number of layers after which the sequence of layer kinds repeats."""
    count = len(kinds)
    return next(size for size in range(1, count + 1) if kinds[size:] == kinds[: count - size])


def _waiting_bytes(decoder: Any, ids: torch.Tensor) -> int:
    """Return the bytes of two kinds of tensors: the inputs of all trained linear layers in
    the decoder's layers (an input that several layers share counts once), and the
    gradients of their outputs."""
    import torch
    from torch import nn

    inputs: dict[int, torch.UntypedStorage] = {}
    outputs: list[int] = []

    def note(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        storage = given[0].untyped_storage()
        inputs[storage._cdata] = storage
        outputs.append(output.nbytes)

    trained = [
        module.register_forward_hook(note)
        for layer in decoder.layers
        for module in layer.modules()
        if type(module) is nn.Linear and module.weight.requires_grad
    ]
    with torch.no_grad():
        decoder(input_ids=ids, use_cache=False)
    for hook in trained:
        hook.remove()
    return sum(outputs) + sum(storage.nbytes() for storage in inputs.values())


def _model(config: dict[str, Any], settings: TraceSettings) -> tuple[Any, list[nn.Module]]:
    """Return the model as the trainer has it, on the meta device, and its checkpointed layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollpacker.trainer.activation_checkpointing import enable_checkpointing
    from rollpacker.trainer.lora import add_adapter

    built: Any = AutoModelForCausalLM
    known: Any = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = built.from_config(
            known.get_text_config(),
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=False,
        ).eval()
        if settings.lora is not None:
            model = add_adapter(model, settings.lora)
    model.set_attn_implementation(_install_fused_attention())
    return model, enable_checkpointing(model) if settings.checkpointing else []


def _live_bytes() -> Any:
    """Return a context that counts the bytes of tensors: `now` is what they hold at this moment,
    and `peak` the most that they have held since the context began."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # torch's
            self.now = self.peak = 0
            self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

        def __torch_dispatch__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given = func(*args, **(kwargs or {}))
            entered = {id(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
            for one in tree_leaves(given):
                if isinstance(one, Tensor) and id(one) not in entered:
                    self._count(one.untyped_storage())
            return given

        def leave_out(self, tensor: Tensor) -> None:
            """Leave out of the count a tensor that existed before the trace."""
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = weakref.ref(storage)

        def _count(self, storage: torch.UntypedStorage) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                return

            def freed(_: object) -> None:
                del self._known[key]
                self.now -= size

            self._known[key] = weakref.ref(storage, freed)
            self.now += size
            self.peak = max(self.peak, self.now)

    return LiveBytes()


@functools.cache
def _install_fused_attention() -> str:
    """Register with transformers an attention that keeps the same tensors for the backward pass as
    the fused kernels of CPU and CUDA. Returns the name by which a model selects it."""
    import torch
    from transformers import AttentionInterface

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            rows, heads, tokens, _ = query.shape  # the output's heads lie side by side, as theirs
            output = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)
            sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, output, sums)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])

    def attend(module: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        output: Any = Fused.apply(query, key, value)  # type: ignore[no-untyped-call]  # torch's
        return output.transpose(1, 2), None

    name = "rollpacker-traced"
    AttentionInterface.register(name, attend)
    return name
