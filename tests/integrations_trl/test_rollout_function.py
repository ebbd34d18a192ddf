"""TRL's `GRPOTrainer` with `rollpacker.integrations.trl`, on a tiny random model: the installed
TRL, no fakes of it."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollpacker.core.rounds.tail_batching import Tier
from rollpacker.integrations.trl import RolloutFunction, rollout_function
from rollpacker.trainer.model import write_character_tokenizer

ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": str(n + n % 7), "number": n} for n in range(22)]
PROMPTS, SAMPLES = 4, 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: any character may end a response, so lengths are ragged."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tokenizer = write_character_tokenizer("0123456789+-=", folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class Seen:
    """A reward that keeps what it was given, and checks that each completion's columns are those of
    its prompt."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.responses: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Token ids, by row."""
        self.steps: list[list[int]] = []
        """Rows, by call."""

    def __call__(
        self,
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        answer: list[str],
        number: list[int],
        **columns: Any,
    ) -> list[float]:
        self.steps.append(number)
        for prompt, right, row, ids in zip(prompts, answer, number, completion_ids, strict=True):
            assert (prompt, right) == (ROWS[row]["prompt"], ROWS[row]["answer"])
            self.responses[row].append(tuple(ids))
        return [float(sum(map(str.isdigit, text))) for text in completions]


def trainer(
    model_folder: Path, output: Path, rollout: RolloutFunction | None, seen: Any, **changes: Any
) -> GRPOTrainer:
    """The three lines, when there is a rollout function; TRL alone when there is none."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rest: dict[str, Any] = {"train_dataset": Dataset.from_list(ROWS)}
    if rollout is not None:
        rest = {
            "train_dataset": rollout.dataset,
            "rollout_func": rollout,
            "callbacks": [rollout],
        }
    keys = {name: changes.pop(name) for name in ("eval_dataset", "peft_config") if name in changes}
    settings = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": PROMPTS * SAMPLES,
        "num_generations": SAMPLES,
        "max_completion_length": 60,
        "learning_rate": 0.0,
        "beta": 0.0,
        "num_train_epochs": 2,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 5,
    }
    return GRPOTrainer(
        model=Qwen2ForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
        reward_funcs=seen,
        args=GRPOConfig(**settings | changes),
        processing_class=tokenizer,
        **rest,
        **keys,
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    torch.set_num_threads(1)
    yield


def run(model_folder: Path, output: Path, changes: dict[str, Any], **keys: Any) -> Seen:
    seen = Seen()
    trainer(
        model_folder, output, rollout_function(Dataset.from_list(ROWS), **keys), seen, **changes
    ).train()
    return seen


def sorted_responses(seen: Seen) -> dict[int, list[tuple[int, ...]]]:
    return {row: sorted(responses) for row, responses in sorted(seen.responses.items())}


@pytest.mark.parametrize(
    ("keys", "changes"),
    [
        ({}, {}),
        ({"prompt_factor": 2.0, "stragglers": "pool", "flush_each_epoch": False}, {}),
        ({}, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 6}),
        ({}, {"per_device_train_batch_size": 6, "steps_per_generation": 2, "num_iterations": 2}),
        ({}, {"max_steps": 7, "shuffle_dataset": False}),
    ],
    ids=["default", "pool", "accumulated", "several updates", "max steps"],
)
def test_only_the_order_changes(
    model_folder: Path, tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Frozen policy: with tail batching and without it, the very same responses are trained on,
    each prompt once an epoch, and each completion has its own prompt's columns."""
    plain = run(model_folder, tmp_path, changes, enabled=False)
    batched = run(model_folder, tmp_path, changes, **keys)
    assert sorted_responses(batched) == sorted_responses(plain)
    assert batched.steps != plain.steps, "something was reordered"
    assert [len(step) for step in batched.steps] == [len(step) for step in plain.steps]
    assert all(len(responses) % SAMPLES == 0 for responses in plain.responses.values())
    if "max_steps" not in changes:
        per_step = len(plain.steps[0]) // SAMPLES
        used = 2 * (len(ROWS) // per_step * per_step)
        assert sum(map(len, plain.responses.values())) == used * SAMPLES
    for step in batched.steps:
        assert [step[i] for i in range(0, len(step), SAMPLES) for _ in range(SAMPLES)] == step


def test_the_order_without_tail_batching_is_trls(model_folder: Path, tmp_path: Path) -> None:
    alone = Seen()
    trainer(model_folder, tmp_path, None, alone).train()
    assert run(model_folder, tmp_path, {}, enabled=False).steps == alone.steps


def test_it_trains_as_trl_does(model_folder: Path, tmp_path: Path) -> None:
    """The log-probs of the engine are those that TRL's own forward pass finds, padded to the left
    as its prompts are: with one update per generation the ratio is 1, and nothing is clipped."""
    seen = Seen()
    rollout = rollout_function(Dataset.from_list(ROWS))
    own = trainer(model_folder, tmp_path, rollout, seen, learning_rate=1e-3)
    before = {name: p.clone() for name, p in own.model.named_parameters()}
    found: list[float] = []
    score = own._generate_and_score_completions

    def compare(inputs: Any) -> Any:
        batch = score(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad():
            log_probs, _, _ = own._get_per_token_logps_and_entropies(
                own.model, ids, mask, batch["completion_ids"].shape[1]
            )
        differences = (log_probs - batch["sampling_per_token_logps"]) * batch["completion_mask"]
        found.append(differences.abs().max().item())
        return batch

    own._generate_and_score_completions = compare
    own.train()
    assert len(found) == 10 and max(found) < 1e-4
    moved = [not torch.equal(before[name], p) for name, p in own.model.named_parameters()]
    assert all(moved)
    assert own.model.config._attn_implementation == "sdpa"


def test_it_learns(model_folder: Path, tmp_path: Path) -> None:
    """Responses of few characters but sevens, from a model that knows nothing."""
    means: list[float] = []

    def sevens(completions: list[str], **columns: Any) -> list[float]:
        rewards = [text.count("7") / max(1, len(text)) for text in completions]
        means.append(sum(rewards) / len(rewards))
        return rewards

    rollout = rollout_function(Dataset.from_list(ROWS))
    changes = {"learning_rate": 0.02, "max_steps": 30, "max_completion_length": 20}
    trainer(model_folder, tmp_path, rollout, sevens, **changes).train()
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.2, means


CHAT = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


def test_chat_prompts_go_through_the_template(model_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1"}], "n": n} for n in range(8)]
    asked: list[tuple[str, int, str]] = []

    def reward(prompts: Any, completions: Any, n: list[int], **columns: Any) -> list[float]:
        for prompt, completion, number in zip(prompts, completions, n, strict=True):
            asked.append((prompt[0]["content"], number, completion[0]["role"]))
        return [0.0] * len(n)

    rollout = rollout_function(Dataset.from_list(rows))
    own = trainer(model_folder, tmp_path, rollout, reward, num_train_epochs=1)
    own.processing_class.chat_template = CHAT
    found = []
    generate = own._generate

    def generate_and_compare(prompts: Any) -> Any:
        result = generate(prompts)
        found.append((result[0], own._tokenize_prompts(prompts)[0]))
        return result

    own._generate = generate_and_compare
    own.train()
    assert len(found) == 2 and all(ours == theirs for ours, theirs in found)
    assert len(asked) == 24
    assert all(text == f"{n}+1" and role == "assistant" for text, n, role in asked)


def test_one_function_for_two_trainings(model_folder: Path, tmp_path: Path) -> None:
    """A second trainer has a model of its own; what was interrupted does not go on."""
    rollout, seen = rollout_function(Dataset.from_list(ROWS)), Seen()

    def interrupted(**columns: Any) -> list[float]:
        raise KeyboardInterrupt

    own = trainer(model_folder, tmp_path, rollout, interrupted, num_train_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        own.train()
    own = trainer(model_folder, tmp_path, rollout, seen, num_train_epochs=1)
    own.train()
    assert seen.steps == run(model_folder, tmp_path, {"num_train_epochs": 1}).steps
    assert own.model.training and own.model.config._attn_implementation == "sdpa"


def test_metrics_and_report(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = rollout_function(Dataset.from_list(ROWS))
    own = trainer(model_folder, tmp_path, rollout, Seen())
    own.train()
    rows = [row for row in own.state.log_history if "rollpacker/decode_s" in row]
    assert len(rows) == 10
    for row in rows:
        spent = [row[f"rollpacker/{name}_s"] for name in ("decode", "tail_idle", "training")]
        assert all(seconds > 0 for seconds in spent)
    assert {row["rollpacker/is_long_round"] for row in rows} == {0.0, 1.0}
    assert sum(row["rollpacker/prompts_deferred"] for row in rows) > 0
    assert rows[-1]["rollpacker/prompts_waiting"] == 0
    said = capsys.readouterr().out
    assert re.search(r"rollpacker: 10 steps in .* tail idle .* s \(\d+%\)", said)
    assert rollout.report() in said


def test_an_evaluation_gets_the_prompts_that_it_asks_for(
    model_folder: Path, tmp_path: Path
) -> None:
    seen = Seen()
    rollout = rollout_function(Dataset.from_list(ROWS))
    changes = {
        "eval_dataset": Dataset.from_list(ROWS[:4]),
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 6,
    }
    own = trainer(model_folder, tmp_path, rollout, seen, **changes)
    own.train()
    plain = run(model_folder, tmp_path, {})
    trained = [step for step in seen.steps if len(step) == PROMPTS * SAMPLES]
    assert trained == plain.steps
    asked = [step for step in seen.steps if len(step) == 6]
    assert len(asked) == 4 and {row for step in asked for row in step} == {0, 1, 2, 3}
    own.evaluate()
    assert len(seen.steps) == 10 + 6


def test_a_resumed_training_trains_on_the_same(model_folder: Path, tmp_path: Path) -> None:
    whole = run(model_folder, tmp_path / "whole", {})
    changes = {"save_strategy": "steps", "save_steps": 3}
    seen = Seen()
    rollout = rollout_function(Dataset.from_list(ROWS))
    own = trainer(model_folder, tmp_path / "cut", rollout, seen, **changes)
    own.train()
    for step in (6,):
        again = Seen()
        rollout = rollout_function(Dataset.from_list(ROWS))
        own = trainer(model_folder, tmp_path / "cut", rollout, again, **changes)
        own.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{step}"))
        assert again.steps == whole.steps[step:]


def test_without_saved_state_a_training_goes_on_with_the_next_rows(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3}
    rollout = rollout_function(Dataset.from_list(ROWS), enabled=False)
    seen, again = Seen(), Seen()
    trainer(model_folder, tmp_path, rollout, seen, **changes).train()
    checkpoint = tmp_path / "checkpoint-6"
    shutil.rmtree(checkpoint / "rollpacker")
    rollout = rollout_function(Dataset.from_list(ROWS), enabled=False)
    own = trainer(model_folder, tmp_path, rollout, again, **changes)
    own.train(resume_from_checkpoint=str(checkpoint))
    assert "goes on with the next prompts of the data" in caplog.text
    assert again.steps == seen.steps[6:]


def test_with_peft_adapters(model_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    changes = {"peft_config": peft.LoraConfig(r=4, task_type="CAUSAL_LM"), "num_train_epochs": 1}
    plain = run(model_folder, tmp_path, changes, enabled=False)
    assert sorted_responses(run(model_folder, tmp_path, changes)) == sorted_responses(plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataloader_num_workers": 1}, "dataloader_num_workers"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"min_p": 0.1}, "min_p"),
        ({"remove_unused_columns": True}, "remove_unused_columns"),
        (
            {"per_device_train_batch_size": 90, "max_steps": 3},
            "a step has 30 prompts, and the data 22",
        ),
        ({"max_completion_length": 300}, r"^max_completion_length=300 and the first prompt's \d"),
    ],
)
def test_what_cannot_be_had_is_said(
    model_folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        run(model_folder, tmp_path, changes)


def test_all_three_are_needed(model_folder: Path, tmp_path: Path) -> None:
    rollout = rollout_function(Dataset.from_list(ROWS))
    own = trainer(model_folder, tmp_path, rollout, Seen())
    own.remove_callback(rollout)
    with pytest.raises(ValueError, match=r"callbacks=\[rollout\]"):
        own.train()
    own = trainer(model_folder, tmp_path, rollout, Seen())
    own.train_dataset = Dataset.from_list(ROWS)
    with pytest.raises(ValueError, match=r"train_dataset=rollout\.dataset"):
        own.train()
    own = trainer(model_folder, tmp_path, rollout, Seen())
    own.rollout_func = None  # after a training that had all three
    with pytest.raises(ValueError, match=r"not asked .* rollout_func=rollout"):
        own.train()
    assert own.state.global_step == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"promt_factor": 2}, "rollout_function has no promt_factor"),
        ({"carry": "weighted"}, "carry=weighted needs token weights"),
        ({"debias": "moments"}, "debias needs sample weights"),
        ({"selection": "published", "race": "scored"}, "race=scored needs verdicts"),
        ({"engine": {"kv_gib": 1}}, 'kv_gib is no known key. Did you mean "kv_cache_gib"'),
        ({"engine": {"max_slots": "many"}}, 'max_slots is "many". Allowed: a whole number'),
        ({"engine": 3}, "engine of rollout_function is a dict"),
        ({"prompt_factor": 99}, "prompt_factor must lie between 1 and 16"),
        ({"prompt_factor": "much"}, 'prompt_factor is "much". Allowed: a number'),
        ({"stragglers": "Pool"}, 'rollout_function: stragglers is "Pool".* mean "pool"'),
        ({"carry": "exakt"}, 'carry is "exakt". Allowed: .*"exact"'),
        ({"selection": "published", "race": "score"}, 'race is "score".* mean "scored"'),
        ({"enabled": "false"}, 'enabled is "false". Allowed: true or false'),
        ({"tiers": "a"}, 'tiers is "a". Allowed: a list'),
    ],
)
def test_settings_that_trl_cannot_have(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_function(Dataset.from_list(ROWS), **keys)


def test_settings_may_be_objects_or_texts() -> None:
    rollout = rollout_function(
        Dataset.from_list(ROWS), prompt_factor="1.75", tiers=(Tier(prompt_factor=2),)
    )
    assert rollout._tail_batching.prompt_factor == 1.75
    assert rollout._tail_batching.tiers == (Tier(prompt_factor=2, sample_factor=1.0),)


def test_a_stream_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="without streaming"):
        rollout_function(Dataset.from_list(ROWS).to_iterable_dataset())  # type: ignore[arg-type]
