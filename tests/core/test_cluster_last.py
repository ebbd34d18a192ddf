"""The core counts a job's steps as the job does, and nobody waits for who has done the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.events import Asked, Committed, Ended, Left, Submitted
from rollpacker.cluster.decide.job import ClusterJob, Phase, RoundTimes, Times
from rollpacker.codec import to_plain
from tests.core.test_cluster import POOLS, Watched
from tests.core.test_cluster_away import granted

TIMES = Times(100.0, 0.0, 30.0, 0.0)


def done(steps: int = 10, steps_before: int = 0) -> Watched:
    """Two jobs on one pair of nodes, of which the first has trained and is about to commit."""
    pools = (replace(POOLS[0], nodes=1), replace(POOLS[1], nodes=1))
    watched = Watched(CheapestWork(orders=("round_robin",)), pools)
    rounds = (RoundTimes(rollout_s=(100.0,), train_s=(30.0,)),)
    for name in "ab":
        watched.jobs[name] = ClusterJob(
            name=name, rounds=rounds, steps=steps, steps_before=steps_before, slo=30.0
        )
        watched.tell(Submitted(0.0, watched.jobs[name]))
    phases: tuple[Phase, ...] = ("rollout", "train")
    for number, phase in enumerate(phases):
        watched.tell(Asked(number, "a", phase))
        watched.tell(Left(number + 0.5, "a", phase, watched.tokens["a"].token))
    assert granted(watched.tell(Asked(5.0, "b", "rollout"))) == [], "a comes first in the next turn"
    return watched


def commit(watched: Watched, step: int, last: bool | None = None) -> list[tuple[str, Phase]]:
    event = Committed(
        6.0, "a", 130.0, TIMES, step=step, last=last, numbers_otherwise=last is None and step > 1000
    )
    return granted(watched.tell(event))


@pytest.mark.parametrize(
    ("step", "last", "nobody_waits"),
    [
        (10, None, True),
        (9, None, False),
        (9, True, True),  # it says so: its data has ended
        (10, False, False),  # a round more than there were steps
        (0, None, False),  # it has made one commit, as far as anybody knows
        (1001, None, False),  # the same: it numbers them as it likes
        (1001, False, False),
    ],
)
def test_from_its_last_commit_to_its_end_nobody_waits_for_a_job(
    step: int, last: bool | None, nobody_waits: bool
) -> None:
    watched = done()
    assert commit(watched, step, last) == ([("b", "rollout")] if nobody_waits else [])
    if nobody_waits:  # its end changes nothing more, and b is alone
        assert granted(watched.tell(Ended(20.0, "a"))) == []
        watched.tell(Left(21.0, "b", "rollout", watched.tokens["b"].token))
        assert granted(watched.tell(Asked(22.0, "b", "train"))) == [("b", "train")]


def test_who_numbers_its_commits_otherwise_is_done_after_so_many() -> None:
    watched = done(steps=3)
    for step in (1001, 1002):
        assert commit(watched, step) == []
    assert commit(watched, 1003) == [("b", "rollout")]


def test_an_earlier_version_that_did_not_say_so_is_replayed_as_it_was() -> None:
    watched = done(steps=3)
    event = Committed(6.0, "a", 130.0, TIMES, step=1001)
    assert "numbers_otherwise" not in to_plain(event)
    assert granted(watched.tell(event)) == [("b", "rollout")]


def test_who_asks_after_all_has_its_turns_again() -> None:
    watched = done()
    commit(watched, 10)
    for phase in ("rollout", "train"):
        watched.tell(Left(7.0, "b", phase, watched.tokens["b"].token))
        if phase == "rollout":
            assert granted(watched.tell(Asked(8.0, "b", "train"))) == [("b", "train")]
            assert granted(watched.tell(Asked(9.0, "a", "rollout"))) == [], "b's is the next turn"
    watched.tell(Asked(10.0, "b", "rollout"))
    token = watched.tokens["b"].token
    assert granted(watched.tell(Left(11.0, "b", "rollout", token))) == [("a", "rollout")]


def test_what_was_written_before_steps_were_told_leads_to_the_same() -> None:
    watched = done(steps=1)
    assert commit(watched, 0) == []
    assert to_plain(Committed(6.0, "a", 1.0)).keys() == {"at_s", "job", "work_s", "times", "kind"}
    assert "steps_before" not in to_plain(watched.jobs["a"])


def test_a_run_that_goes_on_counts_from_its_checkpoint() -> None:
    watched = done(steps=5, steps_before=15)
    assert commit(watched, 16) == []
    rest = watched.cluster._running["a"].rest
    assert rest is not None and rest.iterations == 4
    assert commit(watched, 20) == [("b", "rollout")]
