"""A model with a chat template, as the user of `rollpacker train` meets it: the prompts that it is
trained on, and the first of them shown in the dry run and at the start."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from rollpacker.cli.main import main
from rollpacker.config.document import parse_document, read_text, write_document
from rollpacker.run.parts import policy as build
from rollpacker.trainer.model import character_tokenizer, new_model

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
README_REWARD = """\
def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]

def correct(completions, answer, **columns):
    assert all(isinstance(c, SHAPE) for c in completions)
    return [float(len(text_of(c)) % 3 == int(gold) % 3) for c, gold in zip(completions, answer)]
"""
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def instruct(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As instruct models come: its template ends a turn with its end token."""
    folder = tmp_path_factory.mktemp("models") / "instruct"
    tokenizer = character_tokenizer("0123456789+=abc ")
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]}
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.eos_token = "<|end|>"
    new_model({"model_type": "qwen2", **SHAPE}, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, instruct: Path) -> Path:
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    (tmp_path / "texts.py").write_text(README_REWARD.replace("SHAPE", "str"))
    (tmp_path / "lists.py").write_text(README_REWARD.replace("SHAPE", "list"))
    plain = {
        "name": "tiny",
        "runs_dir": str(tmp_path / "runs"),
        "model": {"path": str(instruct), "device": "cpu"},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl")}},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 4},
        "train": {"steps": 1, "learning_rate": 1e-3, "threads": 1},
        "rewards": [{"function": f"{tmp_path}/texts.py:correct"}],
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(plain))
    return path


def saved_prompts(config: Path) -> set[str]:
    """What the samples of the run say."""
    samples = config.parent / "runs" / "tiny" / "samples"
    rows = pyarrow.parquet.read_table(next(samples.glob("*.parquet"))).to_pylist()
    return {str(row["prompt"]) for row in rows}


def test_an_instruct_model_trains_on_its_template(config, capsys):
    """Text rows and messages become the same prompt; each reward gets the shape of its rows."""
    shown = "first prompt, 7 tokens: <|user|>0+1=<|end|><|assistant|>"
    assert main(["train", str(config)]) == 0
    out = capsys.readouterr().out
    assert shown in out and "data.train.chat=false" in out
    assert out.index(shown) < out.index("step 1/1")
    assert saved_prompts(config) <= {f"{n}+1=" for n in range(12)}
    for override in ("data.train.chat=true", "data.train.system_prompt=abc"):
        assert main(["train", str(config), "--overwrite", override]) == 0, override
    words = [f"data.train.path={config.parent}/chats.jsonl"]
    words += [f"rewards.0.function={config.parent}/lists.py:correct"]
    capsys.readouterr()
    assert main(["train", str(config), "--overwrite", *words]) == 0
    assert shown in capsys.readouterr().out
    assert main(["train", str(config), "--overwrite", "data.train.chat=false"]) == 0
    assert "first prompt, 4 tokens: 0+1=\n" in capsys.readouterr().out


def test_the_dry_run_shows_it_without_a_model(config, capsys, monkeypatch):
    def load_model(*_: object, **__: object) -> None:
        raise AssertionError("a dry run loads no model")

    monkeypatch.setattr("rollpacker.trainer.model.load_model", load_model)
    assert main(["train", str(config), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "short round" in out and "<|user|>0+1=<|end|><|assistant|>" in out
    assert "\n  rows  12\n" in out
    rows = [json.loads(line) for line in (config.parent / "rows.jsonl").read_text().splitlines()]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, config.parent / "rows.parquet")
    of_parquet = ["data.train.kind=parquet", f"data.train.path={config.parent}/rows.parquet"]
    split = ["data.train.size=10", "data.eval_fraction=0.3"]
    assert main(["train", str(config), "--dry-run", *of_parquet, *split]) == 0
    assert "\n  rows  10, 0.3 of them held out\n" in capsys.readouterr().out
    for override in ("data.train.path=/nowhere.jsonl", "model.path=/nowhere"):
        assert main(["train", str(config), "--dry-run", override]) == 0
        out = capsys.readouterr().out
        assert "short round" in out
        assert "first prompt  cannot be shown: " in out and "/nowhere" in out


def test_a_run_of_an_earlier_version_keeps_its_plain_texts(config, capsys, monkeypatch):
    """Its saved config has no such key, and its texts were not rendered."""
    overrides = ["data.train.chat=false", "data.eval_fraction=0.3"]
    assert main(["train", str(config), *overrides]) == 0
    run = config.parent / "runs" / "tiny"
    saved, _ = parse_document(read_text(run / "config.yaml"), "config.yaml")
    del saved["data"]["train"]["chat"]
    write_document(saved, run / "config.yaml")
    identity = json.loads((run / "identity.json").read_text())
    del identity["chat"], identity["files"]
    (run / "identity.json").write_text(json.dumps(identity))
    capsys.readouterr()
    resume = ["train", str(config), "--resume", "data.eval_fraction=0.3", "train.steps=5"]
    assert main(resume) == 2
    assert "set data.train.chat=false to go on as it was" in capsys.readouterr().err
    assert main([*resume, "data.train.chat=false"]) == 0
    # `eval` of such a run asks what the run asked.
    saved, _ = parse_document(read_text(run / "config.yaml"), "config.yaml")
    del saved["data"]["train"]["chat"]
    write_document(saved, run / "config.yaml")
    seen = []
    load_policy = build.load_policy

    def watched(*arguments, **settings):
        policy = load_policy(*arguments, **settings)
        seen.append(policy.eval_prompts.chat)
        return policy

    monkeypatch.setattr(build, "load_policy", watched)
    assert main(["eval", str(run)]) == 0
    assert main(["eval", str(run), "data.train.chat=true"]) == 0
    assert seen == [False, True]
