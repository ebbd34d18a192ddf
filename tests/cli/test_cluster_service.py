"""The commands of a cluster, with the real service in a thread and a runner that starts nothing:
what is said, and what is refused with one message."""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import write_config, write_model
from rollpacker.cli.main import main
from rollpacker.cluster.commands import desk as cluster_desk
from rollpacker.cluster.commands import serve as cluster_serve
from rollpacker.cluster.commands import show as cluster_show
from rollpacker.cluster.commands.desk import ServiceFacts, take_lock, write_facts
from rollpacker.cluster.commands.submit import job_of
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.service.runner import JobOrder
from rollpacker.cluster.sim.spec import load_cluster
from rollpacker.config import load
from rollpacker.config.load import load_config
from rollpacker.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
PHASES = ("--phases", "1.0,0.8")


@dataclass
class NoRunner:
    """Meets `Runner`. Jobs run until they are told to stop."""

    orders: dict[tuple[str, int], JobOrder] = field(default_factory=dict)
    codes: dict[tuple[str, int], int] = field(default_factory=dict)
    wanted: Mapping[str, int] = field(default_factory=dict)

    def start(self, order: JobOrder) -> None:
        self.orders.setdefault((order.job, order.incarnation), order)

    def stop(self, job: str, incarnation: int) -> None:
        self.codes[job, incarnation] = 130

    def kill(self, job: str, incarnation: int) -> None:
        self.codes[job, incarnation] = -9

    def ended(self, job: str, incarnation: int) -> int | None:
        start = (job, incarnation)
        return self.codes.get(start) if start in self.orders else -1

    def last_lines(self, job: str) -> str:
        return f"a line of {job}\n"

    def has_host(self, node: Node) -> bool:
        return True

    def want(self, num_nodes: Mapping[str, int]) -> None:
        self.wanted = num_nodes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    write_model(folder / "model")
    return write_config(folder, 20)


@dataclass
class Command:
    """Runs `rollpacker cluster` in a folder of its own."""

    folder: Path
    config: Path
    capsys: pytest.CaptureFixture[str]
    runner: NoRunner = field(default_factory=NoRunner)
    out: str = ""
    err: str = ""

    def __call__(self, *arguments: object) -> int:
        self.capsys.readouterr()
        code = main(["cluster", *map(str, arguments)])
        self.out, self.err = self.capsys.readouterr()
        assert "Traceback" not in self.err
        return code

    def refused(self, *arguments: object) -> str:
        """The one message of what is refused, on one line."""
        assert self(*arguments) == 2, (self.out, self.err)
        assert self.err.startswith("rollpacker: ") and self.err.count("\n") == 1, self.err
        return self.err

    def submit(self, name: str, *arguments: object) -> int:
        own = (f"name={name}", f"runs_dir={self.folder}/runs", "train.processes=1")
        return self("submit", self.config, *own, *PHASES, *arguments)


@pytest.fixture
def command(
    made: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cluster_desk.CLUSTER_VARIABLE, raising=False)
    monkeypatch.setattr(cluster_desk, "ANSWER_S", 20.0)
    return Command(tmp_path, made, capsys)


@pytest.fixture
def served(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """While the two nodes of `two-cores.yaml` are served from runs/two-cores-cluster."""
    spec = load_cluster(ROOT / "configs/clusters/two-cores.yaml")
    folder = Path("runs/two-cores-cluster").resolve()
    folder.mkdir(parents=True)
    over = threading.Event()
    monkeypatch.setattr(cluster_serve, "_tell", lambda line: None)  # it has another terminal
    ground = cluster_serve.Ground(
        said="", mailbox=FileMailbox(folder / "mail.db"), runner=command.runner, left=""
    )
    began = threading.Event()
    thread = threading.Thread(
        target=cluster_serve.serve,
        args=(spec, folder, ground),
        kwargs={"began": began.set, "is_over": over.is_set},
    )
    with take_lock(folder):
        thread.start()
        assert began.wait(20)
        yield command
        over.set()
        thread.join(20)
        assert not thread.is_alive()


# -- a job's life ------------------------------------------------------------------


def test_a_job_is_submitted_shown_and_cancelled(served: Command) -> None:
    assert served("jobs") == 0 and "has no jobs" in served.out
    assert served.submit("one", "--slo", "3", "--priority", "2", "--owner", "ann") == 0
    assert "one starts on rollout-core/0 and train-core/0, alone" in served.out
    (order,) = served.runner.orders.values()
    assert order.command[-1] == "--resume=auto"
    assert order.environ["ROLLPACKER_SEAT"].endswith("#one#1") and order.folder == os.getcwd()

    assert served("jobs", "--json") == 0
    (job,) = json.loads(served.out)
    assert (job["job"], job["owner"], job["priority"], job["slo"]) == ("one", "ann", 2, 3.0)
    assert served("jobs") == 0
    assert re.search(r"one +ann +running .* rollout-core/0 train-core/0 +0/20 ", served.out)
    assert served("show", "one") == 0
    assert "priority:       2" in served.out and "train runs/one/submitted-" in served.out.replace(
        f"{served.folder}/", ""
    )
    assert served("top") == 0 and "rollout-core 1 of 1 nodes" in served.out
    assert served("top", "--json") == 0 and json.loads(served.out)["name"] == "two-cores"

    assert served("cancel", "one") == 0
    assert served.out == "one ends at its next commit; --now ends it at once\n"
    assert served("cancel", "one", "--now") == 0
    until = time.monotonic() + 20
    while served("jobs", "--json") == 0 and json.loads(served.out)[0]["state"] != "cancelled":
        assert time.monotonic() < until
    assert served("cancel", "one") == 0 and served.out == "one has ended: cancelled\n"


def test_what_was_submitted_is_what_starts_whatever_becomes_of_the_file(served: Command) -> None:
    text = served.config.read_text()
    served.config = served.folder / "own.yaml"
    served.config.write_text(text)
    assert served.submit("one", "train.steps=7") == 0
    served.config.write_text(text.replace('"learning_rate": 0.001', '"learning_rate": 0.5'))
    assert served.config.read_text() != text
    (order,) = served.runner.orders.values()
    kept = Path(order.command[-2])
    assert order.command[-3] == "train" and kept.parent == served.folder / "runs/one"
    config = load_config(kept, [], RunConfig)
    assert (config.name, config.train.steps, config.train.learning_rate) == ("one", 7, 0.001)
    assert served.submit("one") == 2 and "is here already" in served.err
    assert list(kept.parent.iterdir()) == [kept], "the refused one has left nothing"


def test_of_two_equal_submissions_the_refused_one_leaves_the_others_file(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = load.save_config

    def save_late(*arguments: Any, **settings: Any) -> None:
        """The other one comes just then, and is accepted."""
        monkeypatch.setattr(load, "save_config", save)
        assert served.submit("one") == 0
        save(*arguments, **settings)

    monkeypatch.setattr(load, "save_config", save_late)
    assert served.submit("one") == 2 and "is here already" in served.err
    (order,) = served.runner.orders.values()
    assert list((served.folder / "runs/one").iterdir()) == [Path(order.command[-2])]


def test_a_program_of_another_framework_is_submitted(served: Command) -> None:
    program = served.folder / "loop.py"
    program.write_text("")
    own = ("--phases", "1,1", "--steps", "30", "--arguments=--lr 0.1")
    assert served("submit", program, *own, "--name", "mine") == 0
    assert "mine starts on rollout-core/0 and train-core/0, alone" in served.out
    (order,) = served.runner.orders.values()
    assert order.command[-3:] == [str(program), "--lr", "0.1"]
    assert "is here already" in served.refused("submit", program, *own, "--name", "again")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("loop.py", "--steps", "3"), "add --phases"),
        (("loop.py", "lr=1", "--phases", "1,1", "--steps", "3"), "--arguments="),
        (("loop.py", "--phases", "1,1"), "add --steps"),
        (("loop.py", "--phases", "1,1", "--steps", "3", "--devices", "two"), "such as 8,8"),
        (("loop.py", "--steps", "3", "--profile", "runs/x"), "give a program --phases"),
        (("lost.py", "--phases", "1,1", "--steps", "3"), "there is no program lost.py"),
        (("loop.py", "--phases", "1,1", "--steps", "0"), "steps"),
        (("loop.py", "--phases", "1,1", "--steps", "3", "--arguments='x"), "a shell could not"),
    ],
)
def test_a_program_that_says_too_little_is_refused(
    served: Command, arguments: tuple[str, ...], said: str
) -> None:
    Path("loop.py").write_text("")
    assert said in served.refused("submit", *arguments)
    assert not served.runner.orders


def test_what_only_a_program_is_told_is_refused_of_a_run(command: Command) -> None:
    said = command.refused("submit", command.config, "train.processes=1", *PHASES, "--steps", "3")
    assert "--steps is for a program" in said


def test_a_second_job_waits_and_says_for_what(served: Command) -> None:
    assert served.submit("one", "--slo", "1.01") == 0
    assert served.submit("two", "--json") == 0
    answer = json.loads(served.out)
    assert (answer["state"], answer["waits_for"]) == ("waiting", "nodes")
    assert served.submit("three") == 0
    assert served.out.startswith("three waits: two comes first, which fits nowhere now")


def test_two_jobs_share_and_are_told_so(served: Command) -> None:
    assert served.submit("one", "--slo", "4") == 0
    assert served.submit("two", "--slo", "4") == 0
    assert "two starts on rollout-core/0 and train-core/0, beside one" in served.out


def test_a_node_is_drained_and_given_back(served: Command) -> None:
    assert served.submit("one", "--slo", "4") == 0
    assert served("drain", "rollout-core/0") == 0
    assert served.out == (
        "rollout-core/0 gets no more jobs; it has 1, which move at their next commit: one\n"
    )
    assert served("top") == 0 and "draining rollout-core/0" in served.out
    assert served("drain", "rollout-core/0", "--restore") == 0
    assert served.out == "rollout-core/0 may have jobs again\n"


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--slo", "0.9"), "--slo 0.9: alone a job has a slowdown of 1"),
        (("--slo", "nan"), "--slo nan: alone"),
        (("--phases", "12"), "--phases 12: give mean seconds of a rollout and of a training"),
        (("--phases", "0,3"), "--phases 0,3: give mean seconds"),
        (("--profile", "runs/alone"), "--profile and --phases exclude each other"),
        (("rollout.engines=3",), "needs 3 rollout devices, and no rollout pool has more than 1"),
        (("train.step=3",), 'Did you mean "steps"?'),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    served: Command, arguments: tuple[str, ...], said: str
) -> None:
    message = served.refused(
        "submit", served.config, "train.processes=1", "--phases", "1,1", *arguments
    )
    assert said in message
    assert served("jobs", "--json") == 0 and json.loads(served.out) == []
    assert not served.runner.orders


def test_a_run_without_processes_of_the_trainer_is_refused(command: Command) -> None:
    said = command.refused("submit", command.config, *PHASES)
    assert "set train.processes" in said


def test_a_judge_on_the_devices_of_the_engines_is_refused(command: Command) -> None:
    judge = '{function: judge, arguments: {model_path: /m, prompt: "{completion}"}}'
    said = command.refused("submit", command.config, "train.processes=1", f"rewards=[{judge}]")
    assert "rewards.0.arguments.url" in said
    reward = "{function: reward_model, arguments: {model_path: /m}}"
    on_gpu = ("train.processes=1", "model.device=cuda", f"rewards=[{reward}]")
    said = command.refused("submit", command.config, *on_gpu)
    assert "set rewards.0.arguments.device=cpu" in said
    lines = (
        "placement={rollout: {devices: 1}, train: {devices: 1}, judge: {devices: 1},"
        " colocate: [judge, rollout]}"
    )
    said = command.refused("submit", command.config, lines)
    assert "a judge on the devices of the engines" in said


def test_a_run_whose_engines_and_trainer_take_turns_is_refused(command: Command) -> None:
    overrides = ("rollout.engines=2", "train.processes=2", "train.colocate=true")
    said = command.refused("submit", command.config, *overrides)
    assert "leave train.colocate out" in said


def test_a_run_that_takes_all_devices_is_refused(command: Command) -> None:
    said = command.refused("submit", command.config, "placement={rollout: {devices: 1}}")
    assert "devices: all" in said and "Give numbers" in said


def test_without_seconds_the_message_says_how_to_get_them(command: Command) -> None:
    said = command.refused("submit", command.config, "train.processes=1")
    again = f"rollpacker train {command.config} train.processes=1 name=reference-alone"
    assert again in said and "--profile" in said and "--phases" in said


def test_each_phase_is_spread_over_nodes_of_its_own(made: Path) -> None:
    """Of a job that asks for more than a node of one kind has."""
    config = load_config(made, ("train.processes=4", "rollout.engines=4"), RunConfig)
    asked = argparse.Namespace(phases="1,1", profile=None, slo=1.5, priority=0, owner="ann")
    small = ("pools.0.nodes=4", "pools.1.nodes=4")
    sizes = {"small": (1, 1), "of training": (1, 4), "of rollout": (4, 1)}
    gib = {}
    for name, (of_rollout, of_training) in sizes.items():
        own = (f"pools.0.devices_per_node={of_rollout}", f"pools.1.devices_per_node={of_training}")
        spec = load_cluster(ROOT / "configs/clusters/two-cores.yaml", (*small, *own))
        job = job_of(asked, config, spec)
        gib[name] = job.rollout_memory_gib, job.train_memory_gib
    rollout_gib, train_gib = gib["small"]
    assert gib["of training"] == pytest.approx((rollout_gib, 4 * train_gib))
    assert gib["of rollout"] == pytest.approx((4 * rollout_gib, train_gib))


def test_an_slo_that_switches_alone_break_is_refused(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker.cluster.profile import job_profile

    monkeypatch.setattr(job_profile, "WAKE_GB_S", {"rollout": 1e-6, "train": 1e-6})
    said = served.refused(
        *("submit", served.config, "train.processes=1", *PHASES, "--slo", "1.001")
    )
    found = re.search(r"--slo 1.001 cannot be kept: .* Give ([\d.]+) or more", said)
    assert found is not None
    assert served.submit("reference", "--slo", found.group(1)) == 0


def test_a_profile_of_another_run_and_no_profile_are_refused(served: Command) -> None:
    said = served.refused(
        "submit", served.config, "train.processes=1", "--profile", served.folder / "nothing"
    )
    assert "nothing" in said
    assert not served.runner.orders


def test_one_run_submitted_twice_is_refused(served: Command) -> None:
    assert served.submit("one") == 0
    assert served.submit("one") == 2 and "job one is here already" in served.err
    assert len(served.runner.orders) == 1


def test_jobs_and_nodes_that_are_not_there(served: Command) -> None:
    assert served.submit("first") == 0
    assert 'Did you mean "first"?' in served.refused("show", "frist")
    assert 'Did you mean "first"?' in served.refused("cancel", "frist")
    for node in ("rollout-core", "rollout-core/1", "core/0"):
        said = served.refused("drain", node)
        assert f"no node {node}. Its nodes are rollout-core/0, train-core/0" in said


# -- which service -----------------------------------------------------------------


def test_no_cluster_at_all(command: Command) -> None:
    assert "start one with rollpacker cluster serve FILE" in command.refused("jobs")
    assert "it has no service.json" in command.refused("jobs", "--cluster", "elsewhere")


def dead(folder: Path, name: str) -> Path:
    """The folder of a service that has ended."""
    folder.mkdir(parents=True)
    box = FileMailbox(folder / "mail.db")
    spec = {"name": name}
    write_facts(
        folder,
        ServiceFacts(name=name, mailbox=box.address, host=os.uname().nodename, pid=1, spec=spec),
    )
    return folder


def test_a_service_that_has_ended_and_one_that_is_silent(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = dead(command.folder / "runs/lab-cluster", "lab")
    said = command.refused("jobs")
    assert "no cluster is served from runs/lab-cluster: start" in said
    monkeypatch.setattr(cluster_desk, "ANSWER_S", 0.3)
    said = command.refused("jobs", "--cluster", folder)
    assert "does not answer: process 1" in said and "has ended" in said and "--folder" in said
    with take_lock(folder):
        said = command.refused("jobs")
        assert "does not answer" in said and "has ended" not in said and "waits there" not in said


def test_what_a_silent_service_was_asked_waits_for_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_desk, "ANSWER_S", 0.3)
    desk = cluster_desk.Desk(dead(command.folder / "runs/lab-cluster", "lab"))
    later = "waits there, and may start once the service answers: rollpacker cluster cancel takes"
    with pytest.raises(ValueError, match=later):
        desk.ask("submit", {})
    with pytest.raises(ValueError, match=r"jobs are still known$"):
        desk.ask("status", {})


def test_a_disk_that_is_full_is_said_of_a_service_that_is_there(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cluster_desk, "open_mailbox", lambda address: Full(Path("full")))
        assert served("jobs") == 5
    assert served.err.startswith("rollpacker: the disk is full"), served.err
    assert "No space left on device: 'mail.db/service.letters'" in served.err
    assert "does not answer" not in served.err and "tart it again" not in served.err


class Full(FileMailbox):
    """On a disk that is full."""

    def post(self, *letter: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "mail.db/service.letters")


def test_serve_on_a_full_disk_says_where(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a file that is open

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        two = ROOT / "configs/clusters/two-cores.yaml"
        assert command("serve", two, "--local", "--folder", "here") == 5
    assert command.err.count("\n") == 1 and "here: " in command.err, command.err
    assert not list(Path("here").glob("mail/*"))


def test_of_two_clusters_one_has_to_be_named(
    served: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dead(served.folder / "runs/other", "other")
    assert served("jobs") == 0, "only one of them is served"
    with take_lock(other):
        said = served.refused("jobs")
        assert "2 clusters are served here, runs/other, runs/two-cores-cluster" in said
        assert served("jobs", "--cluster", "runs/two-cores-cluster") == 0
        monkeypatch.setenv(cluster_desk.CLUSTER_VARIABLE, "runs/two-cores-cluster")
        assert served("jobs") == 0


def test_a_second_service_on_the_folder_is_refused(served: Command) -> None:
    said = served.refused("serve", ROOT / "configs/clusters/two-cores.yaml", "--local")
    assert "another service is at work in runs/two-cores-cluster (process " in said
    assert "--folder" in said


def test_serve_refuses_a_bad_file_and_leaves_nothing(command: Command) -> None:
    file = ROOT / "configs/clusters/two-cores.yaml"
    assert "link_gb_s" in command.refused("serve", file, "--local", "link_gb_s=-1")
    assert "no such config file" in command.refused("serve", "nothing.yaml", "--local")
    mixed = ROOT / "configs/clusters/mixed.yaml"
    assert "rollout nodes: jobs on two of them" in command.refused("serve", mixed, "--local")
    assert not Path("runs").exists()


def test_without_ray_serve_says_what_it_can_do(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker import imports

    monkeypatch.setattr(imports, "missing", lambda package, *, extra, what: f"{what} needs {extra}")
    said = command.refused("serve", ROOT / "configs/clusters/two-cores.yaml")
    assert "a cluster on ray needs ray. On this host alone it can do without: --local" in said


def test_a_folder_on_a_network_file_system_is_refused(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollpacker.cluster.seats import mail_file

    monkeypatch.setattr(mail_file, "file_system", lambda folder, mounts: "nfs4")
    said = command.refused("serve", ROOT / "configs/clusters/two-cores.yaml", "--local")
    assert "network file system (nfs4)" in said
    assert not Path("runs").exists()


def test_other_pools_in_a_folder_with_jobs_are_refused_if_that_matters(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_serve, "_tell", lambda line: None)
    file, folder = ROOT / "configs/clusters/two-cores.yaml", command.folder / "runs/lab"
    folder.mkdir(parents=True)
    pools = ("pools.0.nodes=2", "pools.1.nodes=2")

    def once(*overrides: str, submits: Sequence[str] = ()) -> None:
        """Served with these settings, until some jobs have been submitted."""
        box = FileMailbox(folder / "mail.db")
        ground = cluster_serve.Ground(said="", mailbox=box, runner=command.runner, left="")
        over = threading.Event()

        def submit() -> None:
            for name in submits:
                assert command.submit(name, "--slo", "1.01", "--cluster", folder) == 0
            over.set()

        with take_lock(folder):
            asks = threading.Thread(target=submit)
            spec = load_cluster(file, overrides)
            cluster_serve.serve(spec, folder, ground, began=asks.start, is_over=over.is_set)
            asks.join(20)

    once(submits=("one",))
    once(*pools)  # they grow
    once(*pools, submits=("two",))
    with pytest.raises(ValueError, match="pool rollout-core has 2 nodes by now, and pools do not"):
        once()
    with pytest.raises(ValueError, match=r"would be on other nodes or wait no more") as caught:
        once(*pools, "pools.0.name=other")
    told = str(caught.value)
    assert 'pools.0.name="rollout-core", which' in told and "event 1 (Submitted)" in told
    assert "--folder" in told and "until its jobs have ended" in told


# -- what is shown -----------------------------------------------------------------


def test_names_cannot_break_the_table() -> None:
    lines = cluster_show.columns([("job", "now"), ("a\nb\x1b[31m", "x")])
    assert len(lines) == 2 and "\x1b" not in "".join(lines)


def test_the_live_display_fits_the_screen(served: Command) -> None:
    from rich.console import Console

    for number in range(30):
        assert served.submit(f"job-{number:02d}", "--slo", "9") == 0
    assert served("top", "--json") == 0
    status = json.loads(served.out)
    console = Console(width=80, height=24, record=True, file=io.StringIO())
    console.print(cluster_show._screen(status, 24))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and all(len(line) <= 80 for line in lines)
    assert "job-00" in "".join(lines) and any(re.fullmatch(r"and \d+ more", one) for one in lines)


# -- as a process ------------------------------------------------------------------


def test_serve_ends_with_ctrl_c_and_goes_on(command: Command) -> None:
    file = ROOT / "configs/clusters/two-cores.yaml"
    serve = [sys.executable, "-m", "rollpacker.cli.main", "cluster", "serve", str(file), "--local"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for _ in range(2):
        process = subprocess.Popen(
            serve, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert "its folder is runs/two-cores-cluster. Ctrl-C ends the service" in first
            assert command("jobs") == 0 and "has no jobs" in command.out
            process.send_signal(2)
            rest, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 130 and "The same command goes on" in rest, rest
