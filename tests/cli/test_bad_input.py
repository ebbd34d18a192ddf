"""What a new user does wrong, through the command line: one message, the right exit code, no
traceback, nothing lost, nothing left behind.

A model of a few thousand parameters; most cases run in this process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.cli.main import main
from rollpacker.run.folder import checkpoint as checkpoints
from rollpacker.trainer.learner import Learner
from rollpacker.trainer.losses import losses_of
from rollpacker.trainer.model import new_model, write_character_tokenizer
from rollpacker.trainer.outcome import StepOutcome

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
GOOD = "def f(completions, **columns):\n    return [float(len(c) % 7) for c in completions]\n"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("bad_input") / "model"
    tokenizer = write_character_tokenizer("0123456789+=abc", folder)
    new_model(ARCHITECTURE, tokenizer, seed=0).save_pretrained(folder)
    return folder


@dataclass
class Command:
    """Runs `rollpacker` on a config in a folder of its own."""

    folder: Path
    capsys: Any
    settings: dict[str, Any]
    err: str = ""
    out: str = ""

    def config(self, **changes: Any) -> Path:
        """The config file; `data__train__path=x` sets `data.train.path`, None removes."""
        plain = json.loads(json.dumps(self.settings))
        for key, value in changes.items():
            *parts, last = key.split("__")
            at = plain
            for part in parts:
                at = at.setdefault(part, {})
            if value is None:
                del at[last]
            else:
                at[last] = value
        path = self.folder / "run.yaml"
        path.write_text(json.dumps(plain))
        return path

    def __call__(self, *arguments: object) -> int:
        """The exit code; a traceback fails the test."""
        code = main([str(argument) for argument in arguments])
        self.out, self.err = self.capsys.readouterr()
        assert "Traceback" not in self.err
        return code

    def train(self, *options: str, **changes: Any) -> int:
        return self("train", self.config(**changes), *options)

    def refused(self, *options: str, **changes: Any) -> str:
        """The message of a start that is refused, with exit code 2, leaving no folder behind."""
        before = sorted(self.folder.glob("runs*/**"))
        assert self.train(*options, **changes) == 2
        assert self.err.startswith("rollpacker: "), self.err
        assert sorted(self.folder.glob("runs*/**")) == before
        return self.err

    def reward(self, code: str) -> dict[str, str]:
        (self.folder / "reward.py").write_text(code)
        return {"function": f"{self.folder / 'reward.py'}:f"}

    def rows(self, *lines: object) -> str:
        path = self.folder / "other.jsonl"
        path.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
        return str(path)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "tiny"

    def steps(self) -> int:
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def kept(self) -> list[str]:
        return sorted(p.name for p in (self.run / "checkpoints").iterdir() if p.is_dir())


@pytest.fixture
def command(tmp_path, capsys, model) -> Command:
    rows = [{"prompt": f"{n}+{n % 7}="} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = Command(tmp_path, capsys, {})
    command.settings = {
        "name": "tiny",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(model), "device": "cpu"},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 8},
        "train": {"steps": 3, "learning_rate": 1e-3, "threads": 1},
        "rewards": [command.reward(GOOD)],
        "checkpoint": {"every_steps": 1},
        "tail_batching": {"enabled": False},
    }
    return command


# What the config says.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.promts_per_step=3", 'Did you mean "prompts_per_step"?'),
        ("train.steps=2.5", "train.steps (override train.steps=2.5) is 2.5. Allowed: a whole"),
        ("train.learning_rate=.nan", "Allowed: a number"),
        ("data.shuffle=yes", "Allowed: true or false"),
        ("rollout.samples_per_prompt=1", "a group of one has nothing to compare with"),
        ("rewards.3.weight=1", "entries: 0 to 0"),
        ("train.steps", "expected key=value"),
        ("name=a/b", "plain folder name"),
        ("name=-rf", "plain folder name"),
        (f"name={'x' * 300}", "at most 200 bytes"),
        ('name="a\\nb"', "no control character"),
        ("name=${oc.env:HOME}", "nothing else"),
        ("model.path=/nope/model", "there is no such folder"),
        ("data.train.path=/nope/rows.jsonl", "/nope/rows.jsonl: no such file"),
        ("data.train.prompt_column=promt", 'Did you mean "prompt"?'),
        ("data.train.prompt_template={q}", "and 9 more"),
        ("data.max_prompt_tokens=1", "Nothing is left"),
        ("rollout.max_response_tokens=64", "no room for a prompt"),
        ("rewards.0.function=nope:f", "there is no module nope"),
        ("rewards.0.function=/nope/x.py:f", "there is no file /nope/x.py"),
        ("rewards.0.arguments={completions: 1}", "the run itself passes completions"),
        ("rewards.0.timeout_s=0", "must be more than 0"),
    ],
)
def test_a_mistake_in_the_config_is_refused_with_one_message(command, override, message):
    assert message in command.refused(override)


def test_a_config_file_that_is_none(command):
    assert command("train", command.folder / "nope.yaml") == 2
    assert "nope.yaml: no such config file." in command.err
    assert command("train", command.folder) == 2
    assert "is a folder" in command.err


def test_an_option_is_never_completed(command):
    """`--over` must not remove a run."""
    assert command("train", command.config(), "--over") == 2
    assert "unrecognized arguments: --over" in command.err


def test_a_missing_config_does_not_ask_for_overrides(command):
    assert command("train") == 2
    assert "config" in command.err and "key=value" not in command.err


# What the model's folder holds.


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", lambda text: "{}", "model_type"),
        ("config.json", lambda text: text.replace(": 16", ": 32"), "do not fit its config.json"),
        ("config.json", lambda text: "{", "is not a valid JSON"),
        ("model.safetensors", lambda data: data[: len(data) // 2], "cannot load the model"),
        ("model.safetensors", None, "no weights (*.safetensors)"),
        ("tokenizer.json", None, "a file of it is missing"),
        ("tokenizer.json", lambda text: "{}", "cannot load the tokenizer"),
    ],
)
def test_a_broken_model_folder(command, model, file, change, message):
    broken = shutil.copytree(model, command.folder / "broken")
    if change is None:
        (broken / file).unlink()
    elif file.endswith(".json"):
        (broken / file).write_text(change((broken / file).read_text()))
    else:
        (broken / file).write_bytes(change((broken / file).read_bytes()))
    assert message in command.refused(model__path=str(broken))


def test_weights_that_are_nan(command, model):
    from safetensors.torch import load_file, save_file

    broken = shutil.copytree(model, command.folder / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert "its weights hold NaN" in command.refused(model__path=str(broken))


# What the data hold.


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the dataset is empty"),
        (['{"prompt": "1+1="}', '{"prompt": '], "line 2: not valid JSON"),
        ([{"promt": "1+1="}], 'Did you mean "promt"?'),
        ([{"prompt": "1+1="}, {"prompt": 3}], "line 2: the prompt must be a text"),
        ([{"prompt": ""}], "line 1: the prompt is empty"),
        (['{"prompt": "\\ud800"}'], "a lone surrogate"),
        ([{"prompt": [{"role": "user", "content": "1"}]}], "no chat template"),
        ([{"prompt": "1"}, {"prompt": "1" * 60}], "line 2 (60)"),
    ],
)
def test_data_that_cannot_be_used(command, lines, message):
    assert message in command.refused(data__train__path=command.rows(*lines))


def test_a_few_prompts_that_are_too_long_are_left_out_and_located(command, caplog):
    lines = [{"prompt": f"{n}+1="} for n in range(20)] + [{"prompt": "1" * 60}]
    assert command.train(data__train__path=command.rows(*lines), train__steps=1) == 0
    assert "1 of 21 prompts have more than 56 tokens" in caplog.text
    assert "line 21 (60). They are left out" in caplog.text


# What the reward does.


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def f(:", "SyntaxError"),
        ("import nope_nope", "No module named 'nope_nope'"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("f = 3", "not a function"),
        ("def g(completions): return []", "has no f"),
        ("def f(): return []", "takes no parameter"),
        ("def f(completions, answr): return []", "needs the column answr"),
    ],
)
def test_a_reward_that_cannot_be_used(command, code, message):
    assert message in command.refused(rewards=[command.reward(code)])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise RuntimeError('boom')", "f raised RuntimeError: boom"),
        ("return [float('nan')] * len(completions)", "f returned nan, not a number"),
        ("return [1e308] * len(completions)", "larger than 1e+30"),
        ("raise SystemExit(0)", "SystemExit: 0"),
    ],
)
def test_a_reward_without_any_verdict_ends_the_run_and_says_why(command, body, message):
    entry = command.reward(f"def f(completions, **columns):\n    {body}\n")
    assert command.train(rewards=[{**entry, "timeout_s": 2.0}], train__steps=6) == 7
    assert "had no group to train on" in command.err and message in command.err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return ['1'] * len(completions)", "f returned '1', not a number"),
        ("return []", "f returned 0 values"),
        ("return 1.0", "not a list with one number per completion"),
        ("import time; time.sleep(60)", "f did not answer a test completion within timeout_s=0.5"),
        ("return [scoer(c) for c in completions]", "NameError"),
        ("return [float(c[-1]['content']) for c in completions]", "completions are texts (str)"),
    ],
)
def test_a_reward_that_no_response_could_please_is_refused_before_the_model_loads(
    command, body, message, monkeypatch
):
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("rollpacker.trainer.model.load_model", load_model)
    entry = command.reward(f"def f(completions, **columns):\n    {body}\n")
    assert message in command.refused(rewards=[{**entry, "timeout_s": 0.5}])


def test_a_reward_that_breaks_for_everybody_ends_the_run_which_goes_on_when_it_is_mended(
    command, caplog
):
    body = (
        "from pathlib import Path\n"
        "def f(completions, **columns):\n"
        "    if Path(__file__).with_name('broken').exists():\n"
        "        raise RuntimeError('the key has expired')\n"
        "    return [float(len(c) % 7) for c in completions]\n"
    )
    entry = {**command.reward(body), "max_failed_calls": 5}
    assert command.train(rewards=[entry], train__steps=2) == 0
    (command.folder / "broken").touch()
    assert command.train("--resume", rewards=[entry], train__steps=4) == 7
    assert "reward f gave no verdict in 5 calls in a row" in command.err
    assert "the key has expired" in command.err
    assert "Mend it under the same name, then go on with --resume" in command.err
    assert "no worker" not in caplog.text and "never retrieved" not in caplog.text
    command.reward(body.replace("exists()", "exists() and False"))
    assert command.train("--resume", rewards=[entry], train__steps=4) == 0
    assert command.steps() == 4


def test_a_reward_that_failed_can_be_mended_and_the_run_resumed(command):
    broken = command.reward("def f(completions, **columns): raise RuntimeError('boom')\n")
    assert command.train(rewards=[broken], train__steps=5) == 7
    command.reward(GOOD)
    assert command.train("--resume", train__steps=5) == 0
    assert command.steps() == 5
    assert command("replay", command.run) == 0


def test_a_reward_that_fails_now_and_then_is_left_out(command, caplog):
    code = (
        "def f(completions, **columns):\n"
        "    return [None if len(c) % 5 == 0 else float(len(c)) for c in completions]\n"
    )
    assert command.train(rewards=[command.reward(code)], rollout__samples_per_prompt=6) == 0
    assert "returned None" in caplog.text
    summary = json.loads((command.run / "summary.json").read_text())
    left_out = sum(summary["samples"]["no_verdict"].values())
    assert 0 < left_out == summary["samples"]["launched"] - summary["samples"]["trained"]


def test_a_failing_reward_shows_the_users_lines_and_not_ours(command, caplog):
    code = "def f(completions, **columns):\n    return [1 / 0 for c in completions]\n"
    assert command.train(rewards=[command.reward(code)]) == 7
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert "return [1 / 0 for c in completions]" in told
    assert "functions.py" not in told and "calls.py" not in told


# NaN.


def test_nan_in_the_loss_names_the_step_and_keeps_the_checkpoint(command, monkeypatch):
    calls = []

    def poisoned(outputs, samples, *, config):
        result = losses_of(outputs, samples, config=config)
        calls.append(1)
        if len(calls) not in (3, 4):  # the third step's, and when it is computed once more
            return result
        return dataclasses.replace(result, losses=[loss * torch.nan for loss in result.losses])

    monkeypatch.setattr("rollpacker.trainer.learner.losses_of", poisoned)
    assert command.train() == 3
    assert command.err.startswith("rollpacker: step 3: the loss is nan")
    assert "no update was applied" in command.err
    assert command.kept() == ["step_000001", "step_000002"]
    assert command.train("--resume") == 0
    assert command.steps() == 3
    assert command("replay", command.run) == 0


def test_an_update_that_spoils_the_weights(command, monkeypatch):
    """A finite gradient whose update overflows. Done by hand: which learning rate does it depends
    on the machine's kernels."""
    apply = Learner.apply

    def spoil(learner: Learner) -> StepOutcome:
        outcome = apply(learner)
        next(learner.model.parameters()).data.fill_(float("nan"))
        return outcome

    monkeypatch.setattr(Learner, "apply", spoil)
    assert command.train() == 3
    assert "step 2: " in command.err and "remove" in command.err
    assert command.kept() == ["step_000001"]


# Disks and folders.


def test_a_full_disk_leaves_no_half_checkpoint(command, monkeypatch):
    original = checkpoints.fsync

    def full(path: Path) -> None:
        if "step_000002" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(path)

    monkeypatch.setattr(checkpoints, "fsync", full)
    assert command.train() == 5
    assert command.err == (
        f"rollpacker: {command.run}: the disk is full. Free some space and try again "
        "(a run goes on with --resume)\n"
    )
    assert command.kept() == ["step_000001"]
    monkeypatch.undo()
    assert command.train("--resume") == 0
    assert command.kept() == ["step_000002", "step_000003"]


def test_a_file_where_a_folder_is_wanted(command):
    (command.folder / "file").write_text("")
    assert "a file is in the way" in command.refused(runs_dir=str(command.folder / "file"))
    assert command.train(runs_dir=str(command.folder / ("y" * 300))) == 5
    assert "too long for the file system" in command.err


def test_two_runs_in_one_folder(command):
    from rollpacker.run.folder.run_folder import RunFolder

    first = RunFolder(command.run, resume=False, overwrite=False)
    for option in ((), ("--resume",), ("--overwrite",)):
        assert command.train(*option) == 75  # EX_TEMPFAIL: no mistake, try again later
        assert "another run is at work" in command.err
    first.close()
    assert not command.run.exists()
    assert command.train(train__steps=1) == 0


def test_names_with_spaces_a_home_folder_and_another_working_folder(command, monkeypatch):
    (command.folder / "in here").mkdir()
    monkeypatch.chdir(command.folder)
    monkeypatch.setenv("HOME", str(command.folder / "in here"))
    changes = {"runs_dir": "~/my runs", "data__train__path": "rows.jsonl", "train__steps": 1}
    assert command.train(**changes, rewards=[{"function": "reward.py:f"}]) == 0
    assert (command.folder / "in here" / "my runs" / "tiny" / "summary.json").is_file()
    assert not (command.folder / "~").exists()


# Resuming.


def test_resuming_what_is_another_run(command, model):
    assert "there is no run to resume" in command.refused("--resume")
    copy = shutil.copytree(model, command.folder / "model")
    at = {"model__path": str(copy)}
    assert command.train(**at) == 0
    assert "already holds a run" in command.refused(**at)
    assert "exclude each other" in command.refused("--resume", "--overwrite", **at)
    assert "seed: 0 -> 1" in command.refused("--resume", seed=1, **at)
    assert "model.path" in command.refused("--resume")
    at["train__steps"] = 4
    rows = command.folder / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text + '{"prompt": "9+9="}\n')
    assert "the training data changed" in command.refused("--resume", **at)
    rows.write_text(text)
    with (copy / "tokenizer_config.json").open("a") as file:
        file.write("\n")
    assert "tokenizer's files changed" in command.refused("--resume", **at)
    assert command.steps() == 3


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("option", ["--resume", "--resume=auto"])
def test_resuming_after_the_end_changes_nothing(command, monkeypatch, caplog, option):
    """The times of the last save and of the end were lost, and the table was another."""
    assert command.train() == 0
    before, table = contents(command.run), command.out[command.out.index(" rounds ") :]
    with monkeypatch.context() as patched:
        patched.setattr("rollpacker.run.parts.policy.load_inputs", None)  # nothing is loaded
        assert command.train(option) == 0
        assert command.train(option, train__steps=2) == 0
    assert "nothing was left to do: every step is done" in caplog.text
    assert command.out.endswith(table) and contents(command.run) == before
    assert "seed: 0 -> 1" in command.refused(option, seed=1)
    (command.run / "summary.json").unlink()  # it was killed before that
    assert command.train(option) == 0
    assert contents(command.run).keys() == before.keys()
    assert command.train(option, train__steps=4) == 0
    assert command.steps() == 4


def test_a_resume_that_drops_what_the_command_line_said_is_loud(command, caplog):
    """`train.steps=60` was given once, and the file says 3."""
    assert command.train(train__steps=4) == 0
    log = command.run / "events.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))  # as if killed
    caplog.clear()
    assert command.train("--resume", train__steps=3) == 0
    assert "train.steps was 4 when the run stopped after step 4 and is 3 now" in caplog.text
    assert "give train.steps=4 again" in caplog.text
    caplog.clear()
    assert command.train("--resume", train__steps=5) == 0
    assert "give train.steps" not in caplog.text


def test_another_config_is_refused_before_anything_is_loaded(command, monkeypatch):
    assert command.train() == 0
    monkeypatch.setattr("rollpacker.run.parts.policy.load_inputs", None)
    assert "seed: 0 -> 1" in command.refused("--resume", seed=1, train__steps=9)


def test_resuming_after_damage(command, caplog):
    assert command.train() == 0
    newest = command.run / "checkpoints" / "step_000003" / "model" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\x55")
    assert command.train("--resume", train__steps=4) == 0
    assert "damaged: step_000003: model/model.safetensors" in caplog.text
    assert "using" in caplog.text and "step_000002 instead" in caplog.text
    assert command.steps() == 4
    for folder in command.kept():
        (command.run / "checkpoints" / folder / "manifest.json").unlink()
    assert "no usable checkpoint" in command.refused("--resume", train__steps=5)


@pytest.mark.parametrize("file", ["identity.json", "config.yaml", "events.jsonl"])
def test_resuming_without_a_file_of_the_run(command, file):
    assert command.train(train__steps=1) == 0
    (command.run / file).unlink()
    assert file in command.refused("--resume", train__steps=2)
    assert "--overwrite" in command.err
    assert command.train("--overwrite", train__steps=1) == 0


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_at_the_steps_end_with_a_checkpoint(command, number):
    assert command.train(rewards=[command.reward(_once(int(number)))], train__steps=50) == 130
    assert "Finishing this step, then saving" in command.err
    assert "Interrupted. The same command with --resume" in command.err
    assert command.kept() == ["step_000001"]
    assert command.steps() == 1
    assert command.train("--resume", train__steps=2) == 0
    assert command.steps() == 2


CONTROLLER = """
import os, subprocess

def controller():
    # The parent of the guardian, which is the parent of this worker.
    asked = ["ps", "-o", "ppid=", "-p", str(os.getppid())]
    return int(subprocess.run(asked, capture_output=True, text=True).stdout)
"""


def _once(number: int) -> str:
    """A reward that sends the controller one signal, whichever of its workers is first, once the
    run is under way and not while it is tried out (no response of the tiny model reads so)."""
    return CONTROLLER + (
        "def f(completions, **columns):\n"
        "    if 'This is a test' in completions[0]:\n"
        "        return [0.0 for c in completions]\n"
        "    if not os.path.exists(__file__ + '.sent'):\n"
        "        open(__file__ + '.sent', 'w').close()\n"
        f"        os.kill(controller(), {number})\n"
        "    return [float(len(c) % 7) for c in completions]\n"
    )


TWICE = f"""
{CONTROLLER}
import signal, time
from pathlib import Path

def f(completions, **columns):
    if (Path(__file__).parent / "runs/tiny/checkpoints/latest").exists():
        os.kill(controller(), signal.SIGINT)
        while "Finishing this step" not in (Path(__file__).parent / "said").read_text():
            time.sleep(0.02)  # two signals at once may be one
        os.kill(controller(), signal.SIGINT)
        time.sleep(60)
    return [float(len(c) % 7) for c in completions]
"""


def test_a_second_ctrl_c_ends_at_once_and_the_run_can_be_resumed(command):
    config = command.config(rewards=[command.reward(TWICE)])
    with (command.folder / "said").open("w") as said:
        done = subprocess.run(
            [sys.executable, "-m", "rollpacker.cli.main", "train", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=said,
            timeout=100,
        )
    err = (command.folder / "said").read_text()
    assert done.returncode == 130
    assert "Ended at once; --resume goes on" in err and "Traceback" not in err
    assert command("report", command.run) == 0
    assert command("replay", command.run) == 0
    assert command.kept() == ["step_000001"]
    assert command.train("--resume", rewards=[command.reward(GOOD)]) == 0
    assert not list(command.run.rglob("*.tmp*"))


def test_a_reader_of_the_output_that_leaves(command, monkeypatch, caplog):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["train", str(command.config())]) == 0
    assert command.steps() == 3
    assert caplog.text.count("standard output: Broken pipe; the run goes on without") == 1


def test_a_full_disk_under_the_output_is_not_the_runs(command, monkeypatch, caplog):
    with Path("/dev/full").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert main(["train", str(command.config())]) == 0
    assert command.steps() == 3
    assert caplog.text.count("standard output: No space left on device") == 1


def test_checkpoints_that_are_out_of_sight_are_no_reason_to_begin_anew(command):
    assert command.train() == 0
    shutil.move(command.run / "checkpoints", command.folder / "away")
    log = (command.run / "events.jsonl").read_bytes()
    for make in (lambda: None, lambda: (command.run / "checkpoints").mkdir()):
        make()
        assert command.train("--resume", train__steps=4, seed=7) == 2
        assert "tells of a checkpoint, but there is none in" in command.err
    assert (command.run / "events.jsonl").read_bytes() == log
    (command.run / "checkpoints").rmdir()
    (command.run / "checkpoints").symlink_to(command.folder / "away")
    assert command.train("--resume", train__steps=4) == 0
    assert command.steps() == 4
    assert command.train("--overwrite", train__steps=2) == 0
    assert (command.run / "checkpoints").is_symlink() and command.steps() == 2


# The other verbs.


def test_targets_that_cannot_be_evaluated(command, model):
    for target, message in (
        (command.folder / "nope", "there is no run or model at"),
        (command.folder, "is no run's folder"),
        (model, "say with --task"),
    ):
        assert command("eval", target) == 2
        assert message in command.err
    assert command("eval", model, "--task", "chain_sm", "rollout.max_response_tokens=8") == 2
    assert 'Did you mean "chain_sum"?' in command.err
    assert command("eval", model, "-k", "0") == 2


def test_logs_that_cannot_be_replayed(command):
    assert command.train(train__steps=2) == 0
    log = command.run / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    for content, code, message in (
        (b"".join(lines)[:-20], 0, "cut short"),
        (b"".join(lines[1:]), 2, "does not begin with a session"),
        (b"".join(lines[:6] + lines[5:]), 1, "event"),
        (b"".join([*lines[:5], b"\xff\n", *lines[5:]]), 2, "line 6"),
        (b"[" * 100_000 + b"\n", 2, "line 1"),
        (b"", 2, f"{log}: the log is empty"),
    ):
        log.write_bytes(content)
        assert command("replay", log) == code
        assert message in command.out + command.err


def test_a_report_that_cannot_be_written(command):
    assert command.train(train__steps=1) == 0
    assert command("report", command.run, "--out", command.folder / "run.yaml") == 5
    assert "is in the way" in command.err
    assert command("report", command.run, "--steps", "99") == 2
    assert "no finished step 99" in command.err


def test_a_dry_run_loads_and_writes_nothing(command):
    command.config()
    before = sorted(command.folder.rglob("*"))
    assert command.train("--dry-run", model__path="/nope", data__train__path="/nope") == 0
    assert "is not on this machine" in command.out
    assert sorted(command.folder.rglob("*")) == before


def test_a_dry_run_and_a_run_refuse_a_reward_that_names_no_place(command):
    for options in (["--dry-run"], []):
        assert command.train(*options, rewards=[{"function": "my_reward.digits"}]) == 2
        assert 'Did you mean "my_reward:digits"?' in command.err
    assert command.train("--dry-run", rewards=[{"function": "maths"}]) == 2
    assert 'Did you mean "math"?' in command.err


def test_what_changes_nothing_in_a_run_is_said(command, caplog):
    said = "stream_trainer.kinds, stream_trainer.window: without effect"
    changes = {"stream_trainer__kinds": ["plain"], "stream_trainer__window": [0.3, 0.5]}
    assert command.train("--dry-run", **changes) == 0
    assert said in command.out
    assert command.train(**changes) == 0
    assert caplog.text.count(said) == 1
    assert command.train("--dry-run", stream_trainer__max_share=0.5) == 0
    assert "without effect" not in command.out


def test_the_dry_run_knows_whose_sources_are_balanced(command):
    said = "balance_sources changes nothing"
    tail = {"enabled": True, "balance_sources": True}
    assert command.train("--dry-run", tail_batching=tail) == 0
    assert said in command.out
    config = Path(__file__).parents[2] / "configs" / "mixed-7b.yaml"
    assert command("train", config, "--dry-run") == 0
    assert said not in command.out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": [{"path": "rows.jsonl", "steps": 0}]}, "steps (line 1) must be at least 1"),
        ({"stages": [{"path": "nope.jsonl", "steps": 1}]}, "No such file"),
        ({"alphabet": "00"}, "more than once"),
        ({"architecture": {**ARCHITECTURE, "hiden_size": 3}}, "did you mean 'hidden_size'"),
        ({"architecture": {**ARCHITECTURE, "num_attention_heads": 5}}, "architecture"),
    ],
)
def test_a_warm_up_that_fails_keeps_the_model_that_it_was_to_replace(command, change, message):
    stage = {"path": str(command.folder / "pairs.jsonl"), "steps": 2, "batch_size": 2}
    Path(stage["path"]).write_text('{"prompt": "1+1=", "completion": "2"}\n')
    good = {
        "output": str(command.folder / "warm"),
        "architecture": ARCHITECTURE,
        "alphabet": "0123456789+=",
        "stages": [stage],
        "threads": 1,
    }
    config = command.folder / "warmup.yaml"
    config.write_text(json.dumps(good))
    assert command("warmup", config) == 0
    assert command("warmup", config) == 2
    assert "--overwrite replaces a model" in command.err
    config.write_text(json.dumps({**good, **change}))
    assert command("warmup", config, "--overwrite") == 2
    assert message in command.err
    assert (command.folder / "warm" / "model.safetensors").is_file()
    assert sorted(p.name for p in command.folder.glob("warm*")) == ["warm", "warmup.yaml"]
