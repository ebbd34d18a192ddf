"""Who is let go of where there is no room for all that their environments have."""

from __future__ import annotations

from rollpacker.core.events import SampleGenerated
from rollpacker.core.fleet.kept_rows import KeptRows
from rollpacker.core.ids import PromptId, SampleId


def sample(row: int, source: str = "train") -> SampleId:
    return SampleId(PromptId(source, 0, row), 0, 0)


def leaves(
    kept: KeptRows, who: SampleId, time_s: float, room: int | None = 0, **more: int
) -> list[SampleId]:
    return kept.leave(
        SampleGenerated(
            time_s=time_s,
            sample=who,
            num_tokens=10,
            finish_reason="stop",
            version=0,
            **{"num_held": 100, "room": room, **more},
        )
    )


def after(answers_s: float, source: str = "train") -> KeptRows:
    """Its environments take so long."""
    kept = KeptRows()
    leaves(kept, sample(99, source), 0.0)
    kept.back(sample(99, source), answers_s)
    return kept


def test_while_there_is_room_nobody_goes() -> None:
    kept = KeptRows()
    assert [leaves(kept, sample(n), n, room) for n, room in enumerate((50, 0, None))] == [[]] * 3


def test_as_many_go_as_there_is_no_room_for() -> None:
    kept = KeptRows()
    for n in range(3):
        leaves(kept, sample(n), float(n))
    assert leaves(kept, sample(3), 3.0, room=-101) == [sample(0), sample(1)]
    assert leaves(kept, sample(4), 4.0, room=-1) == [sample(2)], "the others have gone"


def test_of_those_that_are_in_time_the_last_one_comes_back_last() -> None:
    kept = after(answers_s=10.0)
    leaves(kept, sample(0), 20.0)
    leaves(kept, sample(1), 22.0)
    assert leaves(kept, sample(2), 24.0, room=-1) == [sample(2)]


def test_who_is_overdue_the_longest_goes_first() -> None:
    kept = after(answers_s=10.0)
    leaves(kept, sample(0), 20.0)
    leaves(kept, sample(1), 31.0)
    assert leaves(kept, sample(2), 40.0, room=-1) == [sample(0)], "20 s, and 1 s, and 10 s"


def test_each_source_has_answers_of_its_own() -> None:
    kept = after(answers_s=100.0, source="slow")
    leaves(kept, sample(99), 0.0)
    kept.back(sample(99), 1.0)
    leaves(kept, sample(0), 200.0)
    leaves(kept, sample(0, "slow"), 200.0)
    leaves(kept, sample(1), 200.1)
    assert leaves(kept, sample(2), 200.2, room=-1) == [sample(0, "slow")]


def test_of_equals_the_shortest_goes_first() -> None:
    kept = KeptRows()
    leaves(kept, sample(0), 0.0, num_held=100)
    leaves(kept, sample(1), 0.0, num_held=40)
    assert leaves(kept, sample(2), 0.0, room=-1) == [sample(1)]


def test_who_is_back_or_in_another_engine_is_not_let_go_of() -> None:
    kept = KeptRows()
    leaves(kept, sample(0), 0.0)
    kept.back(sample(0), 1.0)
    leaves(kept, sample(1), 1.0, engine=1)
    leaves(kept, sample(2), 1.0, incarnation=1)
    assert leaves(kept, sample(3), 2.0, room=-1000) == [sample(3)]
    kept.begin_round()
    assert leaves(kept, sample(4), 3.0, room=-1000, engine=1) == [sample(4)]


def test_an_answer_that_did_not_come_says_nothing_of_the_next() -> None:
    kept = after(answers_s=10.0)
    leaves(kept, sample(0), 20.0)
    kept.back(sample(0))
    leaves(kept, sample(1), 1000.0)
    assert leaves(kept, sample(2), 1005.0, room=-1) == [sample(2)]
