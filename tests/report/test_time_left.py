"""The time left that the display tells."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rollpacker.report import display


def state(total: int, every: int | None) -> display.State:
    job = {"cadence": {"eval_every_steps": every, "checkpoint_every_steps": 10}}
    history = SimpleNamespace(last_step=0, session=SimpleNamespace(job=job))
    return display.State(SimpleNamespace(history=history), total)  # type: ignore[arg-type]


def commit(
    shown: display.State, step_s: float, evaluation_s: float = 0.0, waited_s: float = 0.0
) -> float:
    shown.accounting.history.last_step += 1
    step = SimpleNamespace(step_s=step_s, waited_s=waited_s, seconds={"evaluation": evaluation_s})
    shown.on_step(step)  # type: ignore[arg-type]
    left = shown.left_s()
    assert left is not None
    return left


@pytest.mark.parametrize("every", [10, None])
def test_an_evaluation_counts_as_often_as_it_comes(every: int | None) -> None:
    """Before the first step an evaluation of 25 steps' length: it was taken for a part of every
    step, and the time left was wrong by as much."""
    shown = state(100, every)
    evaluations = 10 if every else 1
    left = commit(shown, 2.0, 50.0)
    assert left == pytest.approx(99 * 2.0 + evaluations * 50.0, abs=1)


def test_the_first_step_does_not_count_for_long() -> None:
    shown = state(104, None)
    commit(shown, 60.0)
    for _ in range(2):
        commit(shown, 1.0)
    assert commit(shown, 1.0) == pytest.approx(100, abs=1)


def test_slow_early_steps_do_not_count_for_long() -> None:
    """Half way through, after ten slow steps, it told twice of what was left."""
    shown = state(60, None)
    for step_s in [5.0] * 10 + [1.0] * 20:
        left = commit(shown, step_s)
    assert left == pytest.approx(30, abs=1)


def test_nothing_is_left_after_the_last_step() -> None:
    shown = state(1, 1)
    assert commit(shown, 1.0, 9.0) == 0


def test_waits_for_pools_come_again() -> None:
    shown = state(11, None)
    assert commit(shown, 2.0, waited_s=3.0) == pytest.approx(50, abs=1)
