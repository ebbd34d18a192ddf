"""The service with letters in a file, and a runner that starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollpacker.cluster.decide.cheapest_work import CheapestWork
from rollpacker.cluster.decide.cluster import Cluster
from rollpacker.cluster.decide.cluster_turns import MAX_LOSSES
from rollpacker.cluster.decide.job import ClusterJob
from rollpacker.cluster.decide.nodes import Node
from rollpacker.cluster.seats.mail_file import FileMailbox
from rollpacker.cluster.seats.mailbox import SERVICE
from rollpacker.cluster.seats.mailbox_seat import LEASE_S, START_LEASE_S
from rollpacker.cluster.seats.seat import SEAT_VARIABLE, START
from rollpacker.cluster.service import book, service
from rollpacker.cluster.service import starts_alive as losses
from rollpacker.cluster.service.runner import JobOrder
from rollpacker.cluster.service.service import Service
from rollpacker.codec import to_plain
from tests.cluster_service import lab

Start = tuple[str, int]


@dataclass
class Pretended:
    """Meets `Runner`; outlives the services of a test."""

    orders: dict[Start, JobOrder] = field(default_factory=dict)
    codes: dict[Start, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    wanted: Mapping[str, int] = field(default_factory=dict)
    is_cut_off: bool = False
    is_slow: bool = False
    """What is started comes once nobody waits for it any more: `begin_late`."""
    late: list[JobOrder] = field(default_factory=list)

    def begin_late(self) -> None:
        for order in self.late:
            if (order.job, order.incarnation) not in self.codes:  # killed before it began
                self.orders[order.job, order.incarnation] = order

    def start(self, order: JobOrder) -> None:
        self._check()
        start = (order.job, order.incarnation)
        if self.is_slow:
            self.late.append(order)
            raise OSError("no answer")
        assert (order.job, order.incarnation - 1) not in self.alive(), "two at a time"
        if start not in self.orders:
            self.log.append(f"start {order.job} {order.incarnation}")
            self.orders[start] = order

    def stop(self, job: str, incarnation: int) -> None:
        self.log.append(f"stop {job} {incarnation}")

    def kill(self, job: str, incarnation: int) -> None:
        self._check()
        self.log.append(f"kill {job} {incarnation}")
        self.codes.setdefault((job, incarnation), -9)

    def ended(self, job: str, incarnation: int) -> int | None:
        self._check()
        start = (job, incarnation)
        return self.codes.get(start) if start in self.orders else -1

    def last_lines(self, job: str) -> str:
        return f"{job} says\nsomething"

    def has_host(self, node: Node) -> bool:
        return True

    def want(self, num_nodes: Mapping[str, int]) -> None:
        self.wanted = num_nodes

    def alive(self) -> set[Start]:
        return {*self.orders} - {*self.codes}

    def _check(self) -> None:
        if self.is_cut_off:
            raise OSError("the runner is cut off")


@dataclass
class Clock:
    """Stands for the module `time` where the service measures silence: it goes on when a test says
    so, and a machine that stands still is not mistaken for a job that is silent."""

    now_s: float = 1_000_000.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class House:
    """A folder, its service, and jobs that this test plays."""

    order = "first_come"

    def __init__(self, folder: Path, nodes: int, clock: Clock | None = None) -> None:
        self.folder = folder
        self.clock = clock or Clock()
        self.nodes = nodes
        self.runner = Pretended()
        self.mailbox = FileMailbox(folder / "mail")
        self.told: list[str] = []
        self.service = self.new_service()
        self.desk = lab.Desk(folder, meanwhile=self.step)
        self._num_posted = 0
        self.asks: dict[str, int] = {}

    def new_service(self) -> Service:
        self.service = Service(
            Cluster(lab.pools(self.nodes), CheapestWork(orders=(self.order,)), max_group=8),
            name="lab",
            folder=self.folder,
            mailbox=FileMailbox(self.folder / "mail"),
            runner=self.runner,
            tell=self.told.append,
        )
        return self.service

    def step(self) -> None:
        self.service.step(0.0)

    def until(self, true: Callable[[], object], within_s: float = 60.0) -> None:
        end = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < end, (self.told, self.runner.log)
            self.service.step(0.01)

    def passes(self, true: Callable[[], object]) -> float:
        """Second after second, until it is true; how many."""
        began_s = self.clock.now_s
        while not true():
            assert self.clock.now_s - began_s < 1000.0, (self.told, self.runner.log)
            self.clock.sleep(1.0)
            self.step()
        return self.clock.now_s - began_s

    # -- a job ---------------------------------------------------------------------------

    def say(self, name: str, letter: str, incarnation: int = 1, **facts: Any) -> None:
        self._num_posted += 1
        facts = {**facts, "incarnation": incarnation}
        self.mailbox.post(SERVICE, name, f"{incarnation}/{self._num_posted}", letter, facts)

    def ask(self, name: str, pool: str, incarnation: int = 1) -> None:
        self.asks[name] = self.asks.get(name, 0) + 1
        self.say(name, "ask", incarnation, ask=self.asks[name], pool=pool, purpose="round")
        self.step()

    def leave(self, name: str, incarnation: int = 1) -> None:
        self.say(name, "left", incarnation, ask=self.asks[name])
        self.step()

    def commit(
        self,
        name: str,
        step: int,
        incarnation: int = 1,
        seconds: float = 10.0,
        last: bool | None = None,
    ) -> None:
        times = {"rollout_s": seconds, "between_s": 0.0, "train_s": 0.0, "after_s": 0.0}
        self.say(name, "committed", incarnation, step=step, kind="plain", last=last, **times)
        self.step()

    def heard(self, name: str) -> list[tuple[str, Any]]:
        """What the service has told the job: kinds, with the ask or the reason."""
        letters = self.mailbox.read(name, 0, 0.0)
        return [(one.kind, one.facts.get("ask") or one.facts.get("reason")) for one in letters]

    def end(self, name: str, code: int, incarnation: int = 1) -> None:
        self.runner.codes[name, incarnation] = code

    def job(self, name: str) -> dict[str, Any]:
        return self.desk.status()[name]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(service, "time", clock)
    monkeypatch.setattr(losses, "time", clock)
    return clock


@pytest.fixture
def house(tmp_path: Path, clock: Clock) -> House:
    return House(tmp_path, 1, clock)


@pytest.fixture
def wide(tmp_path: Path, clock: Clock) -> House:
    return House(tmp_path, 2, clock)


@pytest.fixture(autouse=True)
def look_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LOOK_S", 0.0)


def submit(house: House, name: str, **settings: Any) -> dict[str, Any]:
    one = structs.replace(lab.job(name, 100, 100.0, 30.0), **{"slo": 20.0, **settings})
    return house.desk.submit(one, ["train", f"{name}.yaml"])


def test_a_job_is_started_with_its_seat_and_takes_turns(house: House) -> None:
    answer = submit(house, "a")
    assert (answer["state"], answer["rollout_nodes"]) == ("running", ["cheap/0"])
    order = house.runner.orders["a", 1]
    assert order.command == ["train", "a.yaml"]
    assert order.environ[SEAT_VARIABLE] == f"{house.mailbox.address}#a#1"
    assert house.runner.wanted == {"cheap": 1, "fast": 1}
    assert submit(house, "b")["with"] == ["a"]
    house.ask("a", "rollout")
    house.ask("b", "rollout")
    assert (house.heard("a"), house.heard("b")) == ([("grant", 1)], [])
    assert (house.job("a")["holds"], house.job("b")["waits_for"]) == ("rollout", "rollout")
    house.leave("a")
    assert house.heard("b") == [("grant", 1)]
    house.ask("a", "train")
    house.commit("a", 1)
    one = house.job("a")
    assert (one["steps"], one["holds"], one["state"]) == (1, "train", "running")
    house.end("a", 0)
    house.until(lambda: house.job("a")["state"] == "done")
    assert "a is done" in house.told
    assert house.desk.ask("status")["price_per_h"] == 4.0


def test_what_is_said_twice_counts_once_and_the_next_ask_ends_the_one_before(house: House) -> None:
    submit(house, "a")
    for _ in range(2):
        house.say("a", "ask", ask=1, pool="rollout", purpose="round")
    house.say("a", "beat", left=0, ask=1, pool="rollout", purpose="round")
    house.step()
    assert house.heard("a") == [("grant", 1)]
    house.say("a", "ask", ask=2, pool="train", purpose="step")  # "left 1" was lost
    house.step()
    assert house.heard("a") == [("grant", 1), ("grant", 2)]
    house.say("a", "left", ask=1)  # comes late
    house.step()
    assert house.job("a")["holds"] == "train"
    house.say("a", "beat", left=2)  # "left 2" was lost
    house.step()
    assert house.job("a")["holds"] is None


def test_a_wait_that_is_given_up_is_nobodys(house: House) -> None:
    for name in "abc":
        submit(house, name)
        house.ask(name, "rollout")
    house.leave("b")
    house.leave("a")
    assert (house.heard("b"), house.heard("c")) == ([], [("grant", 1)])


def test_a_job_that_died_is_out_of_its_turn_at_once_and_resumes(house: House) -> None:
    for name in "ab":
        submit(house, name)
        house.ask(name, "rollout")
    house.end("a", 137)
    house.until(lambda: ("a", 2) in house.runner.orders)
    assert house.heard("b") == [("grant", 1)]
    assert house.runner.orders["a", 2].command == ["train", "a.yaml", "--resume=auto"]
    one = house.job("a")
    assert (one["incarnation"], one["last_lines"]) == (2, ["a says", "something"])
    house.say("a", "ask", 1, ask=5, pool="rollout", purpose="of the dead one")
    house.step()
    assert house.job("a")["waits_for"] is None


def test_what_a_job_said_before_its_end_counts_first(house: House) -> None:
    submit(house, "a")
    house.ask("a", "train")
    house.end("a", 1)
    house.say(
        "a",
        "committed",
        step=1,
        kind="plain",
        rollout_s=1.0,
        between_s=0.0,
        train_s=1.0,
        after_s=0.0,
    )
    house.until(lambda: ("a", 2) in house.runner.orders)
    assert house.job("a")["steps"] == 1


def test_a_silent_job_is_killed_before_its_pool_is_given_on(house: House) -> None:
    for name in "ab":
        submit(house, name)
        house.ask(name, "rollout")
    house.say("b", "beat", left=0, ask=1, pool="rollout", purpose="round")
    house.runner.is_cut_off = True
    for _ in range(int(LEASE_S) + 2):
        house.clock.sleep(1.0)
        house.step()
    assert any("a cannot be ended yet" in text for text in house.told)
    assert house.heard("b") == [], "nobody knows whether its processes are gone"
    house.runner.is_cut_off = False
    house.until(lambda: house.heard("b"))
    assert house.runner.log[:4] == ["start a 1", "start b 1", "kill a 1", "start a 2"]
    assert house.heard("b") == [("grant", 1)]


def test_time_in_which_the_service_was_away_counts_for_nobody(house: House) -> None:
    submit(house, "a")
    house.ask("a", "rollout")
    house.clock.sleep(LEASE_S + 3.0)
    house.step()
    assert house.job("a")["incarnation"] == 1
    assert LEASE_S < house.passes(lambda: ("a", 2) in house.runner.orders) <= LEASE_S + 2.0


def test_who_was_just_heard_is_not_excused_into_the_future(house: House) -> None:
    submit(house, "a")
    house.ask("a", "rollout")
    house.clock.sleep(60.0)
    house.say("a", "beat", left=0)
    house.step()
    assert LEASE_S < house.passes(lambda: ("a", 2) in house.runner.orders) <= LEASE_S + 2.0


def test_a_start_that_nobody_could_tell_of_is_made_once(house: House) -> None:
    house.runner.is_slow = True
    submit(house, "a")
    house.step()
    house.runner.is_slow = False
    house.runner.begin_late()
    house.until(lambda: house.job("a")["state"] == "running")
    assert house.runner.alive() == {("a", 1)}


def test_a_start_that_comes_after_the_job_was_cancelled_finds_nothing(house: House) -> None:
    house.runner.is_slow = True
    submit(house, "a")
    house.step()
    house.desk.ask("cancel", job="a")
    house.until(lambda: house.job("a")["state"] == "cancelled")
    house.runner.begin_late()
    assert not house.runner.alive() and "kill a 1" in house.runner.log


def test_who_begins_on_its_devices_may_be_silent_for_longer(house: House) -> None:
    submit(house, "a")
    house.say("a", "ask", ask=1, pool="rollout", purpose=START)
    house.step()
    waited_s = house.passes(lambda: "kill a 1" in house.runner.log)
    assert START_LEASE_S < waited_s <= START_LEASE_S + 1.0
    house.until(lambda: ("a", 2) in house.runner.orders)
    house.ask("a", "rollout", incarnation=2)
    assert LEASE_S < house.passes(lambda: "kill a 2" in house.runner.log) <= LEASE_S + 1.0


def test_who_waits_may_be_silent_for_longer(house: House) -> None:
    for name in "ab":
        submit(house, name)
        house.ask(name, "rollout")

    def killed() -> bool:
        house.say("a", "beat", left=0, ask=1, pool="rollout", purpose="round")
        house.step()
        return any(one.startswith("kill") for one in house.runner.log)

    assert losses.SILENT_S < house.passes(killed) <= losses.SILENT_S + 1.0
    assert "kill b 1" in house.runner.log
    house.until(lambda: ("b", 2) in house.runner.orders)


def test_a_job_that_dies_again_and_again_has_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book, "PAUSES_S", (0.0,))
    submit(house, "a")
    for incarnation in range(1, MAX_LOSSES + 2):
        house.until(lambda n=incarnation: ("a", n) in house.runner.orders)  # type: ignore[misc]
        house.end("a", 1, incarnation)
    house.until(lambda: house.job("a")["state"] == "failed")
    one = house.job("a")
    why = "its process ended with exit code 1, once too often"
    assert one["why"] == f"{why}. The last line that it printed: something"
    assert (one["exit_code"], one["last_lines"]) == (1, ["a says", "something"])
    assert house.runner.wanted == {"cheap": 0, "fast": 0}


def test_bad_input_is_not_tried_again(house: House) -> None:
    submit(house, "a")
    house.end("a", 2)
    house.until(lambda: house.job("a")["state"] == "failed")
    assert house.job("a")["incarnation"] == 1


def test_a_cancelled_job_stops_at_its_commit(house: House) -> None:
    submit(house, "a")
    house.ask("a", "rollout")
    assert house.desk.ask("cancel", job="a")["state"] == "stopping"
    assert house.heard("a") == [("grant", 1), ("stop", "it was cancelled")]
    house.leave("a")
    house.ask("a", "train")  # it goes on until its commit
    assert ("grant", 2) in house.heard("a")
    house.leave("a")
    house.commit("a", 1)
    house.end("a", 130)
    house.until(lambda: house.job("a")["state"] == "cancelled")
    with pytest.raises(lab.Refused, match="there is no job z; there are a"):
        house.desk.ask("cancel", job="z")


def test_a_job_is_cancelled_now(house: House) -> None:
    submit(house, "a")
    house.ask("a", "rollout")
    house.desk.ask("cancel", job="a", now=True)
    house.until(lambda: house.job("a")["state"] == "cancelled")
    assert "kill a 1" in house.runner.log


def test_who_cancels_a_job_that_cannot_be_reached_is_answered(house: House) -> None:
    submit(house, "a")
    house.step()
    house.runner.is_cut_off = True
    assert house.desk.ask("cancel", job="a", now=True)["state"] == "stopping"
    assert any("a cannot be ended yet: the runner is cut off" in text for text in house.told)
    house.runner.is_cut_off = False
    house.desk.ask("cancel", job="a", now=True)
    house.until(lambda: house.job("a")["state"] == "cancelled")


def test_a_job_that_waits_for_nodes_is_told_why_and_cancelled(house: House) -> None:
    submit(house, "a", slo=1.0)
    answer = submit(house, "b", slo=1.0)
    assert (answer["state"], answer["waits_for"]) == ("waiting", "nodes")
    assert answer["why"] == (
        "no free nodes are enough for it alone, and beside a the slowdown of a would be 1.55 (no "
        "more than 1.00 keeps the SLO) and its own slowdown would be 1.55 (no more than 1.00 keeps "
        "the SLO)"
    )
    house.desk.ask("cancel", job="b")
    assert house.job("b")["state"] == "cancelled"
    assert house.job("b")["slowdown"] is None, "it did nothing but wait"
    assert ("b", 1) not in house.runner.orders


def test_a_drained_nodes_job_moves_once_its_old_processes_are_gone(wide: House) -> None:
    submit(wide, "a")
    assert wide.desk.ask("drain", node="cheap/0") == {
        "node": "cheap/0",
        "jobs": ["a"],
        "about": "2",
    }
    wide.commit("a", 1)
    assert wide.heard("a") == [("stop", "it moves")]
    assert ("a", 2) not in wide.runner.orders
    assert wide.runner.wanted == {"cheap": 2, "fast": 1}, "it is on both still"
    wide.ask("a", "rollout", incarnation=1)
    assert wide.heard("a") == [("stop", "it moves")], "it has no turn any more"
    wide.end("a", 130)
    wide.until(lambda: ("a", 2) in wide.runner.orders)
    assert [str(n.number) for n in wide.runner.orders["a", 2].rollout_nodes] == ["1"]
    (pool, _) = wide.desk.ask("status")["pools"]
    assert pool["drained"] == ["cheap/0"]
    with pytest.raises(lab.Refused, match="there is no node cheap/9; there are cheap/0 to 1"):
        wide.desk.ask("drain", node="cheap/9")
    with pytest.raises(lab.Refused, match="cheap is no node: POOL/NUMBER"):
        wide.desk.ask("drain", node="cheap")


def test_a_job_that_moves_far_starts_once_its_old_processes_are_gone(wide: House) -> None:
    submit(wide, "a")
    for node in ("cheap/0", "fast/0"):
        wide.desk.ask("drain", node=node)
    wide.commit("a", 1)
    wide.step()
    assert wide.job("a")["train_nodes"] == ["fast/1"]
    assert ("a", 2) not in wide.runner.orders
    wide.end("a", 130)
    wide.until(lambda: ("a", 2) in wide.runner.orders)


def test_nobody_starts_on_nodes_that_are_not_left_yet(house: House) -> None:
    submit(house, "a", slo=1.0)
    house.desk.ask("drain", node="cheap/0")
    house.commit("a", 1)
    submit(house, "b", slo=1.0, priority=1)
    house.desk.ask("drain", node="cheap/0", restore=True)
    assert (house.job("a")["state"], house.job("b")["state"]) == ("waiting", "running")
    house.step()
    assert ("b", 1) not in house.runner.orders, "what a keeps there is there still"
    house.end("a", 130)
    house.until(lambda: ("b", 1) in house.runner.orders)


def test_a_pool_without_nodes_lets_jobs_wait_and_says_so(house: House) -> None:
    submit(house, "a")
    house.desk.ask("drain", node="fast/0")
    house.commit("a", 1)
    assert house.heard("a") == [("stop", "its nodes are drained")]
    one = house.job("a")
    assert one["state"] == "waiting"
    assert one["why"].startswith("every node of pool fast is drained: rollpacker cluster drain fa")
    house.desk.ask("drain", node="fast/0", restore=True)
    house.step()
    assert ("a", 2) not in house.runner.orders, "its earlier start is there"
    house.end("a", 130)
    house.until(lambda: ("a", 2) in house.runner.orders)


def test_a_job_that_never_leaves_a_pool_is_shown(house: House) -> None:
    house.desk.submit(lab.job("a", 100, 0.01, 0.01), ["train", "a.yaml"])
    house.ask("a", "rollout")
    house.clock.sleep(0.3)
    why = house.job("a")["why"]
    assert why.startswith("has held rollout for 0.")
    assert "its profile says 0.0: rollpacker cluster cancel a --now ends it" in why
    house.leave("a")
    house.asks["a"] += 1
    house.say("a", "ask", ask=house.asks["a"], pool="train", purpose=START)
    house.step()
    house.clock.sleep(0.3)
    assert house.job("a")["holds"] == "train"
    assert house.job("a")["why"] == "starts", "its profile does not say how long that takes"


def test_who_does_not_leave_is_pressed_and_killed(wide: House) -> None:
    submit(wide, "a")
    wide.desk.ask("drain", node="cheap/0")
    wide.commit("a", 1)
    assert wide.passes(lambda: "stop a 1" in wide.runner.log) > losses.PRESS_S
    seconds = wide.passes(lambda: ("a", 2) in wide.runner.orders)
    assert seconds > losses.KILL_S + 130.0 - losses.PRESS_S - 5.0, "it may be in an iteration"
    assert wide.runner.log == ["start a 1", "stop a 1", "kill a 1", "start a 2"]


def test_a_new_service_knows_everything_and_starts_nothing_twice(house: House) -> None:
    for name in "ab":
        submit(house, name)
        house.ask(name, "rollout")
    before = house.desk.status()
    house.leave("a")
    house.service.close()
    house.say("a", "ask", ask=2, pool="train", purpose="step")  # while nobody is there
    house.new_service()
    house.step()
    after = house.desk.status()
    assert after["a"]["holds"] == "train" and after["b"]["holds"] == "rollout"
    assert after["b"]["incarnation"] == before["b"]["incarnation"] == 1
    assert house.heard("a") == [("grant", 1), ("grant", 2)]
    assert house.heard("b") == [("grant", 1)], "it stands, and is the same letter"
    assert house.runner.log == ["start a 1", "start b 1"]


def test_a_new_service_finds_out_who_has_ended_meanwhile(house: House) -> None:
    for name in "ab":
        submit(house, name)
        house.ask(name, "rollout")
    house.service.close()
    house.end("a", 0)
    house.new_service()
    house.until(lambda: house.job("a")["state"] == "done")
    assert house.heard("b") == [("grant", 1)]


def test_what_was_written_and_not_obeyed_is_obeyed_by_the_next_service(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(house, "a")
    submit(house, "b")
    house.say("a", "ask", ask=1, pool="rollout", purpose="round")

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as dying:
        dying.setattr(Service, "_obey", die)
        with pytest.raises(Killed):
            house.step()
    assert house.heard("a") == []
    house.service.close()
    house.new_service()
    assert house.heard("a") == [("grant", 1)]
    house.step()
    assert house.heard("a") == [("grant", 1)], "its letter was dealt with"


def test_a_question_is_answered_though_the_service_died_of_it(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    submit(house, "a")
    house.commit("a", 1)
    house.mailbox.post(SERVICE, "somebody", "7", "status", {})
    house.say("a", "ask", ask=1, pool="rollout", purpose="round")
    house.say(
        "a",
        "committed",
        step=2,
        kind="plain",
        rollout_s=9.0,
        between_s=0.0,
        train_s=1.0,
        after_s=0.0,
    )
    with monkeypatch.context() as dying:
        dying.setattr(Service, "_start_due", die)
        with pytest.raises(Killed):
            house.step()
    house.service.close()
    house.new_service()
    house.step()
    (answer,) = house.mailbox.read("somebody", 0, 0.0)
    assert answer.facts["about"] == "7"
    (one,) = answer.facts["jobs"]
    assert (one["steps"], one["holds"]) == (2, "rollout")
    assert house.heard("a") == [("grant", 1)], "what was said besides counts once"


def test_other_pools_are_refused(house: House) -> None:
    submit(house, "a", slo=1.0)
    submit(house, "b", slo=1.0)
    house.service.close()
    house.nodes = 2
    with pytest.raises(ValueError, match=r"event 2 \(Submitted\) leads to something else now"):
        house.new_service()


def test_a_mailbox_that_lost_its_letters_is_told_everything_again(house: House) -> None:
    submit(house, "a")
    house.ask("a", "rollout")
    house.service.close()
    for path in house.folder.glob("mail/*"):
        path.unlink()
    house.mailbox = FileMailbox(house.folder / "mail")
    house.new_service()
    assert house.heard("a") == [("grant", 1)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "a/b"}, "'a/b' is no name for a job"),
        ({"name": "a" * 101}, "is no name for a job: a hundred letters"),
        ({"name": "service"}, "'service' is no name for a job"),
        ({"slo": 0.5}, "slo is 0.5: alone a job has a slowdown of 1"),
        ({"rollout_devices": 4}, "needs 4 rollout devices, and no rollout pool has more than 1"),
        ({"colour": 3}, "colour"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(
    house: House, change: dict[str, Any], told: str
) -> None:
    job = {**to_plain(lab.job("a", 10, 1.0, 1.0)), **change}
    facts = {"command": ["x"], "resume": [], "environ": {}, "folder": "/", "run": "/r"}
    with pytest.raises(lab.Refused, match=told):
        house.desk.ask("submit", job=job, **facts)
    assert house.desk.status() == {} and house.runner.log == []


def test_one_run_is_submitted_once(house: House) -> None:
    def again(name: str) -> dict[str, Any]:
        one: ClusterJob = lab.job(name, 100, 100.0, 30.0)
        facts = {"command": ["x"], "resume": [], "environ": {}, "folder": "/", "run": "runs/a"}
        return house.desk.ask("submit", job=to_plain(one), **facts)

    again("a")
    with pytest.raises(lab.Refused, match="run runs/a is here already, as job a: cancel that one"):
        again("b")
    with pytest.raises(lab.Refused, match="job a is here already: give each job a name"):
        again("a")
    house.end("a", 0)
    house.until(lambda: house.job("a")["state"] == "done")
    assert again("a")["incarnation"] == 2, "its starts are counted on: the runner knows the first"
    house.until(lambda: ("a", 2) in house.runner.orders)


def test_nonsense_in_a_letter_changes_nothing(house: House) -> None:
    submit(house, "a")
    house.say("a", "ask", ask=1, pool="moon", purpose="round")
    house.say("a", "committed", step=1, kind="plain", rollout_s=-1.0, between_s=0.0)
    house.mailbox.post(SERVICE, "a", "odd", "ask", {})
    house.mailbox.post(SERVICE, "nobody", "odd", "beat", {"incarnation": 1, "left": 0})
    house.step()
    house.ask("a", "rollout")
    assert ("grant", 1) in house.heard("a")
    assert house.job("a")["steps"] == 0


def test_boxes_that_nobody_reads_are_gone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(service, "FORGET_S", -1.0)
        submit(house, "a")
        house.ask("a", "rollout")
        desks = {path.name for path in boxes(house)} - {"a.letters", "service.letters"}
        assert len(desks) == 1 and "a.letters" in {path.name for path in boxes(house)}
        house.end("a", 0)
        house.until(lambda: "a.letters" not in {path.name for path in boxes(house)})
        house.step()
        assert {path.name for path in boxes(house)} == {*desks, "service.letters"}
        patch.setattr(service, "ANSWER_S", -1.0)
        house.step()
        assert {path.name for path in boxes(house)} == {"service.letters"}
    house.desk = lab.Desk(house.folder, meanwhile=house.step)
    submit(house, "a")  # once more
    house.ask("a", "rollout", incarnation=2)
    assert house.heard("a") == [("grant", 2)]


def boxes(house: House) -> list[Path]:
    return list((house.folder / "mail").glob("*.letters"))
