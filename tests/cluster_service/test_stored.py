"""What earlier versions have written into a cluster's folder is read as it was meant."""

from __future__ import annotations

import json
import pickle

import pytest

from rollpacker.cluster.decide.events import (
    Close,
    Committed,
    Drained,
    GiveUp,
    Grant,
    Open,
    Start,
    Stop,
    Submitted,
)
from rollpacker.cluster.decide.job import ClusterJob, RoundTimes, Times
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mailbox import Letter
from rollpacker.cluster.service.store import StoredEvent, checksum, entry_of, happened

CHEAP, FAST = (Node("cheap", 0), Node("cheap", 12)), (Node("fast", 3),)
ROUNDS = (RoundTimes(rollout_s=(2.0, 1.0), train_s=(1.0,)),)
WRITTEN = {
    '{"kind": "Submitted", "event": {"at_s": 0.5, "job": {"name": "a", "rounds": [{'
    '"kind": "plain", "share": 1.0, "rollout_s": [1.0, 2.0], "train_s": [1.0], "between_s": 0.0, '
    '"after_s": 0.0}], '
    '"steps": 3, "slo": 1.5, "priority": 0, "owner": "", "rollout_devices": 8, "train_devices": 8, '
    '"rollout_memory_gib": 0.0, "train_memory_gib": 0.0, "model_gb": 0.0, "rollout_switch_s": 0.0, '
    '"train_switch_s": 0.0, "cold_start_s": 0.0, "tail_share": 0.0, "tail_devices_share": 0.125}}, '
    '"facts": {"run": "r"}}': (
        Submitted(0.5, ClusterJob(name="a", rounds=ROUNDS, steps=3, slo=1.5)),
        {"run": "r"},
    ),
    '{"kind": "Committed", "event": {"at_s": 1.0, "job": "a", "work_s": 5.5, "times": [2, 0.5, 2, '
    '1], "kind": "plain", "step": 1}, "facts": {"step": 1}}': (
        Committed(1.0, "a", 5.5, Times(2, 0.5, 2, 1), step=1),
        {"step": 1},
    ),
    '{"kind": "Drained", "event": {"at_s": 1.0, "node": ["cheap", 0], "has_host": true}, '
    '"facts": {}}': (Drained(1.0, Node("cheap", 0)), {}),
}
"""Events in the form in which the store had them when they were dataclasses."""


@pytest.mark.parametrize("text", WRITTEN, ids=lambda text: text[10:16])
def test_events_are_read_and_written_as_they_were(text: str) -> None:
    event, facts = WRITTEN[text]
    assert happened(StoredEvent(json.loads(text), 0)) == (event, facts)
    assert json.loads(json.dumps(entry_of(event, facts, []).event)) == json.loads(text)


def test_an_event_with_a_field_that_nobody_knows_is_refused() -> None:
    plain = {"kind": "Ended", "event": {"at_s": 1.0, "job": "a", "colour": 1}, "facts": {}}
    with pytest.raises((TypeError, ValueError), match="colour"):
        happened(StoredEvent(plain, 0))


def test_commands_have_the_checksum_that_they_had() -> None:
    commands = [
        Open(CHEAP + FAST),
        Start("a", 7, CHEAP, FAST),
        Grant("a", "rollout", 3),
        Stop("b", "c has a higher priority"),
        Stop("b", "it was cancelled", of_cancelled=True),
        GiveUp("d"),
        Close(FAST),
    ]
    assert checksum(commands) == 2427376755
    assert checksum([]) == 223132457


def test_a_letter_that_a_mailbox_of_an_earlier_version_sends_is_read() -> None:
    """The mailbox behind ray is a detached actor: it goes on with the code that made it."""
    sent = (
        b"\x80\x05\x95Q\x00\x00\x00\x00\x00\x00\x00\x8c rollpacker.cluster.seats.mailbox\x94"
        b"\x8c\x06Letter\x94\x93\x94)\x81\x94]\x94(K\x01\x8c\x01a\x94\x8c\x04beat\x94}\x94"
        b"\x8c\x01x\x94K\x01s\x8c\x01k\x94eb."
    )
    letter = Letter(number=1, sender="a", kind="beat", facts={"x": 1}, key="k")
    assert pickle.loads(sent) == letter
