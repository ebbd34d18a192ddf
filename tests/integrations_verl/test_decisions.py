"""What verl's trainer is made to start, stop, train on and save, with verl's own queue, sampler
class and trainer class. Faked: the agent loop workers, whose responses here are as long as their
seed says; verl's data loader, which counts; and all that verl's trainer does with a batch."""

from __future__ import annotations

import heapq
import pickle
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-verl")

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.utils import tensordict_utils

from rollpacker.integrations import verl as integration
from rollpacker.integrations.verl.carry import ENGINE
from rollpacker.integrations.verl.rollouts import End
from rollpacker.integrations.verl.trainer import (
    RollPackerTrainer,
    Sampler,
    check_row,
    held,
    plain_row,
    read_rows,
)
from rollpacker.scheduler import Request

PROMPTS, SAMPLES, STEPS = 4, 2, 8


class Rollouts:
    """Workers of one engine that brings a token to every response at each decode step."""

    def __init__(self, faults: random.Random | None = None) -> None:
        self.faults = faults
        self.now = 0
        self.heap: list[tuple[int, str]] = []
        self.running: dict[str, tuple[Request, str, int]] = {}
        self.stopped: list[str] = []
        self.seeds: dict[tuple[int, int], set[int]] = {}
        self.num_stopped = 0

    def start(
        self, requests: Sequence[Request], rows: dict[int, Any], step: int, version: int | None
    ) -> None:
        for one in requests:
            self.seeds.setdefault((one.prompt, one.place), set()).add(one.seed)
            self.running[one.id] = one, rows[one.prompt]["uid"][0], self.now
            heapq.heappush(self.heap, (self.now + length_of(one.seed), one.id))

    def stop(self, requests: Sequence[Request]) -> None:
        self.stopped += [one.id for one in requests]

    def ends(self) -> Iterator[End]:
        while self.stopped:
            id = self.stopped.pop()
            _, _, began = self.running.pop(id)
            self.num_stopped += 1
            yield End(id, self.now - began, "stopped", "")
        if not self.heap:
            return
        self.now, id = heapq.heappop(self.heap)
        if id not in self.running:
            return
        request, uid, began = self.running.pop(id)
        if self.faults is not None and self.faults.random() < 0.05:
            yield End(id, 0, "failed", "made up")
            return
        put(f"{uid}_{request.place}_0", self.now - began)
        yield End(id, self.now - began, "stop", "")


def length_of(seed: int) -> int:
    return int(random.Random(seed).lognormvariate(4, 1)) + 1


def put(key: str, length: int) -> None:
    transfer_queue.kv_put(
        key=key,
        partition_id="train",
        fields={"responses": torch.tensor([length])},
        tag={"status": "success", "response_len": length},
    )


def config_of(folder: Path, **settings: object) -> Any:
    return OmegaConf.create(
        {
            "trainer": {
                "v1": {
                    "trainer_mode": "rollpacker_sync",
                    "sampler": {
                        "custom_sampler": {"path": None, "name": None},
                        "max_off_policy_threshold": 1,
                        "max_off_policy_strategy": "drop",
                        "sampler_kwargs": {},
                    },
                    "rollpacker_sync": settings,
                },
                "resume_mode": "auto",
                "default_local_dir": str(folder),
            },
            "data": {"train_batch_size": PROMPTS, "max_response_length": 2000},
            "actor_rollout_ref": {
                "rollout": {
                    **{"name": "vllm", "n": SAMPLES, "seed": 0},
                    "agent": {"agent_loop_manager_class": None},
                }
            },
            "algorithm": {"adv_estimator": "grpo"},
        }
    )


class Trainer(RollPackerTrainer):
    """The trainer without models: what verl's `__init__` makes is replaced (`without_models`)."""

    def __init__(self, config: Any, *, done: int = 0, faults: random.Random | None = None) -> None:
        """`done`: steps that the checkpoint in the config's folder has."""
        super().__init__(config)
        self.agent_loop_manager, self.global_steps = Rollouts(faults), done + 1
        self.trained: Counter[str] = Counter()
        self.lengths: dict[str, int] = {}

    def _next_train_batch(self, num_prompts: int) -> TensorDict:
        names = [f"p{self._cursor.num_fetched + index}" for index in range(num_prompts)]
        return tensordict_utils.get_tensordict({"uid": names, "x": torch.zeros(num_prompts, 1)})

    def run(self, steps: int) -> list[dict[str, float]]:
        found = []
        for _ in range(steps):
            metrics: dict[str, float] = {}
            batch = self.step(metrics, {})
            transfer_queue.kv_clear(keys=batch.keys, partition_id="train")
            found.append(metrics)
            self.global_steps += 1
        return found


def without_models(self: Trainer, config: Any) -> None:
    """In place of verl's `__init__`: its way to a sampler alone."""
    self.config, self.trainer_mode = config, config.trainer.v1.trainer_mode
    self.total_training_steps = STEPS
    self.replay_buffer = self._build_replay_buffer()


def train_on(self: Trainer, metrics: dict[str, float], timing_raw: object) -> Any:
    """In place of verl's `step`: its order of calls, without a model."""
    metrics.update(self.prepare_step())
    batch, found = self.replay_buffer.sample(self.global_steps, "train", PROMPTS)
    metrics.update(found)
    assert sorted(held()) == sorted(batch.keys)
    self.trained.update(batch.keys)
    self.lengths |= {
        key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags, strict=True)
    }
    return batch


EXPECTED = {f"p{prompt}_{place}_0" for prompt in range(PROMPTS * STEPS) for place in range(SAMPLES)}


@pytest.fixture(scope="module", autouse=True)
def queue() -> Iterator[None]:
    """verl's queue, whose actors want more processors than a small machine has."""
    ray.init(num_cpus=16, include_dashboard=False)
    transfer_queue.init()
    yield
    transfer_queue.close()
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(PPOTrainer, "__init__", without_models)
    monkeypatch.setattr(PPOTrainer, "step", train_on)
    monkeypatch.setattr(PPOTrainer, "_save_checkpoint", lambda self: None)
    yield
    if keys := list(held()):
        transfer_queue.kv_clear(keys=keys, partition_id="train")


def test_verl_finds_the_mode_by_itself() -> None:
    assert get_trainer_cls("rollpacker_sync") is RollPackerTrainer


def test_every_prompt_is_trained_on_once_and_is_what_it_would_have_been(tmp_path: Path) -> None:
    """With races and without, and the same responses: a deferred one has its seed again."""
    raced, plain = (
        Trainer(config_of(tmp_path, **settings))
        for settings in ({"prompt_factor": 2.0}, {"enabled": False})
    )
    for trainer in (raced, plain):
        trainer.on_train_begin()
        trainer.run(STEPS)
        assert trainer.trained == dict.fromkeys(EXPECTED, 1)
        assert all(len(seeds) == 1 for seeds in trainer.agent_loop_manager.seeds.values())
    assert raced.lengths == plain.lengths
    assert raced.agent_loop_manager.num_stopped > 0 == plain.agent_loop_manager.num_stopped
    assert raced.agent_loop_manager.now < plain.agent_loop_manager.now


def test_a_resumed_run_goes_on_as_the_one_that_was_not_killed(tmp_path: Path) -> None:
    whole = Trainer(config_of(tmp_path / "whole", prompt_factor=2.0))
    whole.on_train_begin()
    whole.run(STEPS)
    killed = Trainer(config_of(tmp_path / "killed", prompt_factor=2.0))
    killed.on_train_begin()
    for _ in range(3):
        killed.run(1)
    killed.global_steps -= 1  # verl saves before it counts the step
    killed._save_checkpoint()
    resumed = Trainer(config_of(tmp_path / "killed", prompt_factor=2.0), done=3)
    put("orphan_0_0", 7)  # verl's queue brings back the rows of the step that was saved
    pending = {"is_prompt": True, "status": "pending", "global_steps": 3}
    transfer_queue.kv_put(key="fetched", partition_id="train", tag=pending)  # by another mode
    assert resumed._reissue_inflight_prompts() == 0 and not held()
    resumed.on_train_begin()
    resumed.run(STEPS - 3)
    assert killed.trained + resumed.trained == whole.trained
    assert killed.lengths | resumed.lengths == whole.lengths


def test_without_saved_state_it_goes_on_and_says_so(tmp_path: Path, caplog: Any) -> None:
    trainer = Trainer(config_of(tmp_path, prompt_factor=2.0), done=3)
    trainer.on_train_begin()
    trainer.run(STEPS - 3)
    assert "those that waited for a later step at this checkpoint are not trained on" in caplog.text
    later = {key for key in EXPECTED if int(key[1:].partition("_")[0]) >= 3 * PROMPTS}
    assert trainer.trained == dict.fromkeys(later, 1)


def test_responses_that_fail_are_started_again(tmp_path: Path) -> None:
    trainer = Trainer(config_of(tmp_path, prompt_factor=1.5), faults=random.Random(3))
    trainer.on_train_begin()
    trainer.run(STEPS)
    assert trainer.trained == dict.fromkeys(EXPECTED, 1)


def test_metrics_are_among_verls(tmp_path: Path) -> None:
    trainer = Trainer(config_of(tmp_path, prompt_factor=2.0))
    trainer.on_train_begin()
    first, *_ = trainer.run(2)
    assert first["rollpacker/prompts_launched"] == 2 * PROMPTS
    assert first["rollpacker/prompts_deferred"] == first["rollpacker/prompts_waiting"] == PROMPTS
    assert first["rollpacker/generated_per_trained"] > 1
    seconds = {"decode", "tail_idle", "training", "between_steps", "controller"}
    assert {f"rollpacker/{name}_s" for name in seconds} <= set(first)


def test_more_steps_than_at_first(tmp_path: Path) -> None:
    """A run that ended goes on where its number of steps is raised."""
    trainer = Trainer(config_of(tmp_path, prompt_factor=2.0))
    trainer.total_training_steps = 3
    trainer.on_train_begin()
    trainer.run(3)
    assert trainer._cursor.ended
    trainer.global_steps -= 1
    trainer._save_checkpoint()
    resumed = Trainer(config_of(tmp_path, prompt_factor=2.0), done=3)
    resumed.on_train_begin()
    resumed.run(STEPS - 3)
    assert trainer.trained + resumed.trained == dict.fromkeys(EXPECTED, 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "vLLM's responses alone can be stopped"),
        ("trainer.v1.rollpacker_sync.carry=weighted", "here it is none or exact"),
        ("trainer.v1.rollpacker_sync.prompt_faktor=2", "prompt_factor"),
        ("trainer.v1.sampler.custom_sampler.name=Mine", "the scheduler chooses what is trained on"),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.Mine",
            "responses are started by RollPacker's",
        ),
        ("algorithm.adv_estimator=remax", "it needs a greedy response beside the others"),
        ("algorithm.filter_groups.enable=True", "it replaces prompts"),
        ("trainer.v1.rollpacker_sync.debias=moments", "debias=moments is not possible in another"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(
    tmp_path: Path, change: str, sentence: str
) -> None:
    config = OmegaConf.merge(config_of(tmp_path), OmegaConf.from_dotlist([change]))
    with pytest.raises(ValueError, match=sentence) as raised:
        RollPackerTrainer(config)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("multi_turn.enable=True", "the tokens of a single turn can be carried"),
        ("data_parallel_size=2", "one process is asked"),
        ("pipeline_model_parallel_size=2", "one process is asked"),
        ("enable_rollout_routing_replay=True", "the experts of carried tokens are not kept"),
        ("mtp.enable_rollout=True", "vLLM gives it no logits processors"),
        ("engine_kwargs.vllm.async_scheduling=True", "vllm.async_scheduling: it is set here"),
    ],
)
def test_what_does_not_go_with_carried_tokens_is_one_sentence(
    tmp_path: Path, change: str, sentence: str
) -> None:
    config = OmegaConf.merge(
        config_of(tmp_path, carry="exact"),
        OmegaConf.from_dotlist([f"actor_rollout_ref.rollout.{change}"]),
    )
    with pytest.raises(ValueError, match=sentence):
        RollPackerTrainer(config)


def test_log_probs_of_another_temperature_are_not_those_of_carried_tokens(tmp_path: Path) -> None:
    rollout = {"calculate_log_probs": True, "temperature": 0.7}
    changed = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})
    with pytest.raises(ValueError, match="vLLM's are those before"):
        RollPackerTrainer(OmegaConf.merge(config_of(tmp_path, carry="exact"), changed))


def test_the_engine_gets_what_carrying_needs_beside_the_users_own(tmp_path: Path) -> None:
    own = OmegaConf.from_dotlist(["actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32"])
    config = OmegaConf.merge(config_of(tmp_path, carry="exact"), own)
    RollPackerTrainer(config)
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"block_size": 32, **ENGINE}


def test_another_version_of_verl_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"works with verl 0\.9\.1, and 0\.9\.2 is installed"):
        integration.check_version("0.9.2")


def test_a_validation_is_verls_own(tmp_path: Path) -> None:
    """Its responses are awaited by verl's sampler, which looks at its queue more often here."""
    sampler = Trainer(config_of(tmp_path)).replay_buffer
    assert type(sampler) is Sampler and sampler.poll_interval < 2
    transfer_queue.kv_put(
        key="v0",
        partition_id="val",
        tag={"is_prompt": True, "status": "finished", "global_steps": 1},
    )
    transfer_queue.kv_put(
        key="v0_0_0", partition_id="val", fields={"x": torch.zeros(1)}, tag={"status": "success"}
    )
    batch, _ = sampler.sample(1, "val", 1)
    assert batch.keys == ["v0_0_0"]
    transfer_queue.kv_clear(keys=batch.keys, partition_id="val")


class Opens:
    """What a file must not do when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("opened"),)


def test_rows_of_prompts_come_back_and_their_file_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    batch = tensordict_utils.get_tensordict(
        {
            "raw_prompt": [
                [{"role": "user", "content": "1+2="}],
                [{"role": "user", "content": ""}],
            ],
            "reward_model": [{"ground_truth": "3", "style": "rule"}, {"ground_truth": "0"}],
            "uid": ["a", "b"],
            "dummy": torch.arange(2),
        },
        {"global_steps": 4},
    )
    rows = {7: batch[:1], 9: batch[1:]}
    torch.save({prompt: plain_row(row) for prompt, row in rows.items()}, tmp_path / "rows")
    found = read_rows(tmp_path / "rows")
    for prompt, row in rows.items():
        assert list(found[prompt].batch_size) == [1]
        assert plain_row(found[prompt]) == plain_row(row)
        check_row(row)
    torch.save({7: {"raw_prompt": (True, [Opens()])}}, tmp_path / "rows")
    with pytest.raises(pickle.UnpicklingError):
        read_rows(tmp_path / "rows")
    assert not Path("opened").exists()
    odd = tensordict_utils.get_tensordict({"images": [[Path("a.png")]]})
    with pytest.raises(ValueError, match="the field images of a prompt holds a PosixPath"):
        check_row(odd)
