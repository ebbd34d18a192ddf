"""A folder that is served again with more nodes: its pools grow, whatever its jobs waited for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rollpacker.cluster.commands import serve as cluster_serve
from rollpacker.cluster.commands.desk import FACTS_FILE
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.codec import to_plain
from tests.cli.test_cluster_service import ROOT, NoRunner
from tests.cluster_service import lab


class Place:
    """A folder, and what its services say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.told: list[str] = []
        self._runner = NoRunner()
        self._num_asked = 0
        monkeypatch.setattr(cluster_serve, "_tell", self.told.append)

    def serve(self, nodes: int, kind: str = "status", **facts: Any) -> Mapping[str, Any]:
        """With so many nodes for each phase, until this is answered."""
        spec = load_cluster(
            ROOT / "configs/clusters/two-cores.yaml",
            (f"pools.0.nodes={nodes}", f"pools.1.nodes={nodes}"),
        )
        mailbox = FileMailbox(self.folder / "mail")
        ground = cluster_serve.Ground(said="", mailbox=mailbox, runner=self._runner, left="")
        self._num_asked += 1
        own = f"desk {self._num_asked}"
        mailbox.post(SERVICE, own, "1", kind, facts)
        cluster_serve.serve(
            spec, self.folder, ground, is_over=lambda: bool(mailbox.read(own, 0, 0.0))
        )
        (answer,) = FileMailbox(self.folder / "mail").read(own, 0, 0.0)
        assert answer.kind == kind, answer.facts
        return answer.facts

    def states(self, nodes: int) -> dict[str, str]:
        return {one["job"]: one["state"] for one in self.serve(nodes)["jobs"]}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Of two jobs one runs, and one waits."""
    place = Place(tmp_path, monkeypatch)
    for name in "ab":
        job = to_plain(lab.job(name, 100, 100.0, 30.0, slo=1.0))
        start = {"command": ["x"], "resume": [], "environ": {}, "folder": "/", "run": f"/{name}"}
        place.serve(1, "submit", job=job, **start)
    assert place.states(1) == {"a": "running", "b": "waiting"}
    return place


def test_who_waits_starts_on_the_new_nodes_and_the_next_service_knows_them(place: Place) -> None:
    assert place.states(2) == {"a": "running", "b": "running"}
    grown = [line for line in place.told if "nodes now" in line]
    assert grown == ["pool rollout-core has 2 nodes now", "pool train-core has 2 nodes now"]
    assert place.states(2) == {"a": "running", "b": "running"}
    status = place.serve(3)
    assert [pool["nodes"] for pool in status["pools"]] == [3, 3]
    assert sum("nodes now" in line for line in place.told) == 4, "nothing is said twice"


@pytest.mark.parametrize("nodes", [1, 2])
def test_pools_that_have_grown_do_not_shrink(place: Place, nodes: int) -> None:
    place.serve(3)
    with pytest.raises(ValueError, match="pool rollout-core has 3 nodes by now, and pools do not"):
        place.serve(nodes)
    assert [pool["nodes"] for pool in place.serve(3)["pools"]] == [3, 3]


def test_a_folder_of_an_earlier_version_grows(place: Place) -> None:
    path = place.folder / FACTS_FILE
    facts = json.loads(path.read_text())
    del facts["first_nodes"]
    path.write_text(json.dumps(facts))
    assert place.states(2) == {"a": "running", "b": "running"}
    assert place.states(2) == {"a": "running", "b": "running"}
