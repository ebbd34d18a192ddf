"""The service passes over a job that hangs between two phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollpacker.cluster.mail_file import FileMailbox
from rollpacker.cluster.service import Service
from rollpacker.core import cluster_running
from rollpacker.core.cluster import Cluster
from rollpacker.core.coexecution.cheapest_work import CheapestWork
from tests.cluster_service import lab
from tests.cluster_service.test_service import House, look_always, submit

__all__ = ["look_always"]


class RoundRobin(House):
    def new_service(self) -> Service:
        self.service = Service(
            Cluster(lab.pools(self.nodes), CheapestWork(orders=("round_robin",)), max_group=8),
            name="lab",
            folder=self.folder,
            mailbox=FileMailbox(self.folder / "mail"),
            runner=self.runner,
            tell=self.told.append,
        )
        return self.service


def test_a_job_that_hangs_between_phases_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_running, "PATIENCE_S", 0.5)
    house = RoundRobin(tmp_path, nodes=1)
    for name in "ab":
        submit(house, name)
    house.ask("a", "rollout")
    house.leave("a")
    house.ask("b", "rollout")
    assert house.job("b")["waits_for"] == "rollout", "a comes first in the next turn"
    house.until(lambda: house.job("b")["holds"] == "rollout")
    (said,) = [one for one in house.told if "passed over" in one]
    assert said == "a is away for longer than it said: it is passed over until it asks again"

    house.service.close()
    house.new_service()  # which knows the same
    house.leave("b")
    house.ask("a", "train")
    assert house.heard("a")[-1] == ("grant", 2)
