"""Weighted carrying: tokens of older weights are trained on, each with its own clipped importance
ratio. The real engine and trainer, on a tiny model that learns fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.core.commands import Launch
from rollpacker.core.ids import SampleId
from rollpacker.core.records import Record
from rollpacker.engines.engine import Response
from rollpacker.report.log import EventLog
from rollpacker.report.metrics import read_metrics
from rollpacker.run.parts import policy as build
from rollpacker.trainer import samples

LIMIT = 1.1
WEIGHTED = (
    *("tail_batching.carry=weighted", "tail_batching.prompt_factor=2.0"),
    *("algorithm.mismatch_correction=token-truncate", f"algorithm.mismatch_max={LIMIT}"),
    *("train.learning_rate=1e-2", "train.schedule=constant", "save_samples=false"),
)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")
    yield write_config(tmp_path, steps=4)
    torch.set_num_threads(threads)


def test_carried_tokens_weigh_by_new_over_old_probability(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[Any] = []
    steps: list[list[Response]] = []
    ratios: list[torch.Tensor] = []
    load, make = build.load_policy, samples.build_train_samples

    def loading(*arguments: Any, **settings: Any) -> Any:
        policy = load(*arguments, **settings)
        models.append(policy.loaded.model)
        return policy

    def building(groups: Any, *rest: Any, **settings: Any) -> Any:
        """While a step is trained, before its update: the weights are those of the launch."""
        steps.append([response for group in groups for response, _ in group])
        ratios.append(torch.cat([_ratios(models[0], response) for response in steps[-1]]))
        return make(groups, *rest, **settings)

    monkeypatch.setattr(build, "load_policy", loading)
    monkeypatch.setattr(samples, "build_train_samples", building)
    run = rollpacker.train(config, WEIGHTED)

    log = list(EventLog(run.folder / "events.jsonl"))
    commands = [c for entry in log if isinstance(entry, Record) for c in entry.commands]
    carried: dict[SampleId, int] = {}
    for command in commands:
        if isinstance(command, Launch):
            carried |= dict(zip(command.samples, command.carried, strict=False))
    off, on = [], []
    for responses, ratio in zip(steps, ratios, strict=True):
        parts_of = ratio.split([len(response.tokens) for response in responses])
        for response, own in zip(responses, parts_of, strict=True):
            count = carried.get(response.sample, 0)
            off.append(own[:count])
            on.append(own[count:])
    # What was carried is as probable as it was under older weights, all else as under these.
    assert (torch.cat(on) - 1).abs().max() < 1e-4
    assert (torch.cat(off) - 1).abs().max() > 0.2 and torch.cat(off).numel() > 100

    rows = [row for _, row in read_metrics(run.folder / "metrics.jsonl")]
    for row, ratio in zip([r for r in rows if "actor/loss" in r], ratios, strict=True):
        assert row["weighted_carrying"] == 1
        mean = row["sampling/importance_sampling_ratio/mean"]
        assert mean == pytest.approx(ratio.mean().item(), rel=1e-4)
        outside = (ratio > LIMIT).double().mean().item()
        assert row["sampling/mismatch_outside"] == pytest.approx(outside, abs=1e-6)
        weights = ratio.clamp(0, LIMIT)
        size = weights.sum() ** 2 / weights.square().sum() / len(weights)
        assert row["sampling/ess"] == pytest.approx(size.item(), rel=1e-4)
    assert run.summary["weighted_carrying"] is True
    assert run.summary["carrying"]["importance_outside"] > 0


@torch.no_grad()
def _ratios(model: Any, response: Response) -> torch.Tensor:
    """Probability under the weights at hand, by that which the response came with. [T]"""
    tokens = torch.tensor([response.prompt_tokens + response.tokens])
    logits = model(tokens, use_cache=False).logits[0, len(response.prompt_tokens) - 1 : -1]
    own = torch.tensor(response.tokens)
    now = logits.double().log_softmax(-1)[torch.arange(len(own)), own]
    return (now - torch.tensor(response.log_probs, dtype=torch.float64)).exp()
