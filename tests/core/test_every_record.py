"""Each kind of record that goes into a log or a checkpoint comes back as it was, through JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollpacker.codec import from_plain, part_of, to_plain
from rollpacker.core.fleet.parallelism import KnownDegrees
from rollpacker.core.fleet.routing import Known
from rollpacker.core.fleet.stream_plan import SavedPlan
from rollpacker.core.job.config import JobConfig
from rollpacker.core.job.job import Job
from rollpacker.core.job.progress import Ledger, Progress
from rollpacker.core.lengths.factor_plan import SavedPlanner
from rollpacker.core.lengths.window import LengthWindow, SavedWindow
from rollpacker.core.messages import COMMANDS, EVENTS
from rollpacker.core.records import LogError, Note, Record, Session, decode, encode
from rollpacker.core.rounds.saved_queues import SavedQueues
from tests.core.drawn import values
from tests.core.world import World, published

MICROSECONDS = st.integers(0, 10**12).map(lambda count: round(count / 1e6, 6))
"""Times as the log keeps them."""
SAVED = (
    Progress,
    Ledger,
    Known,
    KnownDegrees,
    SavedPlan,
    SavedPlanner,
    SavedQueues,
    SavedWindow,
)


def through_json(plain: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(plain))


def last_state(config: JobConfig) -> dict[str, Any]:
    """What the last checkpoint of a run holds."""
    snapshots = World(config, num_rows=40).run().snapshots
    state: dict[str, Any] = through_json(snapshots[max(snapshots)][0])
    return state


@pytest.mark.parametrize("name", sorted(EVENTS))
@settings(deadline=None)
@given(st.data())
def test_an_event_comes_back_from_a_log(name: str, data: st.DataObject) -> None:
    event, time_s = data.draw(values(EVENTS[name])), data.draw(MICROSECONDS)
    event = from_plain(EVENTS[name], {**to_plain(event), "time_s": time_s})
    record = Record(time_s=time_s, event=event, commands=(), cost_s=0.25)
    assert decode(encode(record)) == record


@pytest.mark.parametrize("name", sorted(COMMANDS))
@settings(deadline=None)
@given(st.data())
def test_a_command_comes_back_from_a_log(name: str, data: st.DataObject) -> None:
    commands = tuple(data.draw(st.lists(values(COMMANDS[name]), min_size=1, max_size=2)))
    event = EVENTS["RunStarted"](time_s=1.5)
    record = Record(time_s=1.5, event=event, commands=commands, cost_s=0.0)
    assert decode(encode(record)) == record


@pytest.mark.parametrize("kind", [Session, Note])
@settings(deadline=None)
@given(st.data())
def test_what_happened_around_a_run_comes_back_from_a_log(kind: type, data: st.DataObject) -> None:
    entry = data.draw(values(kind))
    seconds = {"time_s": data.draw(MICROSECONDS)}
    if kind is Note:
        seconds["seconds"] = data.draw(MICROSECONDS)
    entry = from_plain(kind, {**to_plain(entry), **seconds})
    assert decode(encode(entry)) == entry


@pytest.mark.parametrize("kind", SAVED)
@settings(deadline=None)
@given(st.data())
def test_a_part_of_a_checkpoint_comes_back(kind: type, data: st.DataObject) -> None:
    saved = data.draw(values(kind))
    plain = through_json(to_plain(saved))
    again = from_plain(kind, plain)
    assert through_json(to_plain(again)) == plain
    if kind is not SavedWindow:  # its arrays have no equality of their own
        assert again == saved


def test_every_part_of_a_checkpoint_is_one_of_these() -> None:
    """The job's state is made of them, of plain numbers, and of a length window."""
    config = JobConfig(
        prompts_per_step=3,
        samples_per_prompt=2,
        max_steps=2,
        max_response_tokens=64,
        tail_batching=published(prompt_factor="auto", sample_factor="auto"),
    )
    state = last_state(config)
    part_of(Progress, state), part_of(SavedQueues, state)
    from_plain(Ledger, state.pop("ledger"))
    from_plain(SavedPlan, state.pop("stream"))
    from_plain(SavedPlanner, state.pop("planner"))
    assert LengthWindow(cap=64).restore(state.pop("lengths")).cap == 64
    from_plain(KnownDegrees, state.pop("parallelism"))
    names = {name for kind in (Progress, SavedQueues) for name in kind.__annotations__}
    assert set(state) - names == {"factors", "rewards", "num_late"}


@pytest.mark.parametrize("name", ["queue", "ledger", "stream", "parallelism", "step"])
def test_a_checkpoint_that_is_none_is_refused(name: str) -> None:
    config = JobConfig(prompts_per_step=3, samples_per_prompt=2, max_steps=2)
    state = last_state(config)
    with pytest.raises((ValueError, TypeError)):
        Job.restore(config, {**state, name: {"what": 1}})


@pytest.mark.parametrize("line", ["", "{}", "[1]", '{"t": 0, "event": "Nothing", "cost_s": 0}'])
def test_a_line_that_is_none_is_refused(line: str) -> None:
    with pytest.raises(LogError):
        decode(line)
