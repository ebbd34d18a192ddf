"""Trial passes of a model that is new to the engine.

They find the shapes of the keys and values of each layer, and check that decoding with cached keys
and values, and the plain forward pass, give the model's own logits.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollpacker.engines.embedded.attention import STEP_KEYWORD, RolloutStep, UnsupportedModelError
from rollpacker.engines.embedded.buckets import Bucket
from rollpacker.engines.embedded.kv_slots import (
    DecodeStep,
    KVSlots,
    LayerProbe,
    LayerShape,
    PrefillStep,
)
from rollpacker.engines.embedded.plain_forward import plain_forward

logger = logging.getLogger(__name__)

PLAIN_TOLERANCE = {True: 1e-3, False: 5e-2}
"""Largest difference between the logits of the plain forward pass and the model's own, as a share
of the largest logit. True is for models in float32, False for shorter formats."""


def probe(
    model: PreTrainedModel, device: torch.device
) -> tuple[list[LayerShape], torch.dtype, int]:
    """Return the shapes of all layers that attend, the dtype of the keys, and the vocabulary's
    size. Raises `UnsupportedModelError` for a model whose decode steps give other logits than its
    full forward pass, or logits that are not numbers."""
    name = type(model).__name__
    layer_probe = LayerProbe()
    ids = torch.arange(1, 7, device=device)[None]
    full = _last_logits(model, ids, layer_probe)
    num_layers = model.config.get_text_config().num_hidden_layers
    layers = sorted(shape.layer for shape in layer_probe.shapes)
    if layers != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{name} has {num_layers} layers, of which {len(set(layers))} attended through "
            f"RollPacker's attention ({len(layers)} calls); the embedded engine runs models with "
            "exactly one attention call per layer"
        )
    assert layer_probe.dtype is not None
    slots = KVSlots(layer_probe.shapes, layer_probe.dtype, device, budget_bytes=2**30)
    slots.reserve(1, 8)
    prefill = PrefillStep(slots, 0, torch.zeros(1, dtype=torch.int64, device=device))
    _last_logits(model, ids[:, :-1], prefill)
    positions = torch.tensor([ids.shape[1] - 1], device=device)
    decode = DecodeStep(slots, positions, [Bucket(0, 1, 8)])
    decoded = _last_logits(model, ids[:, -1:], decode, position_ids=positions[:, None])
    if full.isnan().any() or decoded.isnan().any() or full.isposinf().any():
        raise UnsupportedModelError(
            f"{name} gives logits that are not numbers: its weights hold NaN or are far too large"
        )
    tolerance = 0.1 * float(full.abs().max())
    if not torch.allclose(full, decoded, rtol=0, atol=tolerance, equal_nan=True):
        raise UnsupportedModelError(
            f"{name} gives other logits when it decodes with cached keys and values (largest "
            f"difference {float((full - decoded).abs().max()):.3g}); the engine cannot run it"
        )
    return layer_probe.shapes, layer_probe.dtype, full.shape[-1]


def plain_agrees(model: PreTrainedModel, device: torch.device) -> bool:
    """Whether the plain forward pass knows the model and gives the same logits as its modules."""
    plain = plain_forward(model)
    if plain is None:
        return False
    ids = torch.arange(1, 7, device=device)[None]
    ends = torch.tensor([ids.shape[1] - 1], device=device)
    own, noted = LayerProbe(), LayerProbe()
    wanted = _last_logits(model, ids, own)
    plain.reserve(ids.shape[1])
    with torch.inference_mode():
        given = plain.prefill(ids, ends, noted)[0].float()
    tolerance = PLAIN_TOLERANCE[noted.dtype == torch.float32] * float(wanted.abs().max())
    same = own.calls == noted.calls and torch.allclose(given, wanted, rtol=0, atol=tolerance)
    if not same:
        logger.warning(
            "%s runs through its own modules: as plain calls its logits differ by up to %.3g",
            type(model).__name__,
            float((given - wanted).abs().max()),
        )
    return same


def _last_logits(
    model: PreTrainedModel, ids: Tensor, step: RolloutStep, **kwargs: Tensor
) -> Tensor:
    with torch.inference_mode():
        output = model(input_ids=ids, use_cache=False, **{STEP_KEYWORD: step}, **kwargs)
    logits: Tensor = output.logits[0, -1].float()
    return logits
