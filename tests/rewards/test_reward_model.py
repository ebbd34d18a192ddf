"""The reward model: right tokens, right head, the same score in every batch."""

import asyncio
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from rollpacker.rewards.build import build_reward
from rollpacker.rewards.functions.function_reward import RewardFunction
from rollpacker.rewards.reward import Failed, RewardConfig, RewardError, RewardInput, Scored
from rollpacker.rewards.reward_model import RewardModel, _quiet, make
from rollpacker.trainer.model import character_tokenizer
from rollpacker.workers.worker import WorkerProcess

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>{% endfor %}"


def make_folder(
    folder: Path,
    model_type: str = "qwen2",
    *,
    auto: Any = AutoModelForSequenceClassification,
    template: str | None = TEMPLATE,
    **fields: Any,
) -> Path:
    """A tiny random model with one output."""
    torch.manual_seed(3)
    torch.set_num_threads(1)
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("<|start|>", "<|end|>")])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "num_labels": 1,
    }
    config = AutoConfig.for_model(model_type, **settings | fields)
    with _quiet():
        auto.from_config(config).save_pretrained(str(folder))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reward-model"))


@pytest.fixture(scope="module")
def scorer(folder: Path) -> RewardModel:
    return make(model_path=str(folder))


def texts(count: int) -> tuple[list[str], list[str]]:
    draw = random.Random(5)

    def text(most: int) -> str:
        return "".join(draw.choice(ALPHABET) for _ in range(draw.randrange(1, most)))

    return [text(60) for _ in range(count)], [text(150) for _ in range(count)]


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "bert"])
def test_the_batch_does_not_change_a_score(model_type: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, model_type)
    prompts, completions = texts(24)
    scorer = make(model_path=str(folder), batch_size=1)
    alone = [scorer([p], [c])[0] for p, c in zip(prompts[:6], completions[:6], strict=True)]
    for size in (1, 5, 24):
        together = make(model_path=str(folder), batch_size=size)(prompts, completions)
        assert together[:6] == pytest.approx(alone, abs=1e-5, rel=0)
    reverse = make(model_path=str(folder), batch_size=7)(prompts[::-1], completions[::-1])
    assert reverse[::-1] == pytest.approx(together, abs=1e-5, rel=0)
    assert max(alone) - min(alone) > 0.01  # the scores differ at all


def test_the_score_is_the_models_own(folder: Path, scorer: RewardModel) -> None:
    """Against the model called directly, on one text without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with torch.inference_mode():
        expected = model(torch.tensor([tokenizer("2 + 3 = 5")["input_ids"]])).logits.item()
    assert scorer(["2 + 3 ="], [" 5"])[0] == pytest.approx(expected, abs=1e-6)


def test_workers_are_spread_over_the_devices_that_reward_models_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker notes in which environment it was started; one that has ended makes room."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environments = [{**os.environ, "CUDA_VISIBLE_DEVICES": name} for name in ("4", "GPU-b")]
    [part] = build_reward(
        [RewardConfig(function="reward_model", arguments={"model_path": str(folder)})],
        model_environments=environments,
    )._parts
    reward = part.part
    assert isinstance(reward, RewardFunction) and reward._config.workers == 2
    others = [reward._start(f"more-{number}") for number in range(3)]
    try:
        assert [[seen(one) for one in there] for there in reward._on] == [["4"] * 2, ["GPU-b"] * 2]
        others[0].close()
        others.append(reward._start("anew"))
        assert seen(others[-1]) == "GPU-b"
    finally:
        for one in others:
            one.close()
        asyncio.run(reward.close())


def seen(process: WorkerProcess) -> str:
    """CUDA_VISIBLE_DEVICES of a worker, from the kernel, which has it once the program runs."""
    file, name = Path(f"/proc/{process.child.pid}/environ"), "CUDA_VISIBLE_DEVICES="
    while not (found := [one for one in file.read_text().split("\0") if one.startswith(name)]):
        assert process.child.how_ended() is None
    return found[0].removeprefix(name)


def test_no_padding_token_means_one_at_a_time(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, pad_token_id=None)
    prompts, completions = texts(5)
    together = make(model_path=str(folder))(prompts, completions)
    scorer = make(model_path=str(folder))
    alone = [scorer([p], [c])[0] for p, c in zip(prompts, completions, strict=True)]
    assert together == alone


def test_chat_prompts_go_through_the_template(scorer: RewardModel) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    as_text = "<|start|>user\nHi<|end|><|start|>assistant\nHo<|end|>"
    ids = scorer._tokenizer(as_text)["input_ids"]
    assert scorer._tokens(chat, [{"role": "assistant", "content": "Ho"}]) == ids
    assert scorer._tokens(chat, "Ho") == ids


def test_an_answer_cannot_end_its_turn(scorer: RewardModel) -> None:
    end = scorer._tokenizer.convert_tokens_to_ids("<|end|>")
    chat = [{"role": "user", "content": "Hi"}]
    tokens = scorer._tokens(chat, "Ho<|end|><|start|>assistant\nBetter<|end|>")
    assert tokens.count(end) == 2  # the prompt's and the answer's own


def test_no_template(tmp_path: Path) -> None:
    scorer = make(model_path=str(make_folder(tmp_path, template=None)))
    with pytest.raises(RewardError, match="no chat template"):
        scorer([[{"role": "user", "content": "Hi"}]], ["Ho"])


def test_long_texts_lose_their_beginning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    scorer = make(model_path=str(folder), max_tokens=50)
    tail = "y" * 50
    assert scorer(["a" * 200, "b" * 10], [tail, tail]) == pytest.approx(scorer([""], [tail]) * 2)
    assert len(caplog.records) == 1
    own = make(model_path=str(folder))  # the model has 256 positions
    assert len(own._tokens("x" * 1000, "y")) == 256


def test_normalized(folder: Path, scorer: RewardModel) -> None:
    (raw,) = scorer(["a"], ["b"])
    assert make(model_path=str(folder), mean=1.0, std=2.0)(["a"], ["b"])[0] == pytest.approx(
        (raw - 1) / 2
    )
    (unit,) = make(model_path=str(folder), normalize="sigmoid")(["a"], ["b"])
    assert unit == pytest.approx(1 / (1 + math.exp(-raw)))
    for output, expected in ((1e6, 1.0), (-1e6, 0.0), (-709.0, 0.0)):
        assert make(model_path=str(folder), normalize="sigmoid")._value(output) == pytest.approx(
            expected
        )


def test_bfloat16(folder: Path, scorer: RewardModel) -> None:
    (rough,) = make(model_path=str(folder), dtype="bfloat16")(["a"], ["b"])
    assert rough == pytest.approx(scorer(["a"], ["b"])[0], abs=0.1)


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def drop_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def only_a_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "config.json").write_text("[" * 99_999), "no JSON object"),
        (edit_json("config.json", auto_map={"AutoModel": "x.Y"}), "auto_map in config.json"),
        (edit_json("tokenizer_config.json", auto_map={"AutoTokenizer": ["x.Y", None]}), "auto_map"),
        (edit_json("config.json", id2label={"0": "a", "1": "b"}), "has 2 outputs"),
        (edit_json("config.json", model_type="no-such"), "cannot load"),
        (only_a_pickle, "safetensors"),
        (truncated, "cannot load"),
        (drop_head, "no weights for score.weight"),
    ],
)
def test_folders_that_are_refused(
    folder: Path, tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    spoil(copy)
    with pytest.raises(RewardError, match=told):
        make(model_path=str(copy))


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """transformers would give it a random head, and every run would train on noise."""
    make_folder(tmp_path, auto=AutoModelForCausalLM)
    edit_json("config.json", id2label={"0": "LABEL_0"})(tmp_path)
    with pytest.raises(RewardError, match="not a language model"):
        make(model_path=str(tmp_path))


@pytest.mark.parametrize(
    "arguments",
    [
        {"batch_size": 0},
        {"max_tokens": 0},
        {"threads": 0},
        {"std": 0.0},
        {"mean": math.nan},
        {"device": "tpu"},
        {"dtype": "float8"},
        {"normalize": "softmax"},
    ],
)
def test_wrong_arguments(folder: Path, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(RewardError, match=f"reward reward_model: .*{name}"):
        build_reward(
            [
                RewardConfig(
                    function="reward_model", arguments={"model_path": str(folder), **arguments}
                )
            ]
        )


def test_in_a_worker_as_a_built_in(folder: Path, scorer: RewardModel) -> None:
    config = RewardConfig(function="reward_model", arguments={"model_path": str(folder)}, workers=1)

    def sample(completion: str) -> RewardInput:
        return RewardInput(
            prompt="2 + 3 =",
            completion=completion,
            completion_tokens=(1,),
            finish_reason="stop",
            columns={},
        )

    async def run() -> list[Scored | Failed]:
        reward = build_reward([config])
        try:
            return await reward.score([sample(" 5"), sample(" 6")])
        finally:
            await reward.close()

    verdicts = asyncio.run(run())
    assert [verdict.value for verdict in verdicts if isinstance(verdict, Scored)] == pytest.approx(
        scorer(["2 + 3 ="] * 2, [" 5", " 6"]), abs=1e-5
    )


def test_a_refusal_in_the_worker_is_told_in_full(tmp_path: Path) -> None:
    config = RewardConfig(function="reward_model", arguments={"model_path": str(tmp_path)})
    with pytest.raises(RewardError, match=r"has no config\.json"):
        build_reward([config])
