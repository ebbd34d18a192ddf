"""Each type that may be part of a message between processes comes back as it was."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import PosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollpacker.codec import Codec, Kind
from rollpacker.core.checks.deadlines import AdaptiveDeadlineConfig
from rollpacker.engines.engine import EngineConfig
from rollpacker.engines.messages import codec as engine_codec
from rollpacker.rewards.host_messages import codec as reward_codec
from rollpacker.sandbox.sandbox import SandboxConfig
from rollpacker.trainer.calls import codec as trainer_codec
from tests.core.drawn import NUMBERS, TEXTS, values

CODECS = {"engine": engine_codec, "reward": reward_codec, "trainer": trainer_codec}
SETUPS = {
    "EngineSetup",
    "RewardSetup",
    "RewardConfig",
    "LearnerSetup",
    "ModelConfig",
    "LoraConfig",
    "TrainConfig",
    "CriticConfig",
    "PipelineConfig",
    "AlgorithmConfig",
}
"""Settings that refuse most values. They go once, when a process is set up, and the tests of
engines, reward hosts and trainers in processes send them."""
GIVEN: dict[type, st.SearchStrategy[Any]] = {
    AdaptiveDeadlineConfig: st.builds(AdaptiveDeadlineConfig, min_s=st.floats(0.5, 2.0)),
    EngineConfig: st.builds(EngineConfig),
    SandboxConfig: st.builds(SandboxConfig),
    Counter: st.dictionaries(TEXTS, NUMBERS, max_size=3).map(Counter),
    defaultdict: st.dictionaries(TEXTS, st.floats(0, 1), max_size=3).map(
        lambda found: defaultdict(float, found)
    ),
    PosixPath: st.just(PosixPath("/a/b")),
}
MESSAGES = [
    (name, kind.type if isinstance(kind, Kind) else kind)
    for name, codec in CODECS.items()
    for kind in codec().types
]


@pytest.mark.parametrize(
    ("codec", "kind"),
    [
        pytest.param(CODECS[name], kind, id=f"{name} {kind.__name__}")
        for name, kind in MESSAGES
        if kind.__name__ not in SETUPS
    ],
)
@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_part_of_a_message_comes_back(
    codec: Callable[[], Codec], kind: type, data: st.DataObject
) -> None:
    value = data.draw(GIVEN[kind] if kind in GIVEN else values(kind))
    sent = codec().encode([value])
    (again,) = codec().decode(sent)
    assert type(again) is type(value)
    assert codec().encode([again]) == sent  # arrays have no equality of their own


def test_there_is_no_setup_that_is_no_message() -> None:
    """A name that is misspelt above would leave its type out."""
    assert {kind.__name__ for _, kind in MESSAGES} >= SETUPS
