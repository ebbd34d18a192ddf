"""2,000 responses of a frozen policy, by verl's own synchronous mode and with tail batching, where
all of verl's processes are killed in the middle and the run goes on from its last checkpoint.
verl's own command, trainer, queue, agent loops, rewards and checkpoints, and a real vLLM server.
Faked: an accelerator (`verl_on_cpu.py`), the model is small and random, and verl's own mode gets
its seeds from `seeded.py`. Takes some minutes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

from tests.integrations_verl.training import Training, write_inputs

pytestmark = pytest.mark.timeout(3600)

PROMPTS, SAMPLES, STEPS, SAVED = 25, 8, 10, 4
MANY = (
    *(f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}"),
    *("data.shuffle=False", "actor_rollout_ref.actor.optim.lr=0"),
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={PROMPTS}",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={PROMPTS}",
    *("actor_rollout_ref.rollout.max_num_seqs=128", f"trainer.total_training_steps={STEPS}"),
)
PLAIN = (
    "trainer.v1.trainer_mode=sync",
    "+actor_rollout_ref.rollout.agent.agent_loop_manager_class="
    "tests.integrations_verl.seeded.Manager",
)
RACING = (
    *("trainer.v1.trainer_mode=rollpacker_sync", f"trainer.save_freq={SAVED}"),
    "+trainer.v1.rollpacker_sync.prompt_factor=1.5",
)


def responses(training: Training) -> Counter[tuple[str, str]]:
    """How often each pair of a prompt and a response was trained on."""
    return Counter(
        (prompt, output)
        for step in training.trained.values()
        for prompt, outputs in step.items()
        for output in outputs
    )


def test_the_same_responses_as_verls_own_mode_over_a_kill(tmp_path: Path) -> None:
    write_inputs(tmp_path, num_prompts=PROMPTS * STEPS)
    plain = Training(tmp_path, tmp_path / "plain", *PLAIN, *MANY)
    assert plain.returncode == 0, plain.output[-3000:]
    raced = tmp_path / "raced"
    killed = Training(tmp_path, raced, *RACING, *MANY, killed_at=f"rollouts/{SAVED + 2}.jsonl")
    assert killed.returncode == -9
    assert killed.metrics[SAVED]["rollpacker/prompts_waiting"] > 0
    resumed = Training(tmp_path, raced, *RACING, *MANY)
    assert resumed.returncode == 0, resumed.output[-3000:]
    assert f"global_step_{SAVED}, setting global step to {SAVED}" in resumed.output
    assert sorted(resumed.trained) == list(range(1, STEPS + 1))
    assert sum(responses(plain).values()) == PROMPTS * SAMPLES * STEPS
    assert responses(resumed) == responses(plain)
    assert resumed.trained != plain.trained  # in other steps
    prompts = [prompt for step in resumed.trained.values() for prompt in step]
    assert sorted(map(int, prompts)) == list(range(PROMPTS * STEPS))
