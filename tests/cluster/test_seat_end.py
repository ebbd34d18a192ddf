"""A program with a seat behind ray ends as it says, whatever the seat's threads are about."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from tests.cluster.netns import PORT, Network, why_impossible
from tests.cluster.test_cluster import ROOT, pytestmark

__all__ = ["pytestmark"]
TIMES = 8
"""Every second one ended with exit code 1 when the seat's threads went on while Python ended."""
PROGRAM = """
import atexit, sys, time
atexit.register(time.sleep, 1.5)  # after ray has ended its part in this process
import rollpacker.cluster as cluster
cluster.committed(0)
time.sleep(float(sys.argv[1]))
"""


def test_a_program_that_has_ended_is_not_lost() -> None:
    assert not why_impossible()
    with Network(1) as network:
        network.start_ray([0])

        def ended(number: int) -> tuple[int, str]:
            where = f"ray:{network.addresses[0]}:{PORT}/lab#job-{number}#1"
            environ = {**network.environment, "PYTHONPATH": str(ROOT), "ROLLPACKER_SEAT": where}
            command = [sys.executable, "-c", PROGRAM, str(number / TIMES)]
            done = network.run(0, command, env=environ, timeout_s=120.0)
            return done.returncode, done.stdout

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(ended, range(TIMES))) == [(0, "")] * TIMES
