"""The calculator and the game: what they say is right, and a few steps of each train on it."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rollpacker.cli.main import main
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.config.warmup import WarmupConfig
from rollpacker.dialogue.template import DialogueTemplate
from rollpacker.dialogue.trajectory import Segment, Trajectory
from rollpacker.imports import load_function
from rollpacker.trainer.model import character_tokenizer
from rollpacker.trainer.warmup_rows import RowParser

ROOT = Path(__file__).resolve().parents[2]
TASKS = {"calculator": "task.py", "guess": "game.py"}


@pytest.fixture(autouse=True)
def at_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def module(task: str) -> ModuleType:
    found = load_function(f"examples/{task}/{TASKS[task]}:dialogues")
    return sys.modules[found.__module__]


def demonstrations(task: str, count: int = 300) -> list[dict[str, Any]]:
    return list(islice(module(task).dialogues(random.Random(0)), count))


def warmup_config(task: str) -> WarmupConfig:
    return load_config(f"configs/{task}-warmup.yaml", [], WarmupConfig)


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_are_the_tokens_that_a_run_would_play(task: str) -> None:
    """Each turn as the warm-up learns it, behind the prefix that a run's trajectory would have."""
    config = warmup_config(task)
    assert config.alphabet is not None
    tokenizer = character_tokenizer(config.alphabet, config.markers, config.chat_template)
    for row in demonstrations(task, 50):
        learnt = RowParser(tokenizer).rows([(task, row)])
        template = DialogueTemplate(tokenizer, tools=row.get("tools", ()))
        messages = row["messages"]
        trajectory = Trajectory(template.prompt(messages[:1]))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        assert len(turns) == len(learnt)
        for turn, (context, response, _) in zip(turns, learnt, strict=True):
            assert tuple(context) == trajectory.prompt + trajectory.tokens
            assert tokenizer.unk_token_id not in [*context, *response]
            sampled = tuple(response)
            trajectory = trajectory.and_then(Segment(sampled, (0.0,) * len(sampled)))
            behind = messages[turn + 1 : turn + 2]
            if behind:
                trajectory = trajectory.and_then(Segment(template.appended(behind, sampled)))


def test_products_are_right_seldom_asked_of_the_tool_and_never_held_out() -> None:
    task = module("calculator")
    rows = demonstrations("calculator", 2000)
    banned = task.held_out()
    assert len(banned) > 150
    for row in rows:
        question, *_, answer = row["messages"]
        left, right = map(int, question["content"].split("*"))
        assert answer["content"] == str(left * right) and question["content"] not in banned
    calls = sum(len(row["messages"]) > 2 for row in rows) / len(rows)
    assert abs(calls - task.CALLS) < 0.03
    assert asyncio.run(task.calculator("12*34")) == "408"
    with pytest.raises(ValueError, match="no product"):
        asyncio.run(task.calculator("__import__('os')"))


def test_halving_wins_every_game_and_the_best_return_says_so() -> None:
    game = module("guess")
    assert game.best_return() == 1.0
    assert game.best_return(16, 4) == 15 / 16 and game.best_return(3, 1) == 1 / 3

    async def halving(number: int) -> float:
        played = game.Guess()
        assert await played.reset({"number": number, "seed": 0}) == [
            game.first_message(game.HIGHEST)
        ]
        low, high = 1, game.HIGHEST
        while True:
            guess = (low + high) // 2
            said, reward, is_over = await played.step({"content": str(guess)})
            if is_over:
                return reward
            low, high = (guess + 1, high) if said[0]["content"] == "higher" else (low, guess - 1)

    assert [asyncio.run(halving(number)) for number in range(1, 21)] == [1.0] * 20


def test_the_clumsy_player_wins_six_games_of_ten() -> None:
    rows = demonstrations("guess", 4000)
    lost = sum(row["messages"][-1]["role"] == "user" for row in rows) / len(rows)
    assert 0.37 < lost < 0.43


def test_a_game_ends_after_its_guesses_and_is_drawn_by_the_seed() -> None:
    game = module("guess")

    async def play() -> list[Any]:
        played = game.Guess()
        await played.reset({"seed": 7})
        assert played.number == random.Random(7).randint(1, game.HIGHEST)
        played.number = 3
        return [await played.step({"content": text}) for text in ("4", "2", "", "5", "9")]

    lower, higher, unread, again, last = asyncio.run(play())
    assert lower == ([{"role": "user", "content": "lower"}], 0.0, False)
    assert higher[0][0]["content"] == "higher" and unread[0][0]["content"] == "?"
    assert again == lower
    assert last == ([], 0.0, True)


def short_run(
    task: str, folder: Path, warmup_steps: int, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The shipped config with a shorter warm-up, which `train` runs by itself; samples, metrics."""
    import pyarrow.parquet as parquet

    shorter = yaml.safe_load((ROOT / "configs" / f"{task}-warmup.yaml").read_text())
    shorter["stages"][0] |= {"steps": warmup_steps, "rows": 4000}
    (folder / "warmup.yaml").write_text(yaml.safe_dump(shorter))
    settings = [
        *(f"warmup={folder}/warmup.yaml", f"model.path={folder}/warm", f"runs_dir={folder}"),
        *("train.steps=3", "rollout.prompts_per_step=8"),
        *overrides,
    ]
    assert main(["train", f"configs/{task}.yaml", *settings]) == 0
    assert (folder / "warm" / "config.json").exists()
    files = sorted((folder / task / "samples").iterdir())
    samples = [row for file in files for row in parquet.read_table(file).to_pylist()]
    lines = (folder / task / "metrics.jsonl").read_text().splitlines()
    return samples, [json.loads(line) for line in lines]


def spoken(sample: dict[str, Any]) -> list[str]:
    """What was said behind the prompt, by turns: the model's and the answers."""
    return re.split("<tool>|<user>|<assistant>", sample["completion"])


def test_a_few_steps_with_the_calculator_train_on_what_it_said(tmp_path: Path) -> None:
    """Each result is the product that was called for, and each reward what the answer deserves."""
    samples, metrics = short_run("calculator", tmp_path, 250)
    num_calls = 0
    for sample in samples:
        first, *rest = spoken(sample)
        right = json.loads(sample["row"])["answer"]
        if rest and not rest[0].startswith("Error"):
            num_calls += 1
            product = re.search(r"<arg_value>(\d+)\*(\d+)</arg_value>", first)
            assert product is not None and rest[0] == str(int(product[1]) * int(product[2]))
        if sample["finish_reason"] == "done":
            assert sample["reward"] == float([first, *rest][-1] == right)
    assert num_calls > 0
    assert any(row.get("tools/calls", 0.0) > 0.0 for row in metrics)
    summary = json.loads((tmp_path / "calculator" / "summary.json").read_text())
    tools = summary["episodes"]["tools"]
    assert tools["calculator"]["calls"] - tools["calculator"]["failed"] >= num_calls
    assert 0.0 < tools["calculator"]["mean_s"] <= tools["calculator"]["longest_s"]


def test_a_few_steps_of_the_game_are_rewarded_for_what_was_found(tmp_path: Path) -> None:
    """Hints and reward are those of the row's number."""
    rows = ("data.train.path=examples/guess/held_out.jsonl", "data.eval=null")
    samples, metrics = short_run("guess", tmp_path, 100, *rows)
    rewards = set()
    hint = module("guess").hint
    # A model so young may write a template's marks itself, which the text does not tell apart.
    clear = re.compile(r"([^<]*<user>(higher|lower|\?)<assistant>)*[^<]*")
    ended = [one for one in samples if one["finish_reason"] == "done"]
    readable = [one for one in ended if clear.fullmatch(one["completion"])]
    assert len(readable) > 0.7 * len(ended) > 0
    for sample in readable:
        number = json.loads(sample["row"])["number"]
        *before, last = spoken(sample)
        guesses, hints = before[::2], before[1::2]
        assert hints == [hint(guess, number) for guess in guesses] and "right" not in hints
        assert sample["reward"] == float(hint(last, number) == "right")
        assert sample["reward"] == 1.0 or len(guesses) == 4
        rewards.add(sample["reward"])
    assert rewards == {0.0, 1.0}
    turns = [row["episodes/turns/mean"] for row in metrics if row["step"] in (1, 2, 3)]
    assert len(turns) == 3 and all(1.0 < mean <= 5.0 for mean in turns)


def test_the_doctor_knows_that_the_model_is_made_first(tmp_path: Path) -> None:
    from rollpacker.cli.trials import model
    from rollpacker.trainer.model import ModelError

    config = load_config("configs/guess.yaml", [f"model.path={tmp_path}/warm"], RunConfig)
    (found,) = model(config)
    assert found.level == "warn" and "configs/guess-warmup.yaml" in (found.cure or "")
    (tmp_path / "warm").mkdir()
    with pytest.raises(ModelError):  # something is there, and it is no model
        model(config)


def test_a_warmup_that_is_not_there_is_one_message_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"model.path={tmp_path}/warm", f"runs_dir={tmp_path}/runs", "warmup=nowhere.yaml"]
    assert main(["train", "configs/guess.yaml", *settings]) == 2
    assert capsys.readouterr().err.strip() == "rollpacker: nowhere.yaml: no such config file."
    assert not list(tmp_path.rglob("*"))


def test_the_configs_fit_together() -> None:
    for task in TASKS:
        run = load_config(f"configs/{task}.yaml", [], RunConfig)
        assert run.warmup == f"configs/{task}-warmup.yaml"
        assert warmup_config(task).output == run.model.path
