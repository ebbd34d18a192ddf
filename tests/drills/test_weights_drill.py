"""A made-up way to carry weights: files in a folder in place of memory, in the room of weights
alone. Neither the trainer nor the engine knows it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from rollpacker.engines.embedded.attention import install_attention
from rollpacker.engines.embedded.engine import TorchEngine
from rollpacker.engines.engine import EngineConfig
from rollpacker.trainer.torch_trainer import TorchTrainer
from rollpacker.weights import buffer
from tests.trainer.tiny import samples, step, tiny_model, trainer


class Filed:
    """What `buffer.Memory` is, over a file: bytes that other processes map by a path."""

    folder: Path

    def __init__(self, size_bytes: int) -> None:
        self.path = str(self.folder / f"weights-{len(list(self.folder.iterdir()))}")
        Path(self.path).write_bytes(bytes(size_bytes))
        self.inode = os.stat(self.path).st_ino


def test_an_engine_takes_a_trainers_weights_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Filed, "folder", tmp_path, raising=False)
    monkeypatch.setattr(buffer, "Memory", Filed)
    own = TorchTrainer(trainer().learner, in_place=False, shared=True)
    model = tiny_model(seed=1)
    install_attention(model)
    engine = TorchEngine(model=model, tokenizer=None, config=EngineConfig(max_slots=1))
    before = engine.weight_probe()
    probes = []
    for version in (0, 1):
        hand_over = asyncio.run(own.hand_over())
        assert isinstance(hand_over.weights, buffer.WeightSource)
        assert hand_over.weights.version == version
        assert Path(hand_over.weights.layout.path).parent == tmp_path
        asyncio.run(engine.update_weights(version, hand_over.weights))
        assert engine.weight_probe() == hand_over.probe
        probes.append(engine.weight_probe())
        if version == 0:
            step(own, samples())
    asyncio.run(engine.close())
    own.close()
    assert len({before, *probes}) == 3, "each version is other weights"
    assert len(list(tmp_path.iterdir())) == 1, "the newest version takes the place of the last"
