"""What the ranks were told since their last checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollpacker.trainer.journal import Journal, RecordedCall
from rollpacker.trainer.trainer import TrainerProcessError


def told(journal: Journal, version: int) -> list[str]:
    return [b"|".join(call.calls).decode() for call in journal.since(version)]


def step(journal: Journal, name: str) -> None:
    journal.add("accumulate", [name.encode(), b"\n{}\x00"], [0, 1])
    journal.add("apply", [b"apply"], [])
    journal.finish_step()


def test_calls_come_back_byte_for_byte(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    step(journal, "one")
    assert [*journal.since(0)] == [
        RecordedCall("accumulate", [b"one", b"\n{}\x00"], [0, 1]),
        RecordedCall("apply", [b"apply"], []),
    ]
    assert not os.listdir(tmp_path), "a name that outlives the run"
    journal.close()
    journal.close()


def test_a_step_that_came_to_nothing_is_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    step(journal, "one")
    journal.add("accumulate", [b"lost"], [])
    first = told(journal, 0)
    assert len(first) == 2 and "lost" not in "".join(first)
    assert told(journal, 0) == first, "once more, where one was lost on the way back"
    journal.add("accumulate", [b"refused"], [])
    journal.forget_step()
    step(journal, "two")
    assert [one for one in told(journal, 0) if one != "apply"] == ["one|\n{}\0", "two|\n{}\0"]


def test_a_checkpoint_lets_go_of_what_nobody_needs(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for version, name in enumerate(("one", "two", "three"), start=1):
        step(journal, name)
        journal.saved(version)
    step(journal, "four")
    assert [one[:4] for one in told(journal, 3) if one != "apply"] == ["four"]
    assert [one[:3] for one in told(journal, 2) if one != "apply"] == ["thr", "fou"]
    with pytest.raises(TrainerProcessError, match=r"version 1 of the weights.*--resume"):
        told(journal, 1)
    journal.loaded(7)
    step(journal, "eight")
    assert len(told(journal, 7)) == 2
    with pytest.raises(TrainerProcessError):
        told(journal, 3)
