"""The weights of the module that an engine of this process was given."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from rollpacker.engines.engine import EngineError
from rollpacker.weights.buffer import StaleWeightsError, WeightReader, WeightSource
from rollpacker.weights.probe import weight_probe


class OwnWeights:
    """What an update overwrites: what training changes, of a model with adapters those alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._reader = WeightReader()

    def take(self, version: int, weights: Mapping[str, torch.Tensor] | WeightSource | None) -> None:
        """Copy these into the module; None: it has them already. Raises `EngineError` if they are
        another model's, or of another version."""
        if isinstance(weights, WeightSource):
            self._read(version, weights)
        elif weights is not None:
            self._copy(weights)

    def probe(self) -> str:
        """See `rollpacker.weights.probe`."""
        return weight_probe(self._tensors().items())

    def _tensors(self) -> dict[str, torch.nn.Parameter]:
        return {n: p for n, p in self._model.named_parameters() if p.requires_grad}

    def _read(self, version: int, source: WeightSource) -> None:
        if source.version != version:
            raise EngineError(f"weights of version {source.version} were given for {version}")
        try:
            with self._reader.reading(source) as weights:
                self._copy(weights)
        except StaleWeightsError as error:
            raise EngineError(str(error)) from error

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, torch.Tensor]) -> None:
        own = self._tensors()
        if strange := sorted(own.keys() ^ weights.keys()):
            raise EngineError(f"these are the weights of another model: {strange[0]} differs")
        for name, value in weights.items():
            if own[name].shape != value.shape:
                raise EngineError(
                    f"these are the weights of another model: {name} is {list(value.shape)}, "
                    f"not {list(own[name].shape)}"
                )
            own[name].copy_(value)
