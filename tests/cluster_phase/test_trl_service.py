"""`examples/trl_shared` under the cluster's service: it is stopped at a commit and goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rollpacker.cluster.seats import mailbox_seat
from rollpacker.cluster.service import starts_alive as losses
from rollpacker.codec import to_plain
from tests.cluster_phase.test_trl_shared import ROOT, SCRIPT, begin, ended, sums
from tests.cluster_service.lab import Desk, job, make_service

STEPS = 12
PATIENT = (
    "import runpy, sys; from rollpacker.cluster.seats import mailbox_seat; "
    "mailbox_seat.LEASE_S = 120.0; "
    "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Begins the script as a job whose lease a machine that stands still does not end."""


@pytest.mark.timeout(900)
def test_a_script_moves_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is drained: it ends where its next phase would begin, and starts on another."""
    for name in ("LEASE_S", "START_LEASE_S"):
        monkeypatch.setattr(mailbox_seat, name, 120.0)
    monkeypatch.setattr(losses, "SILENT_S", 120.0)
    service = make_service(tmp_path)
    desk = Desk(tmp_path, meanwhile=lambda: service.step(0.01))
    output, alone = tmp_path / "job", tmp_path / "alone"
    desk.ask(
        "submit",
        job=to_plain(job("job", STEPS, 1.0, 1.0)),
        command=[
            *(sys.executable, "-c", PATIENT, SCRIPT),
            *("--output", str(output), "--steps", str(STEPS)),
        ],
        resume=[],
        environ={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        folder=str(ROOT),
        run=str(output),
    )
    deadline, nodes = time.monotonic() + 600, []
    while (status := desk.status()["job"])["state"] not in ("done", "failed", "cancelled"):
        assert time.monotonic() < deadline, status
        if status["steps"] >= 2 and not nodes:
            nodes = status["rollout_nodes"]
            desk.ask("drain", node=nodes[0])
        service.step(0.05)
    service.close()
    assert (status["state"], status["steps"], status["incarnation"]) == ("done", STEPS, 2), status
    codes = [(tmp_path / "jobs" / "job" / n / "exit").read_text() for n in ("1", "2")]
    assert codes == ["130", "0"]

    assert ended(begin(alone, steps=STEPS), alone) == 0
    assert sums(output, STEPS) == sums(alone, STEPS)
