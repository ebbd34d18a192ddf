"""The table of a sample's states, and the diagram drawn from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.core.lifecycle import (
    FINAL,
    TRANSITIONS,
    LifecycleError,
    SampleState,
    check,
    mermaid,
)


def test_every_state_leads_to_an_end() -> None:
    assert set(TRANSITIONS) == set(SampleState)
    for state in SampleState:
        reached, frontier = {state}, {state}
        while frontier:
            frontier = {after for before in frontier for after in TRANSITIONS[before]} - reached
            reached |= frontier
        assert reached & FINAL


def test_what_the_table_does_not_have_raises() -> None:
    assert check(SampleState.LAUNCHED, SampleState.GENERATED) is SampleState.GENERATED
    with pytest.raises(LifecycleError, match="from aborted to trained"):
        check(SampleState.ABORTED, SampleState.TRAINED)


def test_the_docs_show_this_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "architecture.md"
    assert mermaid() in page.read_text(encoding="utf-8")
