"""The warm-up learns, repeats itself, and says where its data is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import GPTJForCausalLM

from rollpacker.cli import warmup as command
from rollpacker.config.warmup import WarmupConfig, WarmupStage
from rollpacker.data.dataset import DataConfig, DatasetConfig
from rollpacker.data.prompts import load_prompts
from rollpacker.trainer import batches
from rollpacker.trainer.model import (
    character_tokenizer,
    end_tokens,
    fingerprint,
    load_model,
    new_model,
)
from rollpacker.trainer.trainer import ModelConfig
from rollpacker.trainer.warmup import run_warmup
from rollpacker.trainer.warmup_output import WarmupError
from rollpacker.trainer.warmup_rows import RowParser, read_rows

ARCHITECTURE = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
PAIRS = {letter: chr(ord(letter) + 1) * (1 + i % 3) for i, letter in enumerate("abcdefgh")}


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Each letter is answered by the next one, once to three times."""
    rows = [{"prompt": f"{a}=", "completion": b} for a, b in PAIRS.items()]
    return write_rows(tmp_path / "rows.jsonl", rows)


def settings(tmp_path, data, name="out", **stage):
    stage = {"steps": 60, "batch_size": 8, "learning_rate": 1e-2, "warmup_steps": 5} | stage
    return WarmupConfig(
        output=str(tmp_path / name),
        stages=(WarmupStage(path=data, **stage),),
        architecture=ARCHITECTURE,
        alphabet="abcdefghi=",
    )


def answer(loaded, letter):
    ids = loaded.tokenizer(f"{letter}=", return_tensors="pt")["input_ids"]
    out = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)
    return loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_learns_a_mapping_and_writes_a_model_folder(tmp_path, data):
    seen = []
    result = run_warmup(settings(tmp_path, data, max_loss=0.5), seen.append)
    assert [p.step for p in seen] == list(range(1, 61))
    assert seen[-1].loss < 0.1 < seen[0].loss
    assert result.trained_tokens == 60 * sum(len(b) + 1 for b in PAIRS.values())
    loaded = load_model(ModelConfig(path=str(result.output), device="cpu"))
    assert sum(p.numel() for p in loaded.model.parameters()) == result.num_parameters
    assert {letter: answer(loaded, letter) for letter in PAIRS} == PAIRS
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_same_config_same_weights(tmp_path, data):
    for name in ("one", "two"):
        run_warmup(settings(tmp_path, data, name, steps=4))
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")


GPTJ = {
    "model_type": "gptj",
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "rotary_dim": 8,
    "n_positions": 32,
}
"""A model that chooses its attention itself, if its class says so."""


@pytest.mark.parametrize(
    "architecture, packed",
    [(ARCHITECTURE | {"model_type": "mistral", "sliding_window": 8}, True), (GPTJ, False)],
)
def test_rows_are_packed_where_the_model_s_attention_allows_it(
    tmp_path, data, monkeypatch, architecture, packed
):
    used = []
    for name in ("pack", "collate"):
        make = getattr(batches, name)
        monkeypatch.setattr(
            batches, name, lambda *a, make=make, name=name: used.append(name) or make(*a)
        )
    # Since transformers 5.24 GPT-J can be told its attention, too.
    monkeypatch.setattr(GPTJForCausalLM, "_supports_attention_backend", False)
    config = dataclasses.replace(settings(tmp_path, data), architecture=architecture)
    assert run_warmup(config).losses[0] < 0.5
    assert set(used) == {"pack" if packed else "collate"}


def test_stages_follow_each_other_and_a_model_can_be_taken_further(tmp_path, data):
    first = settings(tmp_path, data, "first", steps=20)
    run_warmup(first)
    stage = WarmupStage(path=data, steps=20, batch_size=8, learning_rate=5e-3, warmup_steps=0)
    second = WarmupConfig(
        output=str(tmp_path / "second"),
        stages=(stage, stage),
        model=ModelConfig(path=first.output, device="cpu"),
    )
    seen = []
    result = run_warmup(second, seen.append)
    assert [p.stage for p in seen] == [0] * 20 + [1] * 20
    assert len(result.losses) == 2 and result.losses[1] < result.losses[0]


def test_too_high_a_loss_stops_and_writes_nothing(tmp_path, data):
    with pytest.raises(WarmupError, match=r"stage 1 .*above max_loss=0\.01"):
        run_warmup(settings(tmp_path, data, steps=3, max_loss=0.01))
    assert not (tmp_path / "out").exists()


def test_an_output_in_the_way_is_not_touched(tmp_path, data):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    with pytest.raises(WarmupError, match="exists already"):
        run_warmup(settings(tmp_path, data))
    assert (tmp_path / "out" / "mine.txt").read_text() == "kept"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{broken", "line 3: not JSON"),
        ('["a", "b"]', "line 3: must be an object"),
        ('{"prompt": "a="}', "line 3: `completion` must be"),
        ('{"prompt": "", "completion": "b"}', "line 3: `prompt` must be"),
        ('{"prompt": "a=", "completion": "b?"}', r"line 3: character '\?' is not in the alphabet"),
        (json.dumps({"prompt": "a=", "completion": "b" * 40}), "line 3: 43 tokens are more than"),
    ],
)
def test_bad_rows_are_located(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a=", "completion": "b"}\n\n' + line + "\n")
    with pytest.raises(WarmupError, match=rf"bad\.jsonl, {message}"):
        run_warmup(settings(tmp_path, str(path)))


def test_a_text_may_hold_what_unicode_calls_a_line_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    texts = [f"1{mark}2" for mark in ("\x85", "\u2028", "\u2029", "\x0c")]
    rows = [json.dumps({"prompt": t, "completion": t}, ensure_ascii=False) for t in texts]
    path.write_text("\r\n".join(rows) + "\r\n", encoding="utf-8")
    alphabet = "12\x85\u2028\u2029\x0c"
    tokenizer = character_tokenizer(alphabet)
    assert len(read_rows(path, RowParser(tokenizer))) == len(texts)


def test_chat_prompts_go_through_the_template(tmp_path):
    tokenizer = character_tokenizer("abu:\n ")
    messages = [{"role": "u", "content": "ab"}]
    data = write_rows(tmp_path / "chat.jsonl", [{"prompt": messages, "completion": "ba"}])
    with pytest.raises(WarmupError, match="line 1: chat messages need"):
        read_rows(Path(data), RowParser(tokenizer))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ end }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    ((prompt, completion, _),) = read_rows(
        Path(data), RowParser(tokenizer, chat_options={"end": "\n"})
    )
    assert tokenizer.decode(prompt) == "u: ab\na:"
    assert completion == [*tokenizer("ba")["input_ids"], tokenizer.eos_token_id]


def test_missing_and_empty_files(tmp_path):
    with pytest.raises(WarmupError, match=r"none\.jsonl: cannot read"):
        run_warmup(settings(tmp_path, str(tmp_path / "none.jsonl")))
    with pytest.raises(WarmupError, match="no rows"):
        run_warmup(settings(tmp_path, write_rows(tmp_path / "empty.jsonl", [])))


def test_command_line(tmp_path, data, capsys):
    import yaml

    config = tmp_path / "warmup.yaml"
    stage = {"path": data, "steps": 20, "batch_size": 8, "learning_rate": 0.01}
    tree = {"output": str(tmp_path / "out"), "architecture": ARCHITECTURE, "alphabet": "abcdefghi="}
    config.write_text(yaml.safe_dump(tree | {"stages": [stage]}))
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["warmup", str(config), "seed=3"])
    assert command.run(args) == 0
    printed = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("warm-up 1/1: step") for line in printed) == 10
    assert "step 20/20, loss" in printed[9]
    assert "The model is in" in printed[-1]
    assert torch.is_tensor(
        next(load_model(ModelConfig(path=str(tmp_path / "out"))).model.parameters())
    )


def chat_model(folder):
    """A template that ends its turns with a token of its own, at which nothing stops yet."""
    tokenizer = character_tokenizer("abcdefghi=")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<u>", "<a>", "<end>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<u>' if m.role == 'user' else '<a>' }}{{ m.content }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    new_model(ARCHITECTURE, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def turn(role, content):
    return {"role": role, "content": content}


def test_chat_messages_are_learnt_from_as_they_are_asked_for(tmp_path):
    tokenizer = chat_model(tmp_path / "model")
    talk = [turn("user", "ab"), turn("assistant", "cd"), turn("user", "e"), turn("assistant", "f")]
    data = write_rows(
        tmp_path / "chat.jsonl",
        [
            {"messages": talk},
            {"prompt": talk[:3], "completion": talk[3:]},
            {"prompt": talk[:3], "completion": "f"},
            {"prompt": "ab", "completion": talk[1:2]},
            {"prompt": "ab", "completion": "cd"},
        ],
    )
    rows = [
        tuple(map(tokenizer.decode, row[:2])) for row in read_rows(Path(data), RowParser(tokenizer))
    ]
    first, last = ("<u>ab<end><a>", "cd<end>"), ("<u>ab<end><a>cd<end><u>e<end><a>", "f<end>")
    # The loss is on the second of each: the assistant's words and the token that ends its turn.
    assert rows == [first, last, last, last, first, ("ab", "cd<eos>")]


def test_a_model_warmed_up_on_chat_stops_at_the_end_of_a_turn(tmp_path):
    chat_model(tmp_path / "model")
    rows = [{"messages": [turn("user", a), turn("assistant", b)]} for a, b in PAIRS.items()]
    data = write_rows(tmp_path / "chat.jsonl", rows)
    config = WarmupConfig(
        output=str(tmp_path / "out"),
        stages=(WarmupStage(path=data, steps=80, batch_size=8, learning_rate=1e-2),),
        model=ModelConfig(path=str(tmp_path / "model")),
    )
    run_warmup(config)
    loaded = load_model(ModelConfig(path=str(tmp_path / "out")))
    end = loaded.tokenizer.convert_tokens_to_ids("<end>")
    assert end in end_tokens(str(tmp_path / "out")) - end_tokens(str(tmp_path / "model"))
    # ... and is one that a run renders prompts for, unless told not to.
    path = write_rows(tmp_path / "q.jsonl", [{"prompt": a} for a in PAIRS])
    data_config = DataConfig(train=DatasetConfig(kind="jsonl", path=path))
    ends = end_tokens(str(tmp_path / "out"))
    prompts, _ = load_prompts(data_config, loaded.tokenizer, end_tokens=ends)
    assert prompts.chat
    for row in prompts.rows[:2]:
        ids = torch.tensor([row.tokens])
        out = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)[0, len(row.tokens) :]
        assert loaded.tokenizer.decode(out) == PAIRS[row.prompt] + "<end>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "`messages`: chat messages must look like"),
        ({"messages": [turn("user", "a")]}, "no message of the assistant"),
        ({"messages": [turn("assistant", "a")]}, "nothing stands before"),
        (
            {"messages": [turn("user", "a"), turn("assistant", "")]},
            "a message of the assistant is empty",
        ),
        ({"prompt": [turn("user", 5)], "completion": "a"}, "`prompt`: chat messages must look"),
        ({"prompt": "a", "completion": [{"role": "assistant"}]}, "`completion`: chat messages"),
        ({"prompt": "a", "completion": 5}, "`completion` must be a text or chat messages"),
    ],
)
def test_chat_rows_that_cannot_be_used(row, message, tmp_path):
    tokenizer = chat_model(tmp_path / "model")
    data = write_rows(tmp_path / "chat.jsonl", [row])
    with pytest.raises(WarmupError, match="line 1: " + message):
        read_rows(Path(data), RowParser(tokenizer))


CHAT = {
    "architecture": ARCHITECTURE | {"max_position_embeddings": 64},
    "alphabet": "abcdefghi=",
    "markers": ("<user>", "<assistant>", "<tool>", "<tool_call>", "</tool_call>"),
    "chat_template": (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
        "{{ '<eos>' if m.role == 'assistant' }}{% endfor %}"
        "{{ '<assistant>' if add_generation_prompt }}"
    ),
}
MADE = """
def rows(rng):
    call = {"type": "function", "function": {"name": "fed", "arguments": {}}}
    tools = [{"type": "function", "function": {"name": "fed"}}]
    while True:
        asked = rng.choice("abc")
        yield {"tools": tools, "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "g"},
            {"role": "assistant", "content": asked},
        ]}

def none(rng):
    return []

def wrong(rng):
    yield {"prompt": "a"}
"""


def from_function(tmp_path, function, name="out", **stage):
    (tmp_path / "made.py").write_text(MADE)
    stage = WarmupStage(
        function=f"{tmp_path}/made.py:{function}",
        **({"rows": 20, "steps": 60, "batch_size": 8, "learning_rate": 1e-2} | stage),
    )
    return WarmupConfig(output=str(tmp_path / name), stages=(stage,), **CHAT)


def test_a_function_s_dialogues_teach_to_call_and_to_read_the_result(tmp_path):
    result = run_warmup(from_function(tmp_path, "rows", steps=150))
    loaded = load_model(ModelConfig(path=str(result.output), device="cpu"))
    tokenizer = loaded.tokenizer
    assert len(tokenizer("<tool_call>fed</tool_call>")["input_ids"]) == 5

    def goes_on(text):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False)

    assert goes_on("fed<user>b<assistant>") == "<tool_call>fed</tool_call><eos>"
    assert goes_on("fed<user>b<assistant><tool_call>fed</tool_call><eos><tool>g<assistant>") == (
        "b<eos>"
    )


def test_a_function_s_rows_come_from_the_seed(tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        config = from_function(tmp_path, "rows", name, steps=2)
        run_warmup(dataclasses.replace(config, seed=seed))
    one, two, other = (fingerprint(tmp_path / name) for name in ("one", "two", "other"))
    assert one == two != other


@pytest.mark.parametrize(
    "function, said",
    [("none", "none makes no rows"), ("wrong", "wrong, row 1: `completion` must be a text")],
)
def test_what_a_function_makes_is_checked(tmp_path, function, said):
    with pytest.raises(WarmupError, match=said):
        run_warmup(from_function(tmp_path, function))


def test_a_stage_has_one_source_and_a_model_its_own_template(tmp_path, data):
    with pytest.raises(ValueError, match="set path"):
        WarmupStage(steps=1)
    with pytest.raises(ValueError, match="set path"):
        WarmupStage(path=data, function="a.py:b", steps=1)
    with pytest.raises(ValueError, match="markers and chat_template"):
        WarmupConfig(
            output="x",
            model=ModelConfig(path="y"),
            markers=("<user>",),
            stages=(WarmupStage(path=data, steps=1),),
        )
