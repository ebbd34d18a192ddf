"""Weights across a slow link between network namespaces: `make test-cluster`, skipped elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.cluster.netns import why_impossible
from tests.cluster.slow_link import FAULTS, Pools

pytestmark = [
    pytest.mark.skipif(
        "ROLLPACKER_TEST_CLUSTER" not in os.environ, reason="make test-cluster runs it"
    ),
    pytest.mark.timeout(300),
]
NUM_BYTES = 20_000_000
MBIT = 80.0
ALONE_S = NUM_BYTES * 8 / (MBIT * 1e6)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    if why := why_impossible():
        pytest.fail(why)
    with Pools(4, MBIT, NUM_BYTES) as pools:
        yield pools


def test_one_model_crosses_the_link_for_four_hosts(pools):
    published, pulled = pools.transfer("published"), pools.transfer("each pulls")
    assert 1.0 <= published["models_across"] <= 1.01
    assert pulled["models_across"] > 3.9
    assert published["seconds"] < 1.3 * ALONE_S
    assert pulled["seconds"] > 2.5 * published["seconds"]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_amid_it(pools, fault):
    """In this order: the last one leaves one host less."""
    found = pools.fault(fault)
    assert found["failed"] == (["host 4"] if fault == "host killed" else [])
    assert found["models_across"] < 1.26
