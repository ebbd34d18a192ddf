"""What a cluster's commands say to people, and what they know of a run that goes on."""

from __future__ import annotations

import argparse
import io
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from rollpacker.cluster.commands import serve as cluster_serve
from rollpacker.cluster.commands import show as cluster_show
from rollpacker.cluster.commands.submit import going_on, job_of
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig
from tests.cli.test_cluster_service import PHASES, ROOT, Command, command, made, served

__all__ = ["command", "made", "served"]


def test_a_run_that_is_submitted_to_go_on_has_the_rest_of_its_steps(
    made: Path, tmp_path: Path
) -> None:
    own = ("train.processes=1", "train.steps=20", f"runs_dir={tmp_path}")
    config = load_config(made, own, RunConfig)
    asked = argparse.Namespace(phases="1,1", profile=None, slo=1.5, priority=0, owner="ann")
    job = job_of(asked, config, load_cluster(ROOT / "configs/clusters/two-cores.yaml", ()))
    assert going_on(job, config) == job
    saved = tmp_path / config.name / "checkpoints"
    for step, (left, before) in {15: (5, 15), 20: (1, 19)}.items():
        (saved / f"step_{step:06}").mkdir(parents=True)
        went_on = going_on(job, config)
        assert (went_on.steps, went_on.steps_before) == (left, before)


def test_who_saves_seldom_is_told_what_a_loss_would_cost(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.submit("often") == 0 and "is lost" not in served.out
    asked = (served.config, "train.processes=1", "train.steps=4000", "--phases", "10,8")
    assert served("submit", *asked, "name=seldom", "checkpoint.every_steps=1000") == 0
    assert "Note: seldom saves every 1000 steps" in served.out
    assert "up to 5.0 hours are done again" in served.out


def test_texts_name_what_can_be_changed(command: Command, served: Command) -> None:
    said = command.refused(
        *("submit", command.config, "train.processes=1", "name=b", "train.steps=7")
    )
    assert f"train {command.config} train.processes=1 name=b-alone train.steps=8)" in said
    own = ("submit", served.config, "train.processes=1", *PHASES)
    assert "--owner is empty" in served.refused(*own, "--owner", " ")
    own = ("submit", served.config, *PHASES)
    assert "(of a run: train.processes)" in served.refused(*own, "train.processes=9")
    assert "(of a run: rollout.engines)" in served.refused(
        *own, "train.processes=1", "rollout.engines=9"
    )


def test_a_cluster_whose_folder_would_be_elsewhere_is_refused(command: Command) -> None:
    file = ROOT / "configs/clusters/two-cores.yaml"
    said = command.refused("serve", file, "name=../x", "--local")
    assert "its folder would be runs/../x-cluster" in said and "--folder" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("one", "doing"),
    [
        ({"state": "running", "holds": "rollout"}, "rollout for 20 s"),
        ({"state": "running", "waits_for": "rollout"}, "waits 20 s for rollout"),
        (
            {"state": "running", "waits_for": "rollout", "why": "it is e1's turn"},
            "waits 20 s for rollout: it is e1's turn",
        ),
        ({"state": "running", "why": "starts once b has left cheap/0"},) * 2,
        ({"state": "running"}, "-"),
        ({"state": "waiting", "waits_for": "nodes", "why": "long"}, "waits 20 s for nodes"),
        ({"state": "failed", "why": "long"}, "-"),
    ],
)
def test_what_a_job_does_is_said_in_a_few_words(
    one: Mapping[str, str], doing: str | Mapping[str, str]
) -> None:
    job = {"holds": None, "waits_for": None, "why": "", "since_s": 20.0, **one}
    said = doing if isinstance(doing, str) else doing["why"]
    assert cluster_show.doing(job) == said


def test_top_goes_on_while_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"name": "lab", "jobs": [], "pools": [], "price_per_h": 0.0, "events": []}
    answers = [status, ValueError("the service does not answer"), status, KeyboardInterrupt()]

    def ask() -> Mapping[str, object]:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    shown = io.StringIO()
    monkeypatch.setattr(cluster_show, "REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt):
        cluster_show.show_top(ask, Console(file=shown, force_terminal=True, width=120, height=20))
    assert not answers and "does not answer. Still asking" in shown.getvalue()


HOSTILE = "\x1b]52;c;aGk=\x07 \x1b[2J gone \u202e"
"""A text that would write into the clipboard, clear the screen and turn the direction."""


def test_what_a_job_printed_last_steers_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {
        **{"job": "a", "state": "failed", "why": f"It said: {HOSTILE}", "owner": "ann"},
        **{"priority": 0, "steps": 1, "of_steps": 2, "slo": 1.5, "group": None, "with": []},
        **{"rollout_nodes": [], "train_nodes": [], "incarnation": 1, "exit_code": 1},
        **{"folder": "", "command": [], "last_lines": ["plain", HOSTILE], "holds": None},
        **{"waits_for": None, "since_s": 1.0},
    }
    lines = cluster_show.job_lines(job)
    assert lines[-2:] == ["  | plain", "  | \\x1b]52;c;aGk=\\x07 \\x1b[2J gone \\u202e"]
    assert all(line.isprintable() for line in lines)

    event = {"at_s": 0.0, "text": f"a ended: {HOSTILE}"}
    status = {"name": "lab", "jobs": [job], "pools": [], "price_per_h": 0.0, "events": [event]}
    shown = io.StringIO()
    screen = cluster_show._screen(status, 20)
    Console(file=shown, width=200, color_system=None).print(screen)
    assert "\\x1b]52" in shown.getvalue()
    assert all(line.isprintable() for line in shown.getvalue().splitlines())

    told: list[str] = []
    monkeypatch.setattr("rollpacker.run.output.print_line", told.append)
    cluster_serve._tell(HOSTILE)
    assert told[0].isprintable() and "\\x1b]52" in told[0]
