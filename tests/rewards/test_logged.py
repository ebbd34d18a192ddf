"""`log_metric` and `log_extra` of reward functions, as TRL's have them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch

import rollpacker
from benchmarks.resume import write_model
from rollpacker.imports import giving
from rollpacker.rewards.functions.function_reward import RewardFunction
from rollpacker.rewards.functions.logged import read
from rollpacker.rewards.reward import UNKNOWN, Failed, Progress, RewardConfig, RewardInput, Scored


def judged(
    function: Any,
    texts: list[str],
    progress: Progress = UNKNOWN,
    columns: dict[str, Any] | None = None,
) -> list[Any]:
    with giving({"f": function}):
        reward = RewardFunction(RewardConfig(function="<python>:f", workers=1))
    reward.check([columns or {}])
    samples = [
        RewardInput(
            prompt="p",
            completion=text,
            completion_tokens=(1,),
            finish_reason="stop",
            columns=columns or {},
            progress=progress,
        )
        for text in texts
    ]

    async def score() -> list[Any]:
        try:
            return await reward.score(samples)
        finally:
            await reward.close()

    return asyncio.run(score())


def test_metrics_are_the_calls_mean_and_extras_are_each_samples() -> None:
    def f(completions, log_metric, log_extra=None):
        for text in completions:
            log_metric("seen", len(text))
        log_metric("nothing", float("nan"))
        log_extra("upper", [text.upper() for text in completions])
        log_extra("odd", [{1, 2}, None])
        return [1.0, 2.0]

    first, second = judged(f, ["ab", "abcd"])
    assert isinstance(first, Scored) and isinstance(second, Scored)
    assert first.metrics == second.metrics == {"seen": 3.0}
    assert first.extras == {"upper": "AB", "odd": "{1, 2}"}
    assert second.extras == {"upper": "ABCD", "odd": None}


def test_an_async_function_logs_too() -> None:
    async def f(completions, log_metric, **columns):
        log_metric("n", len(completions))
        return [0.5] * len(completions)

    assert judged(f, ["a", "b", "c"])[2].metrics == {"n": 3.0}


def test_all_of_it_is_in_kwargs_as_in_trl() -> None:
    def f(completions, **kwargs):
        kwargs.get("log_metric")("n", len(completions))
        kwargs["log_extra"]("step", [kwargs["trainer_state"].global_step] * len(completions))
        return [0.5] * len(completions)

    first, _ = judged(f, ["a", "b"], Progress(7, 20))
    assert first.metrics == {"n": 2.0} and first.extras == {"step": 7}


def test_kwargs_may_be_passed_on() -> None:
    def g(completions, trainer_state, **kwargs):
        return [float(trainer_state.max_steps)] * len(completions)

    def f(completions, **kwargs):
        return g(completions, **kwargs)

    assert judged(f, ["a"], Progress(1, 9))[0].value == 9.0


def test_functions_of_other_shapes_get_what_they_name_alone() -> None:
    def f(data_source, solution_str, ground_truth, trainer_state, **kwargs):
        assert set(kwargs) <= {"extra_info"}, kwargs
        return float(trainer_state.global_step)

    assert judged(f, ["a"], Progress(3, 9), {"ground_truth": "1"})[0].value == 3.0


def test_what_trainer_state_lacks_is_said() -> None:
    def f(completions, trainer_state):
        return [trainer_state.epoch]

    assert "global_step and max_steps here, and no epoch" in judged(f, ["a"])[0].reason


def test_a_wish_for_trainer_state_needs_no_column() -> None:
    def f(completions, trainer_state, log_metric):
        return [1.0] * len(completions)

    assert judged(f, ["a"])[0].value == 1.0


def test_one_value_for_each_completion_or_no_verdict() -> None:
    def f(completions, log_extra):
        log_extra("x", [1])
        return [0.0] * len(completions)

    verdicts = judged(f, ["a", "b"])
    assert all(isinstance(one, Failed) for one in verdicts)
    assert "log_extra('x') 1 values for 2 completions" in verdicts[0].reason


@pytest.mark.parametrize(
    "reply", [{"metrics": 3}, {"extras": []}, {"metrics": {"x": "much"}}, {"extras": {"x": [1]}}]
)
def test_a_forged_reply_has_logged_nothing(reply: dict[str, Any]) -> None:
    assert read(reply, 2) == [({}, {})] * 2


def test_they_reach_metrics_and_samples_of_a_run(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    write_model(tmp_path / "model")

    def f(completions, log_metric, log_extra, **kwargs):
        state = kwargs["trainer_state"]
        log_metric("mine/step", state.global_step)
        log_metric("mine/steps", state.max_steps)
        log_metric("mine/length", sum(map(len, completions)) / len(completions))
        log_metric("critic/rewards/mean", 100.0)
        log_extra("first", [text[:1] for text in completions])
        return [len(text) / 16 for text in completions]

    run = rollpacker.train(
        {
            "name": "logged",
            "runs_dir": tmp_path,
            "model": {"path": tmp_path / "model", "device": "cpu"},
            "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_response_tokens": 16},
            "train": {"steps": 2, "threads": 1},
            "data.eval_fraction": 0.3,
            "tail_batching.enabled": False,
        },
        rewards=[{"function": f, "shape": "trl"}],
        data=[{"prompt": f"{n}+1="} for n in range(20)],
    )
    torch.set_num_threads(threads)
    for row in run.metrics:
        assert row["critic/rewards/mean"] < 2  # the run's own name stays the run's own
        assert row["mine/length"] == pytest.approx(16 * row["critic/rewards/mean"], rel=0.6)
    assert run.metrics["mine/step"] == [0, 1] and run.metrics["mine/steps"] == [2, 2]
    samples = run.samples()
    assert [row["extra/first"] for row in samples] == [row["completion"][:1] for row in samples]
    for path in (run.folder / "evaluations").glob("*.parquet"):
        assert "extra/first" in pyarrow.parquet.read_schema(path).names
    log = (run.folder / "events.jsonl").read_text().splitlines()
    trained = [one for one in map(json.loads, log) if one.get("event") == "Trained"]
    assert [one["metrics"]["mine/length"] for one in trained] == run.metrics["mine/length"]
