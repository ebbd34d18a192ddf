"""Whole runs over trajectories, with a tiny model and environments in processes of their own."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.bus import Bus
from rollpacker.cli.main import main
from rollpacker.cluster.seats import mailbox_seat as seats
from rollpacker.core.commands import LIMITS
from rollpacker.core.job.stay import Stay
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.report.log import EventLog
from rollpacker.run.ports.generation import Generation
from rollpacker.run.ports.reasons import Reasons
from rollpacker.run.replay import replay
from tests.cluster_phase.file_seat import sit, turns
from tests.dialogue.families import tokenizer_of

TALK = '''
import os, time
from pathlib import Path

class Talk:
    """A few questions, as many as the seed says."""

    deterministic = True

    def reset(self, row):
        self.turn, self.row = 0, row
        self.last = 2 + row["seed"] % 3
        return [{"role": "user", "content": f"Question {row['number']}."}]

    def step(self, message):
        self.turn += 1
        self.trouble()
        length = len(message["content"])
        asked = [{"role": "user", "content": f"{length} letters. And then?"}]
        return asked, length % 4 / 4, self.turn == self.last

    def trouble(self):
        pass

class RaisesAtReset(Talk):
    def reset(self, row):
        if row["number"] % 4 == 1:
            raise OSError("nobody is there")
        return super().reset(row)

class Raises(Talk):
    def trouble(self):
        if self.row["number"] % 4 == 1 and self.turn == 2:
            raise OSError("nobody is there")

class TalksLong(Talk):
    def reset(self, row):
        if row["number"] % 4 == 1:
            return [{"role": "user", "content": "word " * 100}]
        return super().reset(row)

class Refused(Talk):
    """Its second answer is none that a template knows."""

    def step(self, message):
        told, reward, done = super().step(message)
        if self.row["number"] % 4 == 1:
            told = [{"role": "nobody", "content": "x"}]
        return told, reward, False

def judge(completions, **kwargs):
    return [float(len(messages)) for messages in completions]

def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: The word.
    """
    return word * 2

class Toolbox:
    def reset(self, **columns):
        pass

    def spell(self, word: str) -> str:
        """Spell it.

        Args:
            word: The word.
        """
        return word

class Hangs(Talk):
    def trouble(self):
        if self.row["number"] % 4 == 1 and self.turn == 2:
            time.sleep(1000)

class Slow(Talk):
    """Some answer when the run has left its rollout pool, if it shares it."""

    def trouble(self):
        if self.row["number"] % 4 == 1 and self.turn == 1:
            while not self.is_left():
                time.sleep(0.01)

    def is_left(self):
        said = Path("seat/turns.jsonl")
        lines = said.read_text().splitlines() if said.exists() else []
        of_pool = [line for line in lines if '"pool": "rollout"' in line]
        return not of_pool or '"what": "left"' in of_pool[-1]

class Dies(Talk):
    def trouble(self):
        mark = Path(f"died-{self.row['number']}")
        if self.row["number"] % 4 == 1 and self.turn == 2 and not mark.exists():
            mark.touch()
            os._exit(1)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder)
    return folder


def save_model(
    folder: Path | str, *, family: str = "chatml", max_positions: int = 512, **sizes: int
) -> None:
    """A tiny one with random weights, that knows chat messages, and tools if its template does.
    `sizes`: of `Qwen2Config`, for one that is less tiny."""
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    tiny = {
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1},
    }
    config = Qwen2Config(
        **{**tiny, **sizes},
        vocab_size=len(tokenizer),
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    (tmp_path / "talk.py").write_text(TALK)
    rows = [{"prompt": f"Row {n}", "number": n} for n in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "talk",
        "model": {"path": str(model)},
        "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
        "environment": {"function": "talk.py:Talk", "max_turns": 4, "max_trajectory_tokens": 240},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_response_tokens": 24,
            "stop": ["a", "e", "i", "o", "t", "s"],
        },
        "rewards": [{"function": "environment"}],
        "train": {"steps": 3, "learning_rate": 1e-3},
        "tail_batching": {"enabled": False},
        "checkpoint": {"every_steps": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    return tmp_path


TOOLS = ('environment={tools: ["talk.py:look_up"]}', "rewards=[{function: talk.py:judge}]")


def train(*overrides: str) -> int:
    return main(["train", "run.yaml", *overrides])


def entries(folder: Path, name: str = "talk") -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def commands(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [c for one in found for c in one.get("commands", ()) if c["command"] == kind]


def metrics(folder: Path, name: str = "talk") -> list[dict[str, float]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row for row in rows if "train/response_tokens" in row]


def trained(found: list[dict[str, Any]]) -> set[str]:
    return {s for one in commands(found, "TrainOn") for group in one["groups"] for s in group}


def weights(folder: Path, name: str) -> str:
    path = folder / "runs" / name / "checkpoints" / "step_000003" / "model" / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_reasons_that_differ_by_their_numbers_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons = Reasons(Bus(None, None, sinks=[]))  # type: ignore[arg-type]
    for pid in (17, 1234):
        reasons._tell(f"the environment: its process (pid {pid}) ended by itself")
    reasons._tell("the environment: it raised")
    assert [one.getMessage().split(" (")[0] for one in caplog.records] == [
        "no use for a sample: the environment: its process",
        "no use for a sample: the environment: it raised",
    ]


def test_trajectories_are_trained_on(folder: Path) -> None:
    """What the trainer says of the drawn tokens is what the engine said of them, turn by turn."""
    assert train("tail_batching.enabled=true", "tail_batching.prompt_factor=1.5") == 0
    found, rows = entries(folder), metrics(folder)
    assert len(rows) == 3
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["episodes/turns/max"] > 1
        assert row["episodes/kept_tokens/mean"] > 0 == row["episodes/recomputed_tokens/mean"]
    concluded = [one["sample"] for one in commands(found, "Conclude")]
    assert len(concluded) == len(set(concluded)) and trained(found) <= set(concluded)
    assert {one["reason"] for one in commands(found, "Conclude")} >= {"done"}
    assert commands(found, "Continue")
    check_samples(folder, found)
    check_summary(folder, found)


def test_the_report_counts_the_turns_that_the_metrics_count(folder: Path) -> None:
    """Messages too that the trajectory's limit cut off, which no environment was given."""
    assert train("environment.max_trajectory_tokens=40") == 0
    found = entries(folder)
    turns = Counter(one["sample"] for one in found if one.get("event") == "SampleGenerated")
    acts = Counter(one["sample"] for one in commands(found, "Act") if one["turn"])
    cut_off = [s for s in turns if turns[s] > acts[s]]
    reasons = {one["sample"]: one["reason"] for one in commands(found, "Conclude")}
    assert "tokens" in {reasons[sample] for sample in cut_off}
    told = json.loads((folder / "runs" / "talk" / "summary.json").read_text())["episodes"]
    assert told["mean_turns"] == pytest.approx(turns.total() / told["trajectories"])
    of_steps = [row["episodes/turns/mean"] for row in metrics(folder)]
    assert told["mean_turns"] == pytest.approx(sum(of_steps) / len(of_steps))


def check_samples(folder: Path, found: list[dict[str, Any]]) -> None:
    """Every token that was drawn or given stands in the dialogue of its sample."""
    drawn, given = Counter[str](), Counter[str]()
    for one in found:
        if one.get("event") == "SampleGenerated":
            drawn[one["sample"]] += one["num_tokens"]
        if one.get("event") == "Acted" and not one["is_over"]:
            given[one["sample"]] += one["num_tokens"]
    rows = pyarrow.parquet.read_table(folder / "runs" / "talk" / "samples").to_pylist()
    assert {row["sample_id"] for row in rows if row["trained"]} == trained(found)
    for row in rows:
        told, sample = json.loads(row["dialogue"]), row["sample_id"]
        assert row["num_tokens"] == drawn[sample]
        assert sum(num for is_drawn, num, _ in told["tokens"] if is_drawn) == drawn[sample]
        shown = sum(num for is_drawn, num, _ in told["tokens"] if not is_drawn)
        # What stands behind a turn at whose end a limit was reached is no part of it.
        assert shown == given[sample] or row["finish_reason"] in LIMITS
        assert sum(turn["reward"] or 0 for turn in told["turns"]) == row["reward/environment"]
        assert told["begin"][0]["content"].startswith("Question ")
        assert all(turn["policy_s"] > 0 for turn in told["turns"])


def check_summary(folder: Path, found: list[dict[str, Any]]) -> None:
    summary = json.loads((folder / "runs" / "talk" / "summary.json").read_text())
    told = summary["episodes"]
    concluded = commands(found, "Conclude")
    assert told["ended"] == Counter(one["reason"] for one in concluded)
    acted = [one for one in found if one.get("event") == "Acted" and not one["cause"]]
    assert told["sources"]["train"]["answers"] == len(acted)
    assert told["sources"]["train"]["longest_s"] == max(one["seconds"] for one in acted)
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"])


def test_a_resumed_run_is_the_uninterrupted_one(folder: Path) -> None:
    assert train("name=whole") == 0
    assert train("name=parts", "train.steps=2") == 0
    assert train("name=parts", "--resume", "train.steps=3") == 0
    assert weights(folder, "parts") == weights(folder, "whole")


def test_an_episode_that_hangs_is_no_zero(folder: Path) -> None:
    """Its samples are never judged; the others are, and the run goes on."""
    assert train("environment.function=talk.py:Hangs", "environment.timeout_s=2") == 0
    found = entries(folder)
    acted = [one for one in found if one.get("event") == "Acted"]
    hung = {one["sample"] for one in acted if one["cause"] == "deadline"}
    assert hung
    assert not hung & {one["sample"] for one in found if one.get("event") == "SampleScored"}
    assert not hung & trained(found)
    assert len(metrics(folder)) == 3


def test_a_lost_process_costs_no_trajectory(folder: Path) -> None:
    """The environment says that it is deterministic: what was lost is played again."""
    assert train("environment.function=talk.py:Dies", "environment.workers=2") == 0
    found = entries(folder)
    lost = [one for one in found if one.get("cause") == "infrastructure"]
    assert lost and {one["sample"] for one in lost} <= trained(found)
    assert len(trained(found)) == 3 * 4 * 2


@pytest.mark.parametrize("name", ["RaisesAtReset", "Raises", "TalksLong", "Refused"])
def test_what_fails_is_no_zero_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    left = []

    async def close(self: Any) -> None:
        left.append(set(self._episodes))
        await closing(self)

    closing = SupervisedEnvironments.close
    monkeypatch.setattr(SupervisedEnvironments, "close", close)
    if name == "Refused":
        path = folder / "model"
        shutil.copytree(json.loads((folder / "run.yaml").read_text())["model"]["path"], path)
        template = path / "chat_template.jinja"
        known = "{% if messages[-1].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
        template.write_text(known + template.read_text())
    more = ("model.path=model",) if name == "Refused" else ()
    assert train(f"environment.function=talk.py:{name}", *more) == 0
    found = entries(folder)
    acted = [one for one in found if one.get("event") == "Acted"]
    cause = "prompt" if name == "TalksLong" else "environment"
    failed = {one["sample"] for one in acted if one["cause"] == cause}
    assert failed and not failed & trained(found)
    assert not failed & {one["sample"] for one in found if one.get("event") == "SampleScored"}
    assert len(metrics(folder)) == 3
    assert left and not left[0]
    assert "no use for a sample: the environment: " in caplog.text


def test_tools_are_told_of_and_a_message_without_a_call_is_the_last(folder: Path) -> None:
    assert train(*TOOLS, "data.train.chat=true", "data.max_prompt_tokens=300") == 0
    found = entries(folder)
    reasons = [one["reason"] for one in commands(found, "Conclude")]
    assert reasons.count("done") > len(reasons) / 2  # now and then a call is begun, and not ended
    rows = list((folder / "runs" / "talk" / "samples").glob("*.parquet"))
    prompts = pyarrow.parquet.read_table(rows[0]).column("rendered_prompt").to_pylist()
    assert all("look_up" in prompt for prompt in prompts)


def test_evaluations_are_played_and_all_their_generation_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    collect = Generation.collect

    async def timed(self: Generation, requests: Any) -> Any:
        began_s = time.monotonic()
        found = await collect(self, requests)
        told.append(time.monotonic() - began_s)
        return found

    monkeypatch.setattr(Generation, "collect", timed)
    assert train("data.eval_fraction=0.2", "train.steps=1") == 0
    notes = [one for one in entries(folder) if one.get("note") == "evaluation"]
    assert len(notes) == 2 and len(told) > 2
    assert all(one["metrics"]["eval/reward"] >= 0 for one in notes)
    generated = sum(one["metrics"]["timing_s/testing_gen"] for one in notes)
    # All of it, and nothing twice; what the loop does between calls is the machine's.
    assert 0.999 * sum(told) <= generated <= sum(one["seconds"] for one in notes)


def test_an_evaluation_keeps_its_pool_until_all_turns_are_drawn(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "open_seat", seats.open_seat)
    monkeypatch.setenv(seats.SEAT_VARIABLE, "")
    sit(folder / "seat", "talk")
    assert train("data.eval_fraction=0.2", "train.steps=1", "train.processes=1") == 0
    entered = [one for one in turns(folder / "seat") if one["what"] == "entered"]
    purposes = [one["purpose"] for one in entered if one["pool"] == "rollout"]
    assert purposes == ["start", "evaluation", "round", "evaluation"]


def test_a_round_leaves_its_pool_to_others_while_its_environments_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes what it would without; the log says so again."""
    slow = "environment.function=talk.py:Slow", "train.processes=1"
    assert train("name=alone", *slow) == 0
    monkeypatch.setattr(seats, "open_seat", seats.open_seat)
    monkeypatch.setenv(seats.SEAT_VARIABLE, "")
    make = Stay.__init__

    def make_trained(self: Stay) -> None:
        """How long a training takes on this machine is not the matter."""
        make(self)
        self._trained_s = 0.1

    monkeypatch.setattr(Stay, "__init__", make_trained)
    monkeypatch.setattr(Stay, "trained", lambda self, now_s: None)
    sit(folder / "seat", "talk")
    assert train(*slow) == 0
    entered = [one for one in turns(folder / "seat") if one["what"] == "entered"]
    assert "turns" in [one["purpose"] for one in entered if one["pool"] == "rollout"]
    found = entries(folder)
    held = [one for one in found if one.get("event") == "Entered" and commands([one], "Continue")]
    assert held, "continuations were held back"
    assert trained(found) == trained(entries(folder, "alone"))
    assert weights(folder, "talk") == weights(folder, "alone")
    told = replay(EventLog(folder / "runs" / "talk" / "events.jsonl"))
    assert told.difference is None and told.num_steps == 3


def test_a_dry_run_shows_the_prompt_with_its_tools(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "data.max_prompt_tokens=250"
    assert train(*TOOLS, "data.train.chat=true", long, "--dry-run") == 0
    told = capsys.readouterr().out
    assert "environment  look_up; tools: look_up" in told
    assert '"name": "look_up"' in told[told.index("first prompt") :]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ('environment={tools: ["talk.py:look_up", "talk.py:look_up"]}', "names a tool twice"),
        ('environment={tools: ["nofile.py:f"]}', "nofile.py"),
        ("data.train.chat=false", "set data.train.chat=true"),
        ("environment={function: talk.py:Tolk}", "Talk"),
        ("environment={function: talk.py:Talk, arguments: {x: 1}}", "making one raised TypeError"),
    ],
)
def test_a_dry_run_looks_at_tools_and_environments(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    long = "data.max_prompt_tokens=250"
    assert train(*TOOLS, "data.train.chat=true", long, override, "--dry-run") == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_environment_is_another_run(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert train("train.steps=1") == 0
    assert train("--resume", "train.steps=2", "environment.max_turns=3") == 2
    assert "environment.max_turns: 4 -> 3" in capsys.readouterr().err
    (folder / "talk.py").write_text(TALK.replace("% 4 / 4", "% 5 / 5"))
    assert train("--resume", "train.steps=2", "environment.workers=1") == 0
    assert "the code of the environment talk.py:Talk changed" in caplog.text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment=null", "the reward environment is what an environment says"),
        ("environment.function=null", "must name tools or a function"),
        ("environment.function=talk.py:Tolk", "Talk"),
        (
            'environment={tools: ["talk.py:look_up"]}',
            "rewards: the reward environment is what an environment says, and tools alone say none",
        ),
        ("environment.function=talk.py:Toolbox", "Toolbox has neither a method step nor get_rew"),
        (
            "tail_batching={enabled: true, carry: weighted}"
            "\nalgorithm={mismatch_correction: token-mask}",
            "tail_batching.carry=weighted does not go with environment",
        ),
        (
            "environment={function: talk.py:Talk}\ndata.max_prompt_tokens=600",
            "leaves 0 tokens of the model's context",
        ),
        ("environment.max_trajectory_tokens=460", "leaves 448 tokens of the model's context"),
        (
            "environment.timeout_s=400",
            "must be at least twice environment.timeout_s",
        ),
    ],
)
def test_what_does_not_go_together(
    folder: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert train(*override.split("\n")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "runs").exists()
