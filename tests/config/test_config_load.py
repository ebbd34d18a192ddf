"""Loading: what a user gets wrong is named, all at once; nothing in a config can do harm."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.config.document import MAX_FILE_BYTES
from rollpacker.config.load import (
    ConfigError,
    changes_since,
    differences,
    load_config,
    save_config,
    to_plain,
)
from rollpacker.config.schema import RunConfig
from rollpacker.core.fleet.stream_plan import StreamConfig
from rollpacker.core.rounds.tail_batching import Tier

GOOD = """\
name: small
model: {path: some/model}
data:
  train:
    kind: reasoning_gym
    size: 100
    tasks: [{task: chain_sum, options: {min_terms: 2}}]
rollout: {prompts_per_step: 8, samples_per_prompt: 4, max_response_tokens: 64}
train: {steps: 3, learning_rate: 3e-4}
rewards:
  - function: reasoning_gym
"""


def written(tmp_path: Path, text: str | bytes, name: str = "run.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def load(tmp_path: Path, *overrides: str, text: str = GOOD) -> RunConfig:
    return load_config(written(tmp_path, text), overrides, RunConfig)


def refusal(tmp_path: Path, *overrides: str, text: str | bytes = GOOD) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text), overrides, RunConfig)
    return str(caught.value)


def test_defaults_and_types(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.train.learning_rate == 3e-4
    assert config.train.betas == (0.9, 0.95)
    assert config.data.train.tasks[0].options == {"min_terms": 2}
    assert config.tail_batching.enabled is True
    assert config.eval.every_steps == 10


def test_overrides_reach_everywhere(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "train.learning_rate=1e-5",
        "rewards.0.weight=2",
        "rewards.0.arguments.answer_regex=[0-9]+$",
        "eval.every_steps=null",
        "rollout.stop=[END, '1']",
        "data.train.tasks.0.options.max_terms=4",
        "name=2024",
        "train.betas=[0.8, 0.9]",
        "rollout.engine.max_slots=16",
        "data.train.system_prompt=Answer: one word",
    )
    assert config.train.learning_rate == 1e-5
    assert config.rewards[0].weight == 2.0
    assert config.rewards[0].arguments == {"answer_regex": "[0-9]+$"}
    assert config.eval.every_steps is None
    assert config.rollout.stop == ("END", "1")
    assert config.data.train.tasks[0].options == {"min_terms": 2, "max_terms": 4}
    assert config.name == "2024"
    assert config.data.train.system_prompt == "Answer: one word"
    assert config.train.betas == (0.8, 0.9)
    assert config.rollout.engine.max_slots == 16


@pytest.mark.parametrize("number", ["1e-6", "'1e-6'", "1.0E-6", "0.000001", "1E-06"])
def test_every_way_to_write_a_number(tmp_path: Path, number: str) -> None:
    assert load(tmp_path, f"train.learning_rate={number}").train.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=abc", ["train.steps", '"abc"', "a whole number or null"]),
        ("train.steps=1.5", ["train.steps", "1.5", "a whole number"]),
        ("train.steps=true", ["train.steps", "true", "a whole number"]),
        ("train.lerning_rate=1", ["train.lerning_rate", 'Did you mean "learning_rate"?']),
        ("trian.steps=1", ["trian", 'Did you mean "train"?']),
        ("tail_batching.enabled=yes", ["tail_batching.enabled", '"yes"', "true or false"]),
        ("tail_batching.enabled=1", ["tail_batching.enabled", "true or false"]),
        ("train.learning_rate=nan", ["train.learning_rate", "nan", "a number"]),
        ("train.learning_rate=.inf", ["train.learning_rate", "inf", "a number"]),
        ("train.learning_rate=-1", ["train.learning_rate", "more than 0", "-1"]),
        ("data.train.kind=json", ["data.train.kind", '"jsonl"', "reasoning_gym"]),
        ("train.threads=atuo", ["train.threads", 'Did you mean "auto"?']),
        ("train.betas=[1, 2, 3]", ["train.betas", "a list of 2"]),
        ("rollout.samples_per_prompt=1", ["rollout.samples_per_prompt", "at least 2"]),
        ("rewards=[]", ["rewards", "at least one"]),
        ("rewards=5", ["rewards", "a list of mappings"]),
        ("rewards.1.weight=2", ["rewards.1.weight=2", "0 to 0"]),
        ("rewards.first.weight=2", ["rewards.first.weight=2", "is a list"]),
        ("eval=5", ["eval", "a mapping with keys such as every_steps"]),
        ("model=null", ["model", "null", "a mapping"]),
        ("model.path=null", ["model.path", "null", "a text"]),
        ("model.path=???", ["model.path", "not set"]),
        ("name.x=1", ["name.x=1", "single value"]),
        ("train", ['"train"', "key=value"]),
        ("=3", ['"=3"', "key=value"]),
        ("train..steps=3", ["train..steps", "empty part"]),
        ("train.steps=[1", ["train.steps", "[1", "a whole number"]),
        ("train.steps=!!python/name:os.system", ["train.steps", "tag"]),
        ("runs_dir=${oc.env:HOME}", ["runs_dir", "nothing else"]),
        ("runs_dir=${nmae}", ["runs_dir", 'Did you mean "name"?']),
        ("runs_dir=${.name}", ["runs_dir", "nothing else"]),
        ("runs_dir=${runs_dir}", ["runs_dir", "refer to the value directly"]),
        ("train.steps=" + "9" * 5000, ["train.steps"]),
        ("model.path=\udcff", ["model.path"]),
    ],
)
def test_refusals_name_key_value_and_what_is_allowed(
    tmp_path: Path, override: str, expected: list[str]
) -> None:
    message = refusal(tmp_path, override)
    for part in expected:
        assert part in message
    assert message.count("\n") == 0, "one problem, one line"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("- a\n- b\n", "`key: value` lines"),
        ("name\n", "`key: value` lines"),
        ("name: a\nname: b\n", "name is set twice, in line 1 and in line 2"),
        ("train:\n  steps: 1\n  steps: 2\n", "train.steps is set twice, in line 2 and in line 3"),
        ("name: [unclosed\n", "line 2: not valid YAML"),
        ("a:\n\t- b\n", "line 2: not valid YAML"),
        ("name: !!python/object/apply:os.system [ls]\n", "tag"),
        ("name: !custom x\n", "tag"),
        ("5: a\n", "a key must be a text"),
        ("? [a, b]\n: c\n", "a key must be a text"),
        ("name: &a [*a]\n", "contains itself"),
        ("name: " + "[" * 700 + "\n", "not valid YAML|too deeply"),
        ("name: x\n---\nname: y\n", "not valid YAML"),
        (b"name: \xff\xfe\n", "line 1: not UTF-8"),
        (b"name: a\x00b\n", "not valid YAML"),
    ],
)
def test_broken_files(tmp_path: Path, text: str | bytes, expected: str) -> None:
    message = refusal(tmp_path, text=text)
    assert any(part in message for part in expected.split("|")), message


def test_alias_bomb_is_stopped_before_it_grows(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "aliases expanded" in refusal(tmp_path, text="\n".join(levels))


def test_references_cannot_grow_without_bound(tmp_path: Path) -> None:
    chain = "".join(f"x{i}: ${{x{i + 1}}}${{x{i + 1}}}\n" for i in range(40)) + "x40: boom\n"
    assert "refer to the value directly" in refusal(tmp_path, text=chain)
    many = 'big: "' + "${name}" * 101 + '"\n'
    assert "more than 100 references" in refusal(tmp_path, text=GOOD + many)


def test_too_large_a_file(tmp_path: Path) -> None:
    assert "larger than" in refusal(tmp_path, text="#" * (MAX_FILE_BYTES + 1))


def test_all_problems_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "train.steps=x", "nonsense", "rollout.top_p=2", "modle.path=a")
    assert message.splitlines()[0].endswith("4 problems")
    for part in ("train.steps", '"nonsense"', "rollout.top_p", 'Did you mean "model"?'):
        assert part in message


def test_missing_keys_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, text="name: x\n")
    for key in ("model", "data", "rollout", "train", "rewards"):
        assert f"{key} is not set" in message


def test_line_numbers(tmp_path: Path) -> None:
    message = refusal(tmp_path, text=GOOD + "evall:\n  every_steps: 3\n")
    assert "evall (line 12) is no known key. Did you mean" in message


def test_references_inside_the_config(tmp_path: Path) -> None:
    text = GOOD + "runs_dir: out/${name}-${seed}\nseed: 7\n"
    assert load(tmp_path, text=text).runs_dir == "out/small-7"
    assert load(tmp_path, "seed=${train.steps}").seed == 3


def test_yaml_1_1_surprises_are_texts(tmp_path: Path) -> None:
    assert load(tmp_path, text=GOOD.replace("small", "no")).name == "no"
    assert load(tmp_path, text=GOOD.replace("small", "2020-01-01")).name == "2020-01-01"
    assert load(tmp_path, text=GOOD.replace("small", "'12:30'")).name == "12:30"
    assert "007" in refusal(tmp_path, "train.steps=007")


def test_merge_keys_and_anchors(tmp_path: Path) -> None:
    text = GOOD.replace("rewards:\n", "rewards:\n  - &r {function: reasoning_gym, name: a}\n")
    text = text.replace("  - function: reasoning_gym\n", "  - {<<: *r, name: b}\n")
    assert [reward.name for reward in load(tmp_path, text=text).rewards] == ["a", "b"]


def test_windows_file(tmp_path: Path) -> None:
    text = "\ufeff" + GOOD.replace("\n", "\r\n")
    assert load(tmp_path, text=text) == load(tmp_path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    written(tmp_path, GOOD, "quickstart.yaml")
    with pytest.raises(ConfigError, match=r'Did you mean ".*/quickstart\.yaml"'):
        load_config(tmp_path / "quickstrat.yaml", [], RunConfig)
    with pytest.raises(ConfigError, match="does not exist either"):
        load_config(tmp_path / "nowhere" / "a.yaml", [], RunConfig)
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path, [], RunConfig)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    text: str | None = None
    choice: Literal["a", "b"] = "a"
    both: int | Literal["auto"] = "auto"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Anything:
    number: float
    flag: bool
    inner: Inner
    items: tuple[Inner, ...] = ()
    texts: tuple[str, ...] = ()
    free: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def test_texts_with_any_line_break_survive_saving(tmp_path: Path) -> None:
    for mark in ("\x85", "\u2028", "\u2029", "\r", "\r\n", "\n", "\x0c", "\x1c"):
        texts = (mark, f"a{mark}b", f"{mark} a", f"a {mark}", f"a{mark}\nb")
        config = Anything(number=1.0, flag=True, inner=Inner(text=texts[1]), texts=texts)
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml", [], Anything) == config, repr(mark)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00$\r\x85\u2028\u2029"))
SAFE = TEXTS.filter(lambda text: text != "???" and text.isprintable())
INNER = st.builds(
    Inner,
    text=st.none() | SAFE,
    choice=st.sampled_from(["a", "b"]),
    both=st.integers(-(10**20), 10**20) | st.just("auto"),
)
FREE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | SAFE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SAFE, inner, max_size=3),
    max_leaves=6,
)
ANYTHING = st.builds(
    Anything,
    number=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    inner=INNER,
    items=st.lists(INNER, max_size=3).map(tuple),
    texts=st.lists(SAFE, max_size=3).map(tuple),
    free=st.dictionaries(SAFE, FREE, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(ANYTHING)
def test_whatever_is_saved_loads_back_equal(tmp_path_factory: Any, config: Anything) -> None:
    path = tmp_path_factory.getbasetemp() / "anything.yaml"
    save_config(config, path)
    assert load_config(path, [], Anything) == config


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_no_text_makes_it_raise_anything_else(tmp_path_factory: Any, text: str | bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError):
        load_config(path, [], RunConfig)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60))
def test_no_override_makes_it_raise_anything_else(
    tmp_path_factory: Any, key: str, value: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "good.yaml"
    path.write_text(GOOD)
    for override in (f"{key}={value}", f"name={value}", f"data.train.tasks.0.options.x={value}"):
        try:
            load_config(path, [override], RunConfig)
        except ConfigError as error:
            assert str(error)


def test_saving_is_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(load(tmp_path), path)
    before = path.read_text()
    with pytest.raises(Exception, match="represent"):
        save_config({"a": object()}, path)
    assert path.read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["config.yaml", "run.yaml"]


def test_differences(tmp_path: Path) -> None:
    old = to_plain(load(tmp_path))
    new = to_plain(load(tmp_path, "seed=1", "rewards.0.weight=2", "rollout.stop=[x]"))
    assert differences(old, old) == []
    assert differences(old, new) == [
        ("rollout.stop", [], ["x"]),
        ("rewards.0.weight", 1.0, 2.0),
        ("seed", 0, 1),
    ]
    assert differences({"a": 1}, {"b": 1}) == [("a", 1, None), ("b", None, 1)]
    assert differences({"a": True}, {"a": 1}) == [("a", True, 1)]


def test_a_key_that_an_earlier_config_lacks_had_its_default(tmp_path: Path) -> None:
    old = to_plain(load(tmp_path))
    for part in (old["rewards"][0], old["data"]["train"], old["rollout"]["engine"]):
        for key in ("max_failed_calls", "chat", "max_slots"):
            part.pop(key, None)
    del old["rollout"]["dynamic_sampling"], old["trackers"], old["save_samples"]
    assert changes_since(old, load(tmp_path)) == []
    changed = load(
        tmp_path, "rewards.0.max_failed_calls=7", "rollout.dynamic_sampling.enabled=true"
    )
    default = load(tmp_path).rewards[0].max_failed_calls
    assert changes_since(old, changed) == [
        ("rollout.dynamic_sampling.enabled", False, True),
        ("rewards.0.max_failed_calls", default, 7),
    ]
    del old["train"]["learning_rate"], old["name"]  # one with a default, one without
    assert ("name", None, "small") in changes_since(old, load(tmp_path))


def test_tail_batching_and_streaming_load_and_survive_saving(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "tail_batching.selection=published",
        "tail_batching.tiers=[{prompt_factor: 1.25, sample_factor: 1.125}, {}]",
        "tail_batching.balance_sources=true",
        "tail_batching.debias=moments",
    )
    tail = config.tail_batching
    assert tail.tiers == (
        Tier(prompt_factor=1.25, sample_factor=1.125),
        Tier(sample_factor=1.25),
    )
    assert tail.debias == "moments" and tail.balance_sources
    assert config.stream_trainer == StreamConfig()
    auto = load(
        tmp_path,
        "tail_batching.selection=published",
        "tail_batching.prompt_factor=auto",
        "tail_batching.sample_factor=auto",
        "tail_batching.max_length_shift=0.2",
        "stream_trainer={enabled: true, reward_wait: true, max_share: 0.75}",
    )
    assert auto.tail_batching.prompt_factor == "auto" and auto.tail_batching.chooses
    assert auto.stream_trainer.max_share == 0.75
    ours = load(tmp_path, "tail_batching.prompt_factor=1.75", "tail_batching.tiers=[]")
    assert ours.tail_batching.sample_factor == 1 and ours.tail_batching.carry == "exact"
    for one in (config, auto, ours):
        save_config(one, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml", [], RunConfig) == one


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [
                "tail_batching={selection: published, prompt_factor: auto, sample_factor: 1.25}",
            ],
            "must both be auto, or neither",
        ),
        (["tail_batching.prompt_factor=auto"], "goes with selection=published"),
        (["tail_batching={selection: published, carry: exact}"], "goes with selection=none"),
        (["tail_batching={stragglers: pool, tiers: [{}]}"], "stragglers=pool has no tiers"),
        (["tail_batching.tiers=[{prompt_factor: 0.5}]"], "tiers.0.prompt_factor"),
        (["tail_batching.tiers=[{prompt_fctor: 2}]"], 'Did you mean "prompt_factor"?'),
        (["tail_batching.debias=moment"], 'Did you mean "moments"?'),
        (["stream_trainer.kinds=[lung]"], "'lung', which is none of plain"),
        (["stream_trainer.enabled=true"], "needs a trainer in processes of its own"),
        (
            [
                "stream_trainer.enabled=true",
                "stream_trainer.reward_wait=true",
                "tail_batching.debias=moments",
            ],
            "does not go with stream_trainer.enabled: a sample's weight is known when its round",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_message(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    message = refusal(tmp_path, *overrides)
    assert problem in message and "problems" not in message
