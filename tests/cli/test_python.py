"""`rollpacker.train` as a program calls it: dicts, functions, rows, and the run it returns."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollpacker
from benchmarks.resume import write_config, write_model
from rollpacker.cli.main import main as command
from rollpacker.config.document import ConfigError
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from rollpacker.rewards.reward import RewardError
from rollpacker.run.folder.samples import SampleWriter
from rollpacker.run.ports.audience import Telling, ToldRun

ROWS = [{"prompt": f"{n}+{n % 7}=", "answer": n + n % 7} for n in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    folder = tmp_path_factory.mktemp("python")
    write_model(folder / "model")
    write_config(folder, steps=2)
    yield folder
    torch.set_num_threads(threads)


def config(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "runs_dir": folder / "runs",
        "model": {"path": folder / "model", "device": "cpu"},
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 16},
        "train": {"steps": 2, "learning_rate": 1e-3, "threads": 1},
        "tail_batching.enabled": False,
        **more,
    }


def length(completions, **columns):
    return [len(text) / 16 for text in completions]


def test_it_takes_a_dict_functions_and_rows(folder: Path) -> None:
    vowels = "aeiou"

    def share(completions: list[str], answer: list[int], **columns: Any) -> list[float]:
        assert all(isinstance(gold, int) for gold in answer)
        return [sum(c in vowels for c in text) / 16 for text in completions]

    run = rollpacker.train(
        config(folder, "objects"),
        {"train.steps": 3},
        rewards=[
            share,
            (length, 0.5),
            lambda completions, **_: [0.25] * len(completions),
            {"function": functools.partial(length), "name": "part", "weight": 0.0},
        ],
        data=ROWS,
        eval_data=({"prompt": f"{n}*1=", "answer": n} for n in range(4)),
    )
    assert run.reason == "every step is done" and len(run.metrics) == 3
    row = run.metrics[0]
    assert row["rewards/reward/mean"] == 0.25
    assert row["rewards/length/mean"] == row["rewards/part/mean"]
    expected = row["rewards/share/mean"] + 0.5 * row["rewards/length/mean"] + 0.25
    assert row["critic/rewards/mean"] == pytest.approx(expected)
    assert len(run.evaluations) == 2
    saved = load_config(run.folder / "config.yaml", (), RunConfig)
    assert [reward.function for reward in saved.rewards][:2] == [
        "<python>:share",
        "<python>:length",
    ]
    assert saved.data.train.kind == "python"


def test_a_resume_takes_the_same_objects_again(folder: Path) -> None:
    given: dict[str, Any] = {"rewards": [length], "data": ROWS}
    whole = rollpacker.train(config(folder, "whole"), ["train.steps=4"], **given)

    class Stops(rollpacker.Callback):
        def on_step(self, run, step, metrics) -> None:
            if step == 2:
                run.stop()

    first = rollpacker.train(
        config(folder, "again"), ["train.steps=4"], **given, callbacks=[Stops()]
    )
    assert first.reason == "a callback asked for it" and len(first.metrics) == 2
    second = rollpacker.train(first.folder / "config.yaml", **given, resume=True)
    assert second.metrics["critic/rewards/mean"] == whole.metrics["critic/rewards/mean"]
    assert second.metrics["actor/loss"] == whole.metrics["actor/loss"]
    with pytest.raises(ValueError, match="training data changed"):
        rollpacker.train(
            *(first.folder / "config.yaml", ["train.steps=5"]),
            **(given | {"data": ROWS[:10]}),
            resume=True,
        )


def test_a_function_that_changed_is_noticed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def reward(completions, **columns):
        return [0.5 for _ in completions]

    first = rollpacker.train(config(folder, "changes"), rewards=[reward], data=ROWS)
    place = first.folder / "config.yaml"
    rollpacker.train(place, ["train.steps=3"], rewards=[reward], data=ROWS, resume=True)
    assert "changed since" not in caplog.text

    def reward(completions, **columns):
        return [0.25 for _ in completions]

    rollpacker.train(place, ["train.steps=4"], rewards=[reward], data=ROWS, resume=True)
    assert "the code of the reward reward changed since the run began" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [("train", "{}/config.yaml", "--resume", "train.steps=3"), ("eval", "{}")],
    ids=["train", "eval"],
)
def test_the_command_says_who_has_the_objects(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    run = folder / "runs" / "saved"
    if not run.exists():
        rollpacker.train(config(folder, "saved"), rewards=[length], data=ROWS)
    assert command([argument.format(run) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert '"<python>:length" is an object that a Python program gave' in said
    assert "resume=True" in said
    assert command(["report", str(run)]) == 0
    assert command(["train", str(run / "config.yaml"), "--dry-run"]) == 0


def test_a_dataset_and_a_data_frame_are_rows(folder: Path) -> None:
    import datasets
    import pandas

    for name, rows in [
        ("dataset", datasets.Dataset.from_list(ROWS)),
        ("frame", pandas.DataFrame(ROWS)),
    ]:
        run = rollpacker.train(
            config(folder, name, **{"data.train.answer_column": "answer"}),
            rewards=[length],
            data=rows,
            overrides=["train.steps=1"],
        )
        assert len(run.metrics) == 1


def test_a_run_config_and_a_dict_are_the_same_run(folder: Path) -> None:
    plain = config(folder, "same", rewards=[{"function": f"{folder / 'reward.py'}:vowels"}])
    plain["data"] = {"train": {"kind": "jsonl", "path": str(folder / "rows.jsonl")}}
    run = rollpacker.train(plain)
    resolved = load_config(run.folder / "config.yaml", (), RunConfig)
    again = rollpacker.train(resolved, {"name": "same-2"})
    assert again.metrics["actor/loss"] == run.metrics["actor/loss"]


def refused(folder: Path, match: str, *, error: type[Exception] = ValueError, **given: Any) -> None:
    arguments = {"rewards": [length], "data": ROWS} | given
    settings = arguments.pop("config", {})
    with pytest.raises(error, match=match):
        rollpacker.train(config(folder, "refused", **settings), **arguments)
    assert not (folder / "runs" / "refused").exists()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"optimiser": {}}, r"^config: optimiser is no known key"),
        ({"train": {"step": 3}}, r'train\.step is no known key\. Did you mean "steps"\?'),
        ({"train.step": 3}, r"train\.step \(override train\.step=3\) is no known key"),
        ({"train": {"steps": "many"}}, r'train\.steps is "many"\. Allowed: a whole number'),
        ({"seed": object()}, r"seed is <object object .*Allowed: a whole number"),
        ({"train.steps": object()}, "train.steps is object; a config has texts"),
    ],
)
def test_a_dict_is_checked_as_a_file_is(folder: Path, settings: Any, match: str) -> None:
    refused(folder, match, error=ValueError, config=settings)


def test_what_is_no_config_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"a path, a dict or a RunConfig, not builtins\.int"):
        rollpacker.train(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no such config file"):
        rollpacker.train("nowhere.yaml")
    with pytest.raises(ValueError, match="overrides is a list of texts"):
        rollpacker.train(config(folder, "x"), "train.steps=2", rewards=[length], data=ROWS)  # type: ignore[arg-type]


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("rewards", "match"),
    [
        ([], "rewards must name at least one reward"),
        ([3], r"rewards\.0 is int, not a function: give a function"),
        ([length, None], r"rewards\.1 is NoneType, not a function"),
        (3, "rewards is a list of functions, not int"),
        ([(length, "much")], r"rewards\.0\.weight is \"much\""),
        ([{"weight": 2}], r"rewards\.0 has no function; its keys: weight"),
        ([{"function": length, "wait": 2}], r"rewards\.0\.wait is no known key"),
        ([length, length], 'two rewards are called "length"'),
        (["nothing"], 'no built-in reward "nothing"'),
        ([lambda: 3], "takes no parameter"),
        ([lambda completions: [LOCK.locked()]], "reward reward cannot be sent .*lock"),
        ([lambda completions, lock=LOCK: [1.0]], "reward reward cannot be sent .*lock"),
    ],
)
def test_rewards_that_cannot_be_used_are_named(folder: Path, rewards: Any, match: str) -> None:
    refused(folder, match, error=(ValueError, RewardError), rewards=rewards)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], r"data\.train: the dataset is empty"),
        ([{"question": "1+1="}], r"there is no column prompt.*It has: question"),
        ([{"prompt": "1+1="}, {"prompt": 3}], r"data\.train, row 1"),
        (["1+1="], r"data\.train, row 0: a row is a dict.*not a str"),
        ("rows.jsonl", r"a list of dicts, a Dataset or a DataFrame\. A file is named"),
        ({"train": ROWS}, "not a dict of train: choose one of them"),
        (3, "a DataFrame, not int"),
    ],
)
def test_rows_that_cannot_be_used_are_named(folder: Path, data: Any, match: str) -> None:
    refused(folder, match, data=data)


def test_callbacks_that_are_none_are_named(folder: Path) -> None:
    class Mine(rollpacker.Callback):
        pass

    refused(folder, r"callbacks\.0 is no rollpacker\.Callback: .*add \(\)", callbacks=[Mine])
    refused(folder, r"callbacks\.1 is no rollpacker\.Callback: 3", callbacks=[Mine(), 3])


def test_the_run_is_a_look_at_its_folder(folder: Path) -> None:
    rows = [{"prompt": f"<b>{n}</b>="} for n in range(20)]
    run = rollpacker.train(
        config(folder, "look", **{"data.eval_fraction": 0.3}), rewards=[length], data=rows
    )
    assert len(repr(run)) < 200 and "\n" not in repr(run)
    assert "2 steps, every step is done, pass@1 0.000 (step 0) -> 0.000 (step 2)" in repr(run)
    again = rollpacker.Run(run.folder)
    assert (again.reason, again.name) == (run.reason, "look")
    assert again.summary["steps"] == run.summary["steps"]
    assert again.config["train"]["steps"] == 2
    assert again.model == run.model and (again.model / "config.json").exists()
    metrics = run.metrics
    assert metrics["step"] == [1, 2] and len(metrics[1:]) == 1
    assert list(metrics.to_pandas()["critic/rewards/mean"]) == metrics["critic/rewards/mean"]
    assert "critic/rewards/mean" in metrics._ipython_key_completions_()
    with pytest.raises(KeyError, match='Did you mean "critic/rewards/mean"'):
        metrics["critic/reward/mean"]
    for theirs, hint in [
        ("reward", "reward. Here it is critic/rewards/mean"),
        ("actor/pg_loss", "Here it is actor/loss"),
        ("kl", "Here it is actor/kl, which no row has"),
    ]:
        with pytest.raises(KeyError, match=hint):
            metrics[:1][theirs]
    texts = run.evaluation_samples(step=2)
    assert len(texts) == 5 and len(run.evaluation_samples()) == 10
    assert {"completion", "reward", "passed"} <= {*texts[0]}
    samples = run.samples(step=2)
    assert {row["step"] for row in samples} == {2} and len(run.samples()) > len(samples)
    with pytest.raises(ValueError, match=r"samples has no step 999: it has 1, 2$"):
        run.samples(step=999)
    with pytest.raises(ValueError, match=r"evaluations has no step 1: it has 0, 2$"):
        run.evaluation_samples(step=1)
    shown = samples._repr_html_()
    assert "&lt;b&gt;" in shown and "<b>" not in shown
    with pytest.raises(ValueError, match="there is no run in"):
        rollpacker.Run(folder)


def test_samples_are_those_that_were_trained_on(tmp_path: Path) -> None:
    """Slow checks are kept besides; a callback and the finished run leave out the same."""
    rows = [
        {"step": step, "completion": text, "trained": text != "slow"}
        for step in range(1, 8)
        for text in ("a", "slow", "b")
    ]
    writer = SampleWriter(tmp_path)
    writer.add(rows)
    writer.write()
    (tmp_path / "config.yaml").write_text("name: x\n")
    run = rollpacker.Run(tmp_path)
    assert run.samples(step=2)["completion"] == ["a", "b"] and len(run.samples()) == 14
    assert run.samples(step=2, untrained=True)["completion"] == ["a", "slow", "b"]
    with pytest.raises(ValueError, match=r"samples has no step 0: it has 1 to 7$"):
        run.samples(step=0)
    assert len(run.evaluation_samples(step=0)) == 0, "nothing was kept of evaluations"
    told = ToldRun(name="", folder=tmp_path, config={}, total_steps=None, resumed_step=None)
    told.telling = Telling({}, rows[:3])
    assert [row["completion"] for row in told.samples()] == ["a", "b"]
    assert told.samples(untrained=True) == rows[:3]
    told.telling = Telling({}, [{"step": 0, "completion": "c"}])
    assert len(told.samples()) == 1, "an evaluation trains on nothing, and all of it is told"


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    (tmp_path / "<script>").mkdir()
    (tmp_path / "<script>" / "config.yaml").write_text("name: x\n")
    (tmp_path / "<script>" / "events.jsonl").write_text("")
    run = rollpacker.Run(tmp_path / "<script>")
    assert "<script>" not in run._repr_html_()


def test_names_are_completed_and_there_is_a_version() -> None:
    names = dir(rollpacker)
    for name in ("train", "Run", "Callback", "RunningRun", "__version__"):
        assert name in names and getattr(rollpacker, name) is not None
    assert rollpacker.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rollpacker.nothing  # noqa: B018
    assert json.dumps(sorted(rollpacker.__all__))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("reward_funcs", "here it is rewards"),
        ("train_dataset", "here it is data"),
        ("eval_dataset", "here it is eval_data"),
        ("learning_rate", "Here it is train.learning_rate, a key of config or overrides"),
        ("nonsense", "help"),
    ],
)
def test_arguments_of_others_are_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"^train\(\) has no {name}.*{ours}"):
        rollpacker.train({}, **{name: 1})  # type: ignore[arg-type]


def test_a_config_of_trl_is_pointed_to_the_page(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    with pytest.raises(ValueError, match=r"GRPOConfig. docs/migration.md has TRL's keys"):
        rollpacker.train(trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True))


def test_a_run_that_is_there_names_arguments_not_flags(folder: Path) -> None:
    there = folder / "runs" / "there"
    there.mkdir(parents=True)
    (there / "events.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="continue it with resume=True, replace it") as error:
        rollpacker.train(config(folder, "there"), rewards=length, data=ROWS)
    assert "overwrite=True" in str(error.value) and "--" not in str(error.value)
    with pytest.raises(ValueError, match="start it without resume=True"):
        rollpacker.train(config(folder, "nowhere"), rewards=length, data=ROWS, resume=True)
