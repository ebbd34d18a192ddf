"""A pass threshold that nothing reaches is said, where something was rewarded at all."""

import statistics

import pytest

from rollpacker.cli.eval import _lines
from rollpacker.rewards.reward import Failed, Scored
from rollpacker.run.ports.evaluation import EvalResult, pass_at_k, standard_error


def result(*verdicts: Scored | Failed) -> EvalResult:
    judged = [(None, "", verdict) for verdict in verdicts]
    return EvalResult(metrics={}, passed={}, judged=judged)  # type: ignore[arg-type]


def test_a_threshold_out_of_reach() -> None:
    told = result(Scored(value=0.0), Scored(value=0.5), Failed(reason="")).out_of_reach(1.0)
    assert told is not None and "eval.pass_threshold=1; the largest reward was 0.5" in told
    assert result(Scored(value=1.0), Scored(value=0.5)).out_of_reach(1.0) is None
    # Nobody was right: nothing is known of what the reward can give.
    assert result(Scored(value=0.0), Failed(reason="")).out_of_reach(1.0) is None
    assert result().out_of_reach(1.0) is None


def test_the_standard_error_is_over_prompts() -> None:
    passed = {0: (4, 4), 1: (0, 4), 2: (2, 4), 3: (1, 1)}
    [(name, error)] = standard_error(passed).items()
    assert name == "eval/stderr/pass@1"
    assert error == pytest.approx(statistics.stdev([1, 0, 0.5, 1]) / 2)
    assert standard_error({0: (1, 4)}) == {}, "of one prompt there is none"
    metrics = {**pass_at_k(passed, 4), **standard_error(passed)}
    lines = list(_lines({**metrics, "eval/reward": 0.5}))
    assert [line.split()[0] for line in lines] == ["pass@1", "pass@2", "pass@4", "reward"]
    assert lines[0].endswith(f"0.6250 ± {error:.4f} (standard error)")
    assert all("standard error" not in line for line in lines[1:])


def test_k_is_doubled_up_to_what_was_drawn() -> None:
    assert list(pass_at_k({0: (1, 6)}, 6)) == [f"eval/pass@{k}" for k in (1, 2, 4, 6)]


def test_an_evaluation_of_which_little_was_judged_says_so() -> None:
    few = result(Scored(value=0.0), *[Failed(reason="no \x1b worker")] * 7).few_judged()
    assert few is not None and "over 1 of 8 samples" in few
    assert "most often: no \ufffd worker" in few
    assert result(Scored(value=0.0), Failed(reason="x")).few_judged() is None
    assert result().few_judged() is None
