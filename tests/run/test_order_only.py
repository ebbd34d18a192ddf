"""Only the order changes: with a policy that stands still, a run with tail batching trains on the
very responses of one without, token for token. The real engine, on a tiny model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.core.ids import PromptId
from rollpacker.trainer import samples

FROZEN = "train.learning_rate=1e-30"
"""Far below what a weight can change by."""
ONE_EPOCH = ("train.steps=null", "train.epochs=1", "train.schedule=constant")
Trained = Counter[tuple[PromptId, int, tuple[int, ...]]]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("order")
    threads = torch.get_num_threads()
    write_model(folder / "model")
    yield write_config(folder, steps=1)
    torch.set_num_threads(threads)


def train(config: Path, seed: int, *overrides: str) -> tuple[Trained, dict[str, Any]]:
    """All that is trained on in one epoch of 40 prompts: prompt, place and tokens."""
    trained: Trained = Counter()
    build = samples.build_train_samples

    def recording(groups: Any, *rest: Any, **settings: Any) -> Any:
        for group in groups:
            for response, _ in group:
                sample = response.sample
                trained[sample.prompt, sample.index, response.tokens] += 1
        return build(groups, *rest, **settings)

    common = (f"seed={seed}", *ONE_EPOCH, FROZEN, "save_samples=false")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "build_train_samples", recording)
        run = rollpacker.train(
            config, [*common, "checkpoint.every_steps=100", *overrides], overwrite=True
        )
    assert run.summary["finished"] == "the data ended"  # not told to stop
    return trained, run.summary


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_frozen_policy_is_trained_on_the_same_responses(config: Path, seed: int) -> None:
    without, told = train(config, seed, "tail_batching.enabled=false")
    assert without.total() > 100 and max(len(tokens) for _, _, tokens in without) > 60
    for stragglers in ("queue", "pool"):
        for factor in (1.25, 1.5, 2.0):
            trained, summary = train(
                config,
                seed,
                f"tail_batching.stragglers={stragglers}",
                f"tail_batching.prompt_factor={factor}",
            )
            assert trained == without, f"{stragglers}, {factor}"
            carrying = summary["carrying"]
            assert carrying["tokens"] > 100 and carrying["kept_ratio"] == 1.0
            assert summary["tokens"] == told["tokens"]  # nothing is generated twice


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_prompts_begun_early_are_the_same_too(config: Path, factor: float) -> None:
    without, told = train(config, 0, "tail_batching.enabled=false")
    trained, summary = train(
        config, 0, f"tail_batching.prompt_factor={factor}", "tail_batching.look_ahead=1"
    )
    assert trained == without
    assert summary["carrying"]["tokens"] > 1000 and summary["carrying"]["kept_ratio"] == 1.0
    assert summary["tokens"] == told["tokens"]  # nothing is generated twice


def test_without_carried_tokens_they_are_the_same_too(config: Path) -> None:
    """Drawn anew with the same noise; as published it is other ones."""
    without, told = train(config, 0, "tail_batching.enabled=false")
    trained, summary = train(config, 0, "tail_batching.carry=none")
    assert trained == without and summary["carrying"] is None
    assert summary["tokens"]["generated"] > told["tokens"]["generated"]
    published, _ = train(config, 0, "tail_batching.selection=published")
    assert published != without
