"""verl's own command, trainer, queue, agent loops, rewards and checkpoints, and a real vLLM server,
train with tail batching. Faked: an accelerator (`verl_on_cpu.py`), and the model is small and
random, so that no speed is compared. Takes some minutes, and 8 GB of memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from tests.integrations_verl.training import PROMPTS, SAMPLES, Training, write_inputs

pytestmark = pytest.mark.timeout(1800)

STEPS, SAVED = 6, 3
RACING = (
    "trainer.v1.trainer_mode=rollpacker_sync",
    "+trainer.v1.rollpacker_sync.prompt_factor=2",
)
WAITING = ("trainer.v1.trainer_mode=rollpacker_sync", "+trainer.v1.rollpacker_sync.enabled=False")
LEARNS = (
    "actor_rollout_ref.actor.optim.lr=1e-3",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.test_freq={SAVED}",
)
FROZEN = ("actor_rollout_ref.actor.optim.lr=0", f"trainer.total_training_steps={STEPS}")
NOT_REPEATED = (
    *("timing_", "perf/", "rollpacker/decode", "rollpacker/tail", "rollpacker/training"),
    *("rollpacker/between", "rollpacker/controller", "rollpacker/generated", "rollpacker/length"),
    *("val-", "rollout_corr/", "training/rollout_probs", "training/rollout_actor", "/cpu_memory"),
)
"""Parts of the names of metrics that depend on seconds, on memory, on how far stopped responses had
come, on the steps since the process began or, in the seventh digit, on what vLLM computed
together."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return Training(inputs, folder, *RACING, *LEARNS, f"trainer.save_freq={SAVED}"), folder


def prompts_of(training: Training) -> list[str]:
    return [prompt for step in training.trained.values() for prompt in step]


def test_it_trains_on_each_prompt_once(whole: tuple[Training, Path]) -> None:
    training, _ = whole
    assert training.returncode == 0, training.output[-3000:]
    assert sorted(training.trained) == list(range(1, STEPS + 1))
    assert len(set(prompts_of(training))) == len(prompts_of(training)) == STEPS * PROMPTS
    assert all(len(one) == SAMPLES for step in training.trained.values() for one in step.values())
    launched = [training.metrics[step]["rollpacker/prompts_launched"] for step in training.trained]
    assert sum(launched) > STEPS * PROMPTS
    deferred = sum(one["rollpacker/prompts_deferred"] for one in training.metrics.values())
    assert deferred == sum(launched) - STEPS * PROMPTS
    assert "rollpacker: 6 steps in" in training.output
    validated = [step for step, one in training.metrics.items() if any("val-" in n for n in one)]
    assert validated == [SAVED, STEPS]


def test_a_resumed_run_repeats_the_one_that_was_not_killed(
    whole: tuple[Training, Path], inputs: Path, tmp_path: Path
) -> None:
    """To the last digit, from a checkpoint at which prompts waited."""
    training, folder = whole
    assert training.metrics[SAVED]["rollpacker/prompts_waiting"] > 0
    checkpoint = f"global_step_{SAVED}"
    shutil.copytree(folder / checkpoint, tmp_path / checkpoint)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
    resumed = Training(inputs, tmp_path, *RACING, *LEARNS)
    assert resumed.returncode == 0, resumed.output[-3000:]
    later = range(SAVED + 1, STEPS + 1)
    assert resumed.trained == {step: training.trained[step] for step in later}
    for step in later:
        compared = {
            name: value
            for name, value in training.metrics[step].items()
            if not any(part in name for part in NOT_REPEATED)
        }
        assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean"} <= set(compared)
        assert {name: resumed.metrics[step][name] for name in compared} == compared


def test_each_response_is_what_verl_alone_generates(inputs: Path, tmp_path: Path) -> None:
    """Under weights that stay: with races, the responses to each prompt are those of verl's own
    order, where every response is awaited, with the same seeds. (verl itself gives none.)"""
    raced = Training(inputs, tmp_path / "raced", *RACING, *FROZEN)
    waited = Training(inputs, tmp_path / "waited", *WAITING, *FROZEN)
    assert (raced.returncode, waited.returncode) == (0, 0), raced.output[-2000:]
    by_prompt = [
        {prompt: outputs for step in one.trained.values() for prompt, outputs in step.items()}
        for one in (raced, waited)
    ]
    assert by_prompt[0] == by_prompt[1] and len(by_prompt[0]) == STEPS * PROMPTS
    assert raced.trained != waited.trained  # in other steps


def test_carried_responses_are_those_generated_whole(inputs: Path, tmp_path: Path) -> None:
    """Under weights that stay: their tokens are read in a long round, and not generated again. Also
    over a kill of all of verl's processes, by the tokens of the checkpoint."""
    carry, saved = "+trainer.v1.rollpacker_sync.carry=exact", f"trainer.save_freq={SAVED}"
    carrying = (*RACING, *FROZEN, carry, saved)
    killed = Training(
        inputs, tmp_path / "raced", *carrying, killed_at=f"rollouts/{SAVED + 1}.jsonl"
    )
    assert killed.returncode == -9 and killed.metrics[SAVED]["rollpacker/prompts_waiting"] > 0
    raced = Training(inputs, tmp_path / "raced", *carrying)
    waited = Training(inputs, tmp_path / "waited", *WAITING, *FROZEN, carry)
    assert (raced.returncode, waited.returncode) == (0, 0), raced.output[-2000:]
    by_prompt = [
        {prompt: outputs for step in one.trained.values() for prompt, outputs in step.items()}
        for one in (raced, waited)
    ]
    assert by_prompt[0] == by_prompt[1] and len(by_prompt[0]) == STEPS * PROMPTS
    long = [one for one in raced.metrics.values() if one["rollpacker/is_long_round"]]
    assert long and all(one["rollpacker/generated_per_trained"] < 0.5 for one in long)
    # The log-probs of what was carried and what was not are those of the trainer.
    assert all(one["training/rollout_probs_diff_max"] < 1e-2 for one in raced.metrics.values())
