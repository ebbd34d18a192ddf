"""Whole runs with a chat template that drops thinking from earlier turns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.run.test_turns import (
    commands,
    entries,
    folder,  # noqa: F401  # a fixture
    metrics,
    save_model,
    train,
    trained,
    weights,
)

PREFIXES = "environment.rewrites=prefixes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(made, family="thinking")
    return made


def test_such_a_template_is_refused_with_the_key_that_takes_it(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train() == 2
    error = capsys.readouterr().err
    assert "the chat template rewrites what came before" in error and PREFIXES in error
    assert error.count("\n") == 1 and not (folder / "runs").exists()


@pytest.mark.parametrize(
    "override", ["algorithm.name=grpo", "algorithm.name=ppo", "train.processes=2"]
)
def test_turns_are_trained_on_behind_the_prompts_that_they_were_drawn_behind(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    override: str,
) -> None:
    """The trainer's log-probs of every row are the engine's; a trajectory is one sample, whose
    length is what was drawn in all of its rows."""
    assert train(PREFIXES, override) == 0
    assert "would be trained on (>) in 3 rows" in capsys.readouterr().out
    found, steps = entries(folder), metrics(folder)
    drawn = Counter[str]()
    for one in found:
        if one.get("event") == "SampleGenerated":
            drawn[one["sample"]] += one["num_tokens"]
    assert len(steps) == 3
    for row, command in zip(steps, commands(found, "TrainOn"), strict=True):
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["episodes/rows/mean"] > 1.5
        samples = [sample for group in command["groups"] for sample in group]
        assert row["train/response_tokens"] == sum(drawn[sample] for sample in samples)
    assert len(trained(found)) == 3 * 4 * 2
    files = list((folder / "runs" / "talk" / "samples").glob("*.parquet"))
    kept = [one for file in files for one in pyarrow.parquet.read_table(file).to_pylist()]
    ids = [one["sample_id"] for one in kept if one["trained"]]
    assert sorted(ids) == sorted(trained(found))
    assert any("letters. And then?" in one["completion"] for one in kept)


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path) -> None:  # noqa: F811
    assert train(PREFIXES, "name=whole") == 0
    assert train(PREFIXES, "name=parts", "train.steps=2") == 0
    assert train(PREFIXES, "name=parts", "--resume", "train.steps=3") == 0
    assert weights(folder, "parts") == weights(folder, "whole")


def test_gradients_that_begin_early_are_those_of_the_step(folder: Path) -> None:  # noqa: F811
    """A trajectory's rows are accumulated together, before its step is complete or then."""
    more = (PREFIXES, "train.steps=1", "rollout.prompts_per_step=6")
    assert train(*more, "name=early", "stream_trainer={enabled: true, reward_wait: true}") == 0
    assert train(*more, "name=plain", "stream_trainer.enabled=false") == 0
    (early,), (plain,) = metrics(folder, "early"), metrics(folder, "plain")
    assert early["perf/samples_streamed"] > 0 == plain["perf/samples_streamed"]
    for name in ("actor/grad_norm", "actor/entropy", "train/response_tokens", "train/tokens"):
        assert early[name] == pytest.approx(plain[name], rel=1e-5), name
