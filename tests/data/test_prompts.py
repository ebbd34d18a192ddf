"""Prompt sets from every source, and every way in which a dataset can be wrong."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rollpacker.data.dataset import DataConfig, DataError, DatasetConfig, PromptSet, TaskConfig
from rollpacker.data.procedural import make_rows, shares
from rollpacker.data.prompts import IN_EVAL, TOO_LONG, load_few, load_prompts
from tests.data.characters import character_tokenizer, text_of

TOKENIZER = character_tokenizer()
ROWS = [{"prompt": f"say {i}", "answer": str(i), "extra": [i]} for i in range(40)]


def jsonl(path: Path, rows: list[Any], newline: str = "\n") -> Path:
    path.write_text("".join(json.dumps(row) + newline for row in rows), newline="")
    return path


def load(path: Path | str, kind: str = "jsonl", **settings: Any) -> PromptSet:
    own = {k: settings.pop(k) for k in list(settings) if k in DatasetConfig.__slots__}
    dataset = DatasetConfig(kind=kind, path=str(path), **own)
    return load_prompts(DataConfig(train=dataset, **settings), TOKENIZER)[0]


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        call()
    return str(caught.value)


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "rows.jsonl", ROWS)
    jsonl(tmp_path / "windows.jsonl", ROWS, newline="\r\n")
    (tmp_path / "bom.jsonl").write_bytes(
        b"\xef\xbb\xbf" + (tmp_path / "rows.jsonl").read_bytes() + b"\n\n"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=whole).save_to_disk(tmp_path / "dict")
    (tmp_path / "folder").mkdir()
    jsonl(tmp_path / "folder" / "a.jsonl", ROWS[:7])
    jsonl(tmp_path / "folder" / "b.jsonl", ROWS[7:])
    sets = [
        load(tmp_path / "rows.jsonl"),
        load(tmp_path / "windows.jsonl"),
        load(tmp_path / "bom.jsonl"),
        load(tmp_path / "rows.parquet", "parquet"),
        load(tmp_path / "saved", "huggingface"),
        load(tmp_path / "dict", "huggingface"),
        load(tmp_path / "folder"),
        load(f"{tmp_path}/folder/*.jsonl"),
    ]
    assert len({one.fingerprint for one in sets}) == 1
    first = sets[0]
    assert (len(first.rows), first.num_dropped) == (40, {})
    row = first.rows[3]
    assert (row.prompt, text_of(row.tokens)) == ("say 3", "say 3")
    assert row.columns == {"answer": "3", "extra": [3]}


def test_a_folder_of_data_files_through_datasets(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    jsonl(tmp_path / "data" / "test.jsonl", ROWS[:5])
    assert len(load(tmp_path / "data", "huggingface").rows) == 40
    assert len(load(tmp_path / "data", "huggingface", split="test").rows) == 5
    message = refusal(lambda: load(tmp_path / "data", "huggingface", split="dev"))
    assert "split dev" in message
    assert "test" in message


def test_the_hub_out_of_reach(monkeypatch: Any) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = refusal(lambda: load("someone/something", "huggingface"))
    assert "someone/something: the Hugging Face hub cannot be reached (no route)" in message


def test_fingerprint_tells_any_change(tmp_path: Path) -> None:
    prints = {load(jsonl(tmp_path / "a.jsonl", ROWS)).fingerprint}
    prints.add(load(jsonl(tmp_path / "a.jsonl", ROWS[::-1])).fingerprint)
    prints.add(
        load(jsonl(tmp_path / "a.jsonl", [*ROWS[:-1], ROWS[-1] | {"answer": "x"}])).fingerprint
    )
    prints.add(load(jsonl(tmp_path / "a.jsonl", ROWS[:-1])).fingerprint)
    assert len(prints) == 4


def test_equal_rows_are_two_prompts(tmp_path: Path) -> None:
    assert len(load(jsonl(tmp_path / "a.jsonl", [ROWS[0]] * 3)).rows) == 3


def test_size_takes_the_first_rows(tmp_path: Path) -> None:
    loaded = load(jsonl(tmp_path / "a.jsonl", ROWS), size=4)
    assert [row.prompt for row in loaded.rows] == ["say 0", "say 1", "say 2", "say 3"]


def test_chat_messages_and_system_prompt(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    own = [{"role": "system", "content": "own"}, *chat]
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": chat}, {"prompt": "yo"}, {"prompt": own}])
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path), system_prompt="be brief"))
    loaded, _ = load_prompts(config, TOKENIZER, chat_template_kwargs={"brief": True})
    assert [text_of(row.tokens) for row in loaded.rows] == [
        "<system>be brief<user>hi<assistant>!",
        "<system>be brief<user>yo<assistant>!",
        "<system>own<user>hi<assistant>!",
    ]
    assert loaded.rows[1].prompt == "yo"  # rewards see what the data has
    assert loaded.rows[1].messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "yo"},
    ]
    by_template = TOKENIZER.apply_chat_template(
        loaded.rows[0].prompt, add_generation_prompt=True, brief=True, return_dict=False
    )
    assert list(loaded.rows[0].tokens) == by_template


def test_chat_messages_without_a_template(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}])
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path)))
    message = refusal(lambda: load_prompts(config, character_tokenizer(chat=False)))
    assert "no chat template" in message


def test_template_and_answer_column(tmp_path: Path) -> None:
    rows = [{"q": "2+2", "solution": 4, "metadata": {"level": 1}}]
    loaded = load(
        jsonl(tmp_path / "a.jsonl", rows),
        prompt_template="{q} at {level} {{x}} {metadata[level]}=",
        answer_column="solution",
    )
    assert loaded.rows[0].prompt == "2+2 at 1 {x} 1="
    columns = {"q": "2+2", "metadata": {"level": 1}, "solution": 4, "answer": 4}
    assert loaded.rows[0].columns == columns


def test_the_answer_under_both_names_is_the_same_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "city": "Rome"}])
    # What a run of an earlier version recorded, whose rewards got the column as `answer` alone.
    renamed = jsonl(tmp_path / "b.jsonl", [{"prompt": "p", "answer": "Rome"}])
    loaded = load(path, answer_column="city")
    assert loaded.rows[0].columns == {"city": "Rome", "answer": "Rome"}
    assert loaded.fingerprint == load(renamed).fingerprint
    assert not caplog.records
    other = [{"prompt": "p", "city": "Rome", "answer": "Rome"}] * 2
    other.append({"prompt": "p", "city": "Rome", "answer": "Italy"})
    loaded = load(jsonl(tmp_path / "c.jsonl", other), answer_column="city")
    assert loaded.rows[2].columns == {"city": "Rome", "answer": "Rome"}
    (record,) = caplog.records
    assert "the column city as `answer`" in record.message and "c.jsonl, line 3" in record.message


def test_prompt_function(tmp_path: Path) -> None:
    (tmp_path / "make.py").write_text(
        "def good(row):\n    return row['q'].replace(' ', '')\n"
        "def bad(row):\n    return row['nothing']\n"
    )
    path = jsonl(tmp_path / "a.jsonl", [{"q": "4 - 1"}])
    assert load(path, prompt_function=f"{tmp_path}/make.py:good").rows[0].prompt == "4-1"
    message = refusal(lambda: load(path, prompt_function=f"{tmp_path}/make.py:bad"))
    assert "line 1" in message
    assert "raised KeyError: 'nothing'" in message
    message = refusal(lambda: load(path, prompt_function=f"{tmp_path}/make.py:godo"))
    assert 'Did you mean "good"?' in message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', ["rows.jsonl, line 2", "not valid JSON", "column"]),
        ('{"prompt": "a"}\n[1, 2]\n', ["line 2", "must be an object", "list"]),
        ('{"prompt": "a"}\n{"promt": "b"}\n', ["line 2", "no column prompt", '"promt"', "leave"]),
        ('{"promt": "b"}\n{"prompt": "a"}\n', ["line 1", "Other rows have it: add it to this one"]),
        ('{"prompts": "a"}\n', ["no column prompt", 'Did you mean "prompts"?', "prompt_column"]),
        ('{"prompt": ""}\n', ["line 1", "empty"]),
        ('{"prompt": null}\n', ["line 1", "text or a list of chat messages"]),
        ('{"prompt": 5}\n', ["line 1", "int"]),
        ('{"prompt": [{"role": "user"}]}\n', ["line 1", '"content"']),
        ('{"prompt": "a\\ud800"}\n', ["line 1", "lone surrogate"]),
        ("[" * 100_000 + "\n", ["line 1", "JSON"]),
        ("", ["the dataset is empty"]),
        ("\n\n", ["the dataset is empty"]),
    ],
)
def test_bad_lines_are_located(tmp_path: Path, lines: str, expected: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    message = refusal(lambda: load(path))
    for part in expected:
        assert part in message


def test_many_bad_rows_make_one_message(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, *[{"prompt": ""} for _ in range(9)]]
    message = refusal(lambda: load(jsonl(tmp_path / "a.jsonl", rows)))
    assert "9 of 10 rows cannot be used" in message
    assert "line 2" in message
    assert "... and 6 more" in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert f'Did you mean "{path}"?' in refusal(lambda: load(tmp_path / "row.jsonl"))
    (tmp_path / "empty").mkdir()
    assert "no *.jsonl file" in refusal(lambda: load(tmp_path / "empty"))
    path.write_bytes(b'{"prompt": "\xff"}\n')
    assert "line 1: not UTF-8" in refusal(lambda: load(path))
    good = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), good)
    (tmp_path / "cut.parquet").write_bytes(good.read_bytes()[:-100])
    assert "not a readable parquet" in refusal(lambda: load(tmp_path / "cut.parquet", "parquet"))


def test_missing_answer_column(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    message = refusal(lambda: load(path, answer_column="anwser"))
    assert "no column anwser" in message
    assert 'Did you mean "answer"?' in message


@pytest.mark.parametrize("template", ["{qestion}", "{", "{question.x}", "{question!z}"])
def test_bad_templates(tmp_path: Path, template: str) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"question": "a"}])
    message = refusal(lambda: load(path, prompt_template=template))
    assert "prompt_template" in message
    assert "line 1" in message


def test_long_prompts_are_dropped_counted_located(tmp_path: Path, caplog: Any) -> None:
    rows = [*ROWS, {"prompt": "x" * 50, "answer": "", "extra": [0]}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        loaded = load(path, max_prompt_tokens=20)
    assert (len(loaded.rows), loaded.num_dropped) == (40, {TOO_LONG: 1})
    assert "line 41 (50)" in caplog.text
    message = refusal(lambda: load(path, max_prompt_tokens=20, max_dropped_fraction=0.01))
    assert "1 of 41 prompts have more than 20 tokens" in message
    everything = refusal(lambda: load(path, max_prompt_tokens=2, max_dropped_fraction=1.0))
    assert "41 of 41 prompts" in everything


def test_prompts_must_fit_into_the_context(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path)))
    loaded, _ = load_prompts(config, TOKENIZER, max_context_tokens=106, max_response_tokens=100)
    assert len(loaded.rows) == 40
    message = refusal(
        lambda: load_prompts(config, TOKENIZER, max_context_tokens=105, max_response_tokens=100)
    )
    assert "more than 5 tokens" in message
    assert "lower rollout.max_response_tokens" in message
    with pytest.raises(DataError, match="no room for a prompt"):
        load_prompts(config, TOKENIZER, max_context_tokens=100, max_response_tokens=100)


def test_unknown_characters_are_reported(tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        load(jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": "café"}]))
    assert "1 of 41 prompts hold characters that the tokenizer does not know" in caplog.text


def test_held_out_share_keeps_equal_prompts_together(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ROWS * 5)
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path)), eval_fraction=0.3)
    train, held_out = load_prompts(config, TOKENIZER)
    assert held_out is not None
    prompts = [{row.prompt for row in one.rows} for one in (train, held_out)]
    assert not prompts[0] & prompts[1]
    assert len(train.rows) + len(held_out.rows) == 200
    assert 0.1 < len(held_out.rows) / 200 < 0.5
    grown = jsonl(tmp_path / "b.jsonl", [{"prompt": "new"}, *ROWS])
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(grown)), eval_fraction=0.3)
    _, later = load_prompts(config, TOKENIZER)
    assert later is not None
    assert prompts[1] <= {row.prompt for row in later.rows}, "a new row moves no other"


def test_an_odd_held_out_share_of_a_small_file_is_told(tmp_path: Path) -> None:
    told = set()
    for size in (8, 12, 16, 20, 24, 32, 40, 48, 200):
        path = jsonl(tmp_path / f"{size}.jsonl", [{"prompt": f"{n}+1="} for n in range(size)])
        config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path)), eval_fraction=0.25)
        _, held_out = load_prompts(config, TOKENIZER)
        assert held_out is not None
        num, asked = len(held_out.rows), 0.25 * size
        says = [line for line in held_out.told if "a hash of the prompt chooses" in line]
        assert bool(says) == (abs(num - asked) > max(1, asked / 5))
        told.add(bool(says))
        if says:
            wanted = f"{num} of {size} rows are held out, data.eval_fraction=0.25 asks for"
            assert says[0].startswith(f"{wanted} {asked:.0f}: ")
    assert told == {True, False}


def test_the_first_prompt_looked_at_is_trained_on(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}+1="} for n in range(40)])
    config = DataConfig(train=DatasetConfig(kind="jsonl", path=str(path)), eval_fraction=0.8)
    train, _ = load_prompts(config, TOKENIZER)
    assert train.rows[0].where != f"{path}, line 1", "the first row is held out"
    assert load_few(config, "train", TOKENIZER).rows[0].prompt == train.rows[0].prompt


def test_eval_prompts_are_not_trained_on(tmp_path: Path) -> None:
    train = DatasetConfig(kind="jsonl", path=str(jsonl(tmp_path / "a.jsonl", ROWS)))
    held_out = DatasetConfig(kind="jsonl", path=str(jsonl(tmp_path / "b.jsonl", ROWS[:4])))
    loaded, _ = load_prompts(DataConfig(train=train, eval=held_out), TOKENIZER)
    assert loaded.num_dropped == {IN_EVAL: 4}
    assert loaded.rows[0].prompt == "say 4"
    message = refusal(lambda: load_prompts(DataConfig(train=train, eval=train), TOKENIZER))
    assert "every prompt of data.train (40 rows) is also in data.eval" in message


def gym(size: int, *tasks: TaskConfig, **settings: Any) -> DatasetConfig:
    return DatasetConfig(kind="reasoning_gym", size=size, tasks=tasks, **settings)


def test_gym_mixture_is_weighted_and_deterministic() -> None:
    tasks = (TaskConfig(task="chain_sum", weight=3), TaskConfig(task="gcd"))
    config = DataConfig(train=gym(40, *tasks), eval=gym(10, *tasks))
    train, held_out = load_prompts(config, TOKENIZER)
    again, _ = load_prompts(config, TOKENIZER)
    assert held_out is not None
    assert train.fingerprint == again.fingerprint
    names = [row.columns["task"] for row in train.rows]
    assert (names.count("chain_sum"), names.count("gcd")) == (30, 10)
    assert names != sorted(names), "the tasks are mixed"
    assert not {r.prompt for r in train.rows} & {r.prompt for r in held_out.rows}
    assert set(train.rows[0].columns) == {"question", "answer", "metadata", "task", "task_options"}
    other, _ = load_prompts(DataConfig(train=gym(40, *tasks, seed=1)), TOKENIZER)
    shared = {r.prompt for r in train.rows} & {r.prompt for r in other.rows}
    assert len(shared) < 10, "neighbouring seeds do not share their items"


def test_gym_rows_are_made_into_prompts_by_metadata() -> None:
    task = TaskConfig(task="chain_sum", options={"min_digits": 1, "max_digits": 1})
    loaded, _ = load_prompts(
        DataConfig(train=gym(5, task, prompt_template="{expression} =")), TOKENIZER
    )
    assert all(r.prompt == r.columns["metadata"]["expression"] + " =" for r in loaded.rows)


def test_gym_task_with_too_few_problems_is_reported(caplog: Any) -> None:
    options = {"min_digits": 1, "max_digits": 1, "min_terms": 2, "max_terms": 2}
    task = TaskConfig(task="chain_sum", options=options)
    config = DataConfig(train=gym(300, task), eval=gym(400, task))
    with caplog.at_level(logging.WARNING):
        train, _ = load_prompts(config, TOKENIZER)
    assert train.num_dropped[IN_EVAL] > 150
    assert "too few distinct problems" in caplog.text


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (TaskConfig(task="chainsum"), 'no task chainsum. Did you mean "chain_sum"?'),
        (TaskConfig(task="gcd", options={"min_number": 1}), 'Did you mean "min_num'),
        (TaskConfig(task="gcd", options={"seed": 1}), "no option seed"),
        (TaskConfig(task="chain_sum", options={"min_terms": -3}), "does not take the options"),
    ],
)
def test_gym_mistakes(task: TaskConfig, expected: str) -> None:
    assert expected in refusal(lambda: make_rows(gym(4, task), "train"))


def test_shares_add_up() -> None:
    assert shares([0.6, 0.31, 0.06, 0.03], 100) == [60, 31, 6, 3]
    assert shares([1, 1, 1], 4) == [2, 1, 1]
    assert shares([1e-9, 1], 5) == [0, 5]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "reasoning_gym", "size": 3}, "tasks must name"),
        ({"kind": "reasoning_gym", "tasks": (TaskConfig(task="gcd"),)}, "size must say"),
        ({"kind": "jsonl"}, "path must say"),
        ({"kind": "jsonl", "path": "a", "size": 0}, "at least 1"),
        (
            {"kind": "jsonl", "path": "a", "prompt_template": "x", "prompt_function": "a:b"},
            "exclude each other",
        ),
    ],
)
def test_dataset_settings_that_contradict(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        DatasetConfig(**settings)
