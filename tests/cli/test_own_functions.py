"""`algorithm.loss_function`, `advantage_function` and `train.updates_per_round` through the command
line: in every process, checked at the start, resumed exactly."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from rollpacker.run.folder.checkpoint import newest_checkpoint
from tests.cli.test_bad_input import Command, command, model

__all__ = ["command", "model"]

LOSS = (
    "def f(log_probs, old_log_probs, advantages):\n"
    "    return -log_probs * advantages, {'mine': old_log_probs * 0 + 0.25}\n"
)


def loss(command: Command, code: str = LOSS) -> str:
    (command.folder / "own.py").write_text(code)
    return f"{command.folder / 'own.py'}:f"


def rows(command: Command) -> list[dict]:
    return [json.loads(line) for line in (command.run / "metrics.jsonl").read_text().splitlines()]


def weights(command: Command) -> dict:
    newest = newest_checkpoint(command.run / "checkpoints")
    return load_file(newest.folder / "model" / "model.safetensors")


@pytest.mark.parametrize("processes", [None, 1, 2])
def test_a_loss_is_called_wherever_training_is(command, processes):
    changes = {"train__updates_per_round": 2}
    if processes is not None:
        changes["train__processes"] = processes
    assert command.train(algorithm__loss_function=loss(command), **changes) == 0, command.err
    assert {row["actor/mine"] for row in rows(command)} == {0.25}
    assert all("actor/clip_ratio_low" not in row for row in rows(command))


def test_a_wrong_loss_is_refused_at_the_start_and_in_a_dry_run(command):
    wrong = loss(command, "def f(log_prob):\n    return log_prob\n")
    said = command.refused(algorithm__loss_function=wrong)
    assert 'no argument log_prob to give it. Did you mean "log_probs"' in said
    assert command.train("--dry-run", algorithm__loss_function=wrong) == 2
    assert "no argument log_prob" in command.err


def test_own_functions_are_named_at_the_start_and_in_a_dry_run(command):
    spec = loss(command)
    told = f"algorithm grpo with loss_function={spec}"
    assert command.train("--dry-run", algorithm__loss_function=spec) == 0
    assert told in command.out.splitlines()[1]
    assert command.train(algorithm__loss_function=spec, train__steps=1) == 0
    assert told in command.out


def test_doctor_tries_it_too(command):
    wrong = loss(command, "def f(log_probs):\n    return log_probs.mean()\n")
    assert command("doctor", command.config(algorithm__loss_function=wrong)) != 0
    assert "a loss of shape () for 8 tokens" in " ".join((command.out + command.err).split())


def test_a_changed_file_is_said_at_a_resume(command, caplog):
    spec = loss(command)
    assert command.train(algorithm__loss_function=spec, train__steps=1) == 0
    loss(command, LOSS.replace("0.25", "0.5"))
    assert command.train("--resume", algorithm__loss_function=spec, train__steps=2) == 0
    assert "the code of algorithm.loss_function changed since the run began" in caplog.text
    assert [row["actor/mine"] for row in rows(command)] == [0.25, 0.5]
    assert command.train("--resume", algorithm__loss_function=spec, train__steps=2) == 0


def test_a_streamed_run_refuses_an_advantage_that_compares_groups(command):
    own = loss(command, "def f(rewards):\n    return rewards - rewards.mean()\n")
    said = command.refused(
        algorithm__advantage_function=own,
        stream_trainer={"enabled": True, "reward_wait": True},
    )
    assert "compares the groups of a step" in said


def test_updates_must_divide_the_prompts_and_do_not_stream(command):
    prompts = command.settings["rollout"]["prompts_per_step"]
    said = command.refused(train__updates_per_round=prompts + 1)
    assert f"({prompts + 1}) must divide rollout.prompts_per_step" in said
    said = command.refused(
        train__updates_per_round=2, stream_trainer={"enabled": True, "reward_wait": True}
    )
    assert "does not go with train.updates_per_round above 1" in said


def test_a_run_with_two_updates_is_resumed_bit_for_bit(command):
    changes = {"train__updates_per_round": 2, "train__learning_rate": 1e-2}
    assert command.train(**changes, train__steps=4, name="tiny") == 0, command.err
    whole, expected = rows(command), weights(command)
    assert all(row["train/updates"] == 2 for row in whole)
    assert any(row["actor/ratio/mean/update_2"] != 1 for row in whole)
    assert all(row["actor/ratio/mean/update_1"] == 1 for row in whole)
    assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in whole)
    assert command.train("--overwrite", **changes, train__steps=2) == 0
    assert command.train("--resume", **changes, train__steps=4) == 0, command.err
    found = weights(command)
    assert all((found[name] == value).all() for name, value in expected.items())
    steps = [(row["step"], row["actor/loss"], row["actor/ppo_kl"]) for row in rows(command)]
    assert steps == [(row["step"], row["actor/loss"], row["actor/ppo_kl"]) for row in whole]


def test_the_dry_run_says_the_updates(command):
    assert command.train("--dry-run", train__updates_per_round=2) == 0
    prompts = command.settings["rollout"]["prompts_per_step"]
    assert f"2 updates of {prompts // 2} prompts each" in command.out


def test_what_the_algorithm_comes_to_is_said(command):
    """A file's own switch stays where only the name is changed."""
    kept = {"algorithm__loss_aggregation": "sequence-mean-token-mean", "train__steps": 1}
    said = (
        "algorithm dr_grpo with loss_aggregation=sequence-mean-token-mean (its row: fixed-length)"
    )
    for option in ("--dry-run", "--overwrite"):
        assert command.train(option, **kept, algorithm__name="dr_grpo") == 0, command.err
        assert command.out.count(said) == 1, command.out
    assert command("doctor", command.folder / "run.yaml") == 0
    assert said in command.out
    command.config(algorithm__name="dr_grpo")
    assert command("train", command.folder / "run.yaml", "--dry-run") == 0
    assert "  algorithm dr_grpo\n" in command.out
    assert command("train", command.folder / "run.yaml", "--overwrite") == 0
    assert "algorithm dr_grpo" not in command.out, "a row as it is needs no line"


def test_an_own_row_is_what_its_switches_are_told_against(command):
    (command.folder / "row.py").write_text(
        "from rollpacker.algo import Algorithm, Row\n"
        "def a():\n    return Algorithm(row=Row(clip_high=0.5, whiten=True))\n"
    )
    name = f"{command.folder / 'row.py'}:a"
    command.config(algorithm__function=name, algorithm__whiten=False)
    assert command("train", command.folder / "run.yaml", "--dry-run") == 0
    assert f"  algorithm {name} with whiten=false (its row: true)\n" in command.out
