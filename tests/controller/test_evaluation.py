"""A pass threshold that nothing reaches is said, where something was rewarded at all."""

from rollpacker.controller.evaluation import EvalResult
from rollpacker.rewards.reward import Failed, Scored


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


def test_an_evaluation_of_which_little_was_judged_says_so() -> None:
    few = result(Scored(value=0.0), *[Failed(reason="no \x1b worker")] * 7).few_judged()
    assert few is not None and "over 1 of 8 samples" in few
    assert "most often: no \ufffd worker" in few
    assert result(Scored(value=0.0), Failed(reason="x")).few_judged() is None
    assert result().few_judged() is None
