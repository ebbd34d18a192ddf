"""Whole runs in which deferred trajectories carry what they have, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from rollpacker.data.cursor import PromptCursor
from rollpacker.engines.engine import Response
from rollpacker.run.ports.carried_turns import CarriedTurns
from rollpacker.run.ports.desk import Desk
from tests.run.test_turns import (
    TALK,
    TOOLS,
    commands,
    entries,
    folder,
    metrics,
    model,
    train,
    trained,
)

__all__ = ["folder", "model"]

SLOW = '''
import asyncio

class Slow(Talk):
    """Two of six in a short round are so slow that they are deferred, after a turn or two."""

    async def step(self, message):
        answer = super().step(message)
        if self.row["number"] in SLOW_ROWS and self.turn == self.late_in:
            await asyncio.sleep(3)
        return answer

    @property
    def late_in(self):
        return 1 + self.row["number"] % 2

class Moody(Slow):
    """It says something else each time, in whichever process it is."""

    deterministic = False
    count = 0

    async def step(self, message):
        told, reward, done = await super().step(message)
        Moody.count += 1
        return [{"role": "user", "content": f"{os.getpid()}, {Moody.count}?"}], reward, done
'''
SHORT = ("environment.function=talk.py:Slow", "tail_batching={enabled: true, prompt_factor: 1.5}")


@pytest.fixture
def slow(folder: Path) -> Path:
    order = [prompt.row for prompt in PromptCursor("train", 16, 0, True, None).take(12)[0]]
    slow = (order[2], order[5], order[8], order[11])  # so that nothing else decides who wins
    (folder / "talk.py").write_text(f"SLOW_ROWS = {slow}\n{TALK}{SLOW}")
    return folder


def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """By sample: the trajectory that the run lays down, and drafts of each turn."""
    found: dict[str, Any] = {"laid": {}, "drafts": []}
    lay_down, further = Desk.lay_down, CarriedTurns.further

    def laid(self: Desk, response: Response) -> None:
        found["laid"][str(response.sample)] = response
        lay_down(self, response)

    def asked(self: CarriedTurns, request: Any, play: Any) -> Any:
        request = further(self, request, play)
        if request.carried is not None:
            found["drafts"].append((request.turn, len(request.carried.tokens)))
        return request

    monkeypatch.setattr(Desk, "lay_down", laid)
    monkeypatch.setattr(CarriedTurns, "further", asked)
    return found


def carried(found: list[dict[str, Any]]) -> list[int]:
    return [n for one in commands(found, "Launch") for n in one.get("carried", ()) if n]


def kept(found: list[dict[str, Any]]) -> list[int]:
    return [one["num_kept"] for one in found if one.get("num_kept")]


def same(one: Response, other: Response) -> bool:
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    return (one.prompt_tokens, one.tokens, one.given, one.finish_reason) == (
        (other.prompt_tokens, other.tokens, other.given, other.finish_reason)
    )


def weights(folder: Path, name: str, step: int = 3) -> dict[str, torch.Tensor]:
    checkpoints = folder / "runs" / name / "checkpoints" / f"step_{step:06d}"
    return safetensors.torch.load_file(checkpoints / "model" / "model.safetensors")


def test_carried_trajectories_are_those_played_from_scratch(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two short rounds, whose four slow prompts a long one has under newer weights."""
    laid = {}
    for carry in ("exact", "none"):
        with monkeypatch.context() as patch:
            seen = watched(patch)
            assert train(*SHORT, f"tail_batching.carry={carry}", f"name={carry}") == 0
        laid[carry] = seen["laid"]
        assert bool(seen["drafts"]) == (carry == "exact")
    found = entries(slow, "exact")
    assert [one["kind"] for one in commands(found, "Launch")][-1] == "long"
    assert len(carried(found)) == 8 and not carried(entries(slow, "none"))
    assert kept(found)
    groups = [[one["groups"] for one in commands(entries(slow, name), "TrainOn")] for name in laid]
    assert groups[0] == groups[1]
    ours = trained(found)
    assert any("#1" in sample for sample in ours)
    assert all(same(laid["exact"][one], laid["none"][one]) for one in ours)
    for name, tensor in weights(slow, "exact").items():
        assert torch.allclose(tensor, weights(slow, "none")[name], atol=1e-5), name
    rows = metrics(slow, "exact")
    assert rows[-1]["carry/tokens"] > 0 and 0 < rows[-1]["carry/kept_ratio"] <= 1
    assert rows[-1]["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_run_resumed_while_trajectories_wait_is_the_uninterrupted_one(slow: Path) -> None:
    assert train(*SHORT, "name=whole") == 0
    assert train(*SHORT, "name=parts", "train.steps=2") == 0
    folder = slow / "runs" / "parts" / "checkpoints" / "step_000002" / "carried"
    index = json.loads((folder / "carried.json").read_text())
    assert len(index["samples"]) == 8 and any(one[5:] for one in index["samples"])
    assert np.load(folder / "tokens.npy").size == sum(one[2] for one in index["samples"])
    assert train(*SHORT, "name=parts", "--resume", "train.steps=3") == 0
    whole, parts = entries(slow, "whole"), entries(slow, "parts")
    assert commands(parts, "TrainOn") == commands(whole, "TrainOn")
    assert len(carried(parts)) == 8
    ours, theirs = weights(slow, "parts"), weights(slow, "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_first_turns_that_end_as_the_race_does_are_carried(folder: Path) -> None:
    """Several messages reach their limit in one decode step, in episodes that no environment knows
    of yet: nobody cancels those."""
    longest = ("rollout.stop=[]", "rollout.max_response_tokens=40", "data.max_prompt_tokens=260")
    races = "tail_batching={enabled: true, prompt_factor: 2.0}"
    assert train(*TOOLS, *longest, races, "train.steps=4") == 0
    found = entries(folder)
    assert 40 in carried(found)
    assert len(metrics(folder)) >= 4


def test_where_the_answers_are_others_drafts_are_dropped(
    slow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watched(monkeypatch)
    assert train(*SHORT, "environment.function=talk.py:Moody") == 0
    found = entries(slow)
    assert carried(found) and not seen["drafts"]  # only first turns have any
    assert len(metrics(slow)) == 3 and len(trained(found)) == 3 * 4 * 2
    assert metrics(slow)[-1]["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("stragglers", ["queue", "pool"])
def test_under_the_same_weights_only_the_order_changes(
    slow: Path, monkeypatch: pytest.MonkeyPatch, stragglers: str
) -> None:
    """Whoever wins: what is trained on is what a run without races trains on, of each place."""
    frozen = ("train.learning_rate=1e-30", "train.steps=4", "environment.max_turns=6")
    laid = []
    for name, tail in (
        ("races", f"{{enabled: true, prompt_factor: 1.5, stragglers: {stragglers}}}"),
        ("plain", "{enabled: false}"),
    ):
        with monkeypatch.context() as patch:
            seen = watched(patch)
            assert train(*frozen, f"tail_batching={tail}", f"name={name}") == 0
        ours = trained(entries(slow, name))
        laid.append({place_of(one): seen["laid"][one] for one in ours})
    assert carried(entries(slow, "races"))
    assert laid[0].keys() == laid[1].keys()
    assert all(same(laid[0][place], laid[1][place]) for place in laid[0])


def place_of(sample: str) -> str:
    prompt, rest = sample.split("#")
    return f"{prompt}.{rest.split('.')[1]}"
