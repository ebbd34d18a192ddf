"""Whole runs whose advantages are the turns', with a tiny model and real environments."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rollpacker.report.log import EventLog
from rollpacker.run.replay import replay
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.trainer import TrainSample
from tests.run.test_turns import folder, metrics, model, train, weights

__all__ = ["folder", "model"]

EARLY_AND_LATE = '''
class Flips:
    """The same deed is rewarded in the first turn and punished in the second."""

    deterministic = True

    def reset(self, row):
        self.turn = 0
        return [{"role": "user", "content": f"Question {row['number']}."}]

    def step(self, message):
        self.turn += 1
        done = float(len(message["content"]) % 2)
        reward = done if self.turn == 1 else -done
        return [{"role": "user", "content": "And then?"}], reward, self.turn == 2
'''
SLOW = """
import time

def slow(completions, number, **columns):
    for one in number:
        time.sleep(2.0 if one % 4 == 1 else 0.0)
    return [len(str(one)) % 3 / 3 for one in completions]
"""
BY_TURN = ("environment.function=flips.py:Flips", "algorithm.credit=turn")


@pytest.fixture
def flips(folder: Path) -> Path:
    (folder / "flips.py").write_text(EARLY_AND_LATE)
    return folder


def rows_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "runs" / "talk" / "samples").glob("*.parquet"))
    rows = [row for path in paths for row in pyarrow.parquet.read_table(path).to_pylist()]
    return [row for row in rows if row["trained"]]


def log_probs(path: Path, sample: TrainSample) -> torch.Tensor:
    """Of the drawn tokens, by a full pass of the model that lies there."""
    policy = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens = torch.tensor([*sample.prompt_tokens, *sample.response_tokens])
    with torch.no_grad():
        logits = policy(tokens[None]).logits[0, :-1].double().log_softmax(-1)
    found = logits.gather(1, tokens[1:, None])[len(sample.prompt_tokens) - 1 :, 0]
    is_drawn = torch.ones(len(found), dtype=torch.bool)
    for first, behind in sample.given:
        is_drawn[first:behind] = False
    return found[is_drawn]


def turns_of(values: torch.Tensor, sample: TrainSample) -> Sequence[torch.Tensor]:
    """The drawn tokens' values, by turn."""
    ends = [0, *(first for first, _ in sample.given), len(sample.response_tokens)]
    given = [0, *(behind - first for first, behind in sample.given), 0]
    drawn = [b - a - skipped for (a, b), skipped in zip(pairwise(ends), given, strict=False)]
    return torch.split(values, drawn)


def test_the_early_turn_is_credited_and_the_late_one_blamed(
    flips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward of a trajectory that did it in both turns is that of one that did not at all; the
    turns' own credit tells the two deeds apart, and an update moves their tokens accordingly."""
    trained: list[TrainSample] = []
    accumulate_ = Learner.accumulate

    def seen(self: Learner, samples: Sequence[TrainSample]) -> None:
        trained.extend(samples)
        accumulate_(self, samples)

    monkeypatch.setattr(Learner, "accumulate", seen)
    more = ("train.steps=1", "rollout.samples_per_prompt=6", "algorithm.name=dr_grpo")
    assert train(*BY_TURN, *more) == 0
    rows = {row["sample_id"]: row for row in rows_of(flips)}
    assert len(rows) == len(trained) == 24
    groups = defaultdict(list)
    for row in rows.values():
        own = json.loads(row["turn_rewards"])
        assert sum(own) == row["reward"]
        groups[row["prompt_id"]].append((own, json.loads(row["turn_advantages"])))
    for group in groups.values():
        assert len(group) == 6
        returns = [list(accumulate(own[::-1]))[::-1] for own, _ in group]
        for turn in range(2):
            there = [r[turn] for r in returns if len(r) > turn]
            if len(there) > 1:
                mean = sum(there) / len(there)
                found = [given[turn] for own, given in group if len(own) > turn]
                assert found == pytest.approx([value - mean for value in there])
    before = json.loads((flips / "run.yaml").read_text())["model"]["path"]
    after = flips / "runs" / "talk" / "checkpoints" / "step_000001" / "model"
    moved: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for sample in trained:
        change = log_probs(after, sample) - log_probs(Path(before), sample)
        own = json.loads(rows[str(sample.sample)]["turn_rewards"])
        for turn, tokens in enumerate(turns_of(change, sample)):
            if len(own) == 2:
                moved[turn, own[turn] != 0].append(tokens.mean().item())
    mean = {key: sum(values) / len(values) for key, values in moved.items()}
    assert mean[0, True] > mean[0, False]  # the deed, early: more of it
    assert mean[1, True] < mean[1, False]  # the same deed, late: less of it


def test_a_resumed_run_is_the_uninterrupted_one(flips: Path) -> None:
    assert train(*BY_TURN, "name=whole") == 0
    assert train(*BY_TURN, "name=parts", "train.steps=2") == 0
    assert train(*BY_TURN, "name=parts", "--resume", "train.steps=3") == 0
    assert weights(flips, "parts") == weights(flips, "whole")


def test_gradients_that_begin_early_are_the_same_and_the_log_replays(flips: Path) -> None:
    """A group's gradient begins with the advantages of its turns while other verdicts are awaited:
    the run would end if they were others in the whole step."""
    (flips / "slow.py").write_text(SLOW)
    more = ("rewards=[{function: environment}, {function: slow.py:slow}]", "train.steps=1")
    streaming = "stream_trainer={enabled: true, reward_wait: true}"
    assert train(*BY_TURN, *more, streaming, "name=talk") == 0
    assert train(*BY_TURN, *more, "name=plain") == 0
    (streamed,), (plain,) = metrics(flips), metrics(flips, "plain")
    assert streamed["perf/samples_streamed"] > 0 == plain["perf/samples_streamed"]
    for name in ("actor/grad_norm", "critic/advantages/max", "critic/advantages/min"):
        assert streamed[name] == pytest.approx(plain[name], rel=1e-5), name
    assert replay(EventLog(flips / "runs" / "talk" / "events.jsonl")).difference is None


def test_gae_over_turns_trains_policy_and_critic(flips: Path) -> None:
    more = ("algorithm.name=ppo", "algorithm.turn_discount=0.9", "train.steps=2")
    assert train(*BY_TURN, *more) == 0
    rows = metrics(flips)
    assert len(rows) == 2
    assert all(row["critic/value_loss"] > 0 for row in rows)
    assert any(len(set(json.loads(row["turn_advantages"]))) == 2 for row in rows_of(flips))
