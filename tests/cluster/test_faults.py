"""Faults of every role while a run over three hosts trains, two at once and amid recovery included.

The hosts are network namespaces of this machine, each with a ray (`tests/cluster/netns.py`). The
run and a process of the trainer are on the first; the two others have an engine and a reward host
each, the last a process of the trainer besides. Struck are engines, processes of the trainer,
reward hosts and agents (killed, or stopped and let go on before or after they are given up), the
link of a host (cut for 5 to 60 s) and its raylet, whose ray is started again.

Each kind comes alone first, then in volleys of two to seven: at once, as soon as the log has the
loss before, or a moment later. No volley strikes one part more than twice: a third loss without a
committed step between is what ends a run. The next volley waits until all is there and steps were
committed. Measured of each fault: seconds until the run says that something is lost; of each
volley: seconds until all is there again and a step was committed, and how many of them were lost,
by the steps that the run would have made in them undisturbed.

In the end the run is interrupted, and resumed on this machine alone, where it trains on what was
deferred. Its log is read by `exactly_once.py`, which shares no code with RollPacker, and by the
replay; and how many prompts each step trained on is compared with a run that nobody disturbs.

`ROLLPACKER_NUMBER=200` in the environment strikes 200 faults, which take 20 minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from benchmarks.exactly_once import check
from benchmarks.resume import write_config, write_model
from rollpacker.report.log import EventLog
from rollpacker.run.replay import replay
from rollpacker.workers.child import state
from tests.cluster.netns import Network, why_impossible
from tests.number import number_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0
"""A wait of the test that lasts longer is a fault of RollPacker."""
HEARTBEAT_S = 5.0
IN_TIME_S = 2 * HEARTBEAT_S
"""Within which a loss is in the log."""
LEFT_S = 15.0
"""Within which nothing is left of what was lost."""
AT_MOST = 2
"""Faults of one part in a volley."""
UNDISTURBED_STEPS = 140
RETRY_S = 3
"""Of TCP on the hosts; see docs/cluster.md."""
OVERRIDES = (
    *("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "checkpoint.every_steps=5"),
    *("rollout.max_response_tokens=200", f"deadlines.heartbeat_s={HEARTBEAT_S:g}"),
)
OVER_HOSTS = (
    *("runtime=ray", "name=faults", "rewards_hosts.per_host=1"),
    *("placement.train.devices=0,5", "placement.rollout.devices=2,4"),
)
ON_ONE = ("runtime=local", "placement=null", "rewards_hosts=null", "train.processes=1")
REWARD = """
import os, pathlib

DONE = []

def vowels(completions, **columns):
    if not DONE:  # so that the benchmark sees that this worker judges
        DONE.append(pathlib.Path({folder!r}, str(os.getpid())).touch())
    found = [sum(c in "aeiou" for c in text) for text in completions]
    return [None if n == 7 else n / max(1, len(t)) for n, t in zip(found, completions)]
"""

WEIGHTS = {
    "kill engine": 4,
    "stop engine": 3,
    "kill rank": 2,
    "stop rank": 3,
    "kill reward host": 4,
    "stop reward host": 3,
    "kill agent": 2,
    "stop agent": 2,
    "cut host": 2,
    "kill raylet": 1,
}
"""How often each is drawn."""
PROCESSES = {
    "engine": "engine_worker",
    "rank": "trainer.worker",
    "reward host": "rewards.host_worker",
    "agent": "ray::Agent",
    "raylet": "raylet/raylet",
}
OF_HOST = {0: ("trainer",), 1: ("engine 0", "reward 0"), 2: ("engine 1", "reward 1", "trainer")}
"""What is lost with a host."""
SLOTS = ("trainer", "engine 0", "engine 1", "reward 0", "reward 1")
When = Literal["first", "at once", "noticed", "later"]
WHENS: tuple[When, ...] = ("at once", "noticed", "later")


@dataclass(kw_only=True)
class Fault:
    kind: str
    host: int
    when: When
    length_s: float = 0.0
    """How long a process is stopped, or a host cut off."""
    noticed_s: float | None = None
    """Until the run said that something of it is lost; None: it did not have to."""
    overlaps: bool = False
    """Something of it had been struck a moment before, and may have been lost already."""
    is_apart: bool = True
    """Nothing else of the volley struck any of it."""
    at_s: float = field(default=0.0, repr=False)
    """When, on the monotonic clock."""

    @property
    def slots(self) -> tuple[str, ...]:
        """What it may cost."""
        name = self.kind.partition(" ")[2]
        if name == "rank":
            return ("trainer",)
        if name in ("engine", "reward host"):
            return (f"{name.split()[0]} {self.host - 1}",)
        return OF_HOST[self.host]

    @property
    def must_be_noticed(self) -> bool:
        """Or may be over before anybody has to, or be part of another loss."""
        if self.overlaps or self.kind == "stop rank":  # which is waited for
            return False
        return not self.length_s or self.length_s > HEARTBEAT_S + 1.5


Volley = list[Fault]


def volleys(rng: random.Random, alone: int) -> Iterator[Volley]:
    """Each kind so many times alone, then others without end."""
    kinds = [kind for kind in WEIGHTS for _ in range(alone)]
    rng.shuffle(kinds)
    yield from ([_fault(rng, "first", kind)] for kind in kinds)
    while True:
        volley: Volley = []
        struck: Counter[str] = Counter()
        for number in range(rng.choices((2, 3, 4, 5, 6, 7), (1, 2, 3, 3, 3, 2))[0]):
            kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            fault = _fault(rng, rng.choice(WHENS) if number else "first", kind)
            if all(struck[slot] < AT_MOST for slot in fault.slots):
                struck.update(fault.slots)
                volley.append(fault)
        yield volley


def _fault(rng: random.Random, when: When, kind: str) -> Fault:
    host = rng.choice((0, 2)) if kind.endswith("rank") else rng.choice((1, 2))
    length_s = 0.0
    if kind.startswith("stop"):
        length_s = rng.choice((rng.uniform(0.5, 3.5), rng.uniform(6.5, 9.0)))
    elif kind == "cut host":
        low, high = rng.choices(((5.0, 9.0), (9.0, 20.0), (20.0, 60.0)), (8, 3, 2))[0]
        length_s = rng.uniform(low, high)
    return Fault(kind=kind, host=host, when=when, length_s=round(length_s, 1))


class Log:
    """What the run says, as it grows: its event log and its warnings."""

    def __init__(self, events: Path, output: Path) -> None:
        self._files = {events: 0, output: 0}
        self._events = events
        self.commits: list[float] = []
        """When each was seen, on the monotonic clock."""
        self.losses: list[tuple[float, str]] = []
        """When, and what."""
        self.reasons: list[str] = []
        self.away: set[str] = set()

    def read(self) -> None:
        for path in self._files:
            for line in self._new(path):
                if path == self._events:
                    self._event(line)
                elif "is lost and begins anew" in line:
                    self._lost(f"reward {line.partition('reward host ')[2][:1]}", line)

    def _new(self, path: Path) -> list[str]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._files[path])
            whole = file.read().rpartition(b"\n")[0]
        self._files[path] += len(whole) + bool(whole)
        return whole.decode(errors="replace").splitlines()

    def _event(self, line: str) -> None:
        if '"Committed"' not in line and "Lost" not in line and "Ready" not in line:
            return
        entry = json.loads(line)
        slot = "trainer" if "engine" not in entry else f"engine {entry['engine']}"
        match entry.get("event"):
            case "Committed":
                self.commits.append(time.monotonic())
            case "EngineLost" | "TrainerLost":
                self._lost(slot, entry["reason"])
            case "EngineReady" | "TrainerReady":
                self.away.discard(slot)

    def _lost(self, slot: str, why: str) -> None:
        self.losses.append((time.monotonic(), slot))
        self.reasons.append(f"{slot}: {why}")
        if not slot.startswith("reward"):
            self.away.add(slot)


class Chaos:
    """One run, and who strikes it."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.judged = folder / "judged"
        self.judged.mkdir()
        write_model(folder / "model")
        self.config = write_config(folder, 1_000_000)
        (folder / "reward.py").write_text(REWARD.format(folder=str(self.judged)))
        self.command = [sys.executable, "-m", "rollpacker.cli.main", "train", str(self.config)]
        self.output = folder / "output.txt"
        self.events = folder / "runs" / "faults" / "events.jsonl"
        self.log = Log(self.events, self.output)
        self.faults: list[Fault] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._cut: Counter[int] = Counter()
        self._rays: dict[int, threading.Thread] = {}
        self._looked_s = 0.0
        with self.output.open("w") as output:
            self.process = network.popen(
                0, [*self.command, *OVERRIDES, *OVER_HOSTS], cwd=ROOT, stdout=output, stderr=output
            )

    # -- waiting, while what was struck is let go again --------------------------------------------

    def turn(self) -> None:
        """See what is new, and undo what is due."""
        now = time.monotonic()
        due = [one for one in self._undo if one[0] <= now]
        self._undo = [one for one in self._undo if one[0] > now]
        for _, undo in due:
            undo()
        if now - self._looked_s > 0.5:
            self._looked_s = now
            self._start_rays()
        self.log.read()
        time.sleep(0.01)

    def wait(self, until: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
        limit = time.monotonic() + limit_s
        while not until():
            if (code := self.process.poll()) is not None or time.monotonic() > limit:
                text = self.output.read_text()[-6000:]
                sys.exit(f"{text}\n{what} ({code=}, away: {self.log.away})")
            self.turn()

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def commits(self, number: int) -> None:
        aim = len(self.log.commits) + number
        self.wait(lambda: len(self.log.commits) >= aim, "no step was committed")

    # -- what should be where ----------------------------------------------------------------------

    def is_whole(self) -> bool:
        """All is undone, nothing that was lost is away, and each reward host judges."""
        if self._undo or self.log.away or any(one.is_alive() for one in self._rays.values()):
            return False
        return all(self._judges(host) for host in (1, 2))

    def _judges(self, host: int) -> bool:
        hosts = set(self._pids("reward host", host))
        return any(hosts.intersection(_ancestors(int(one.name))) for one in self.judged.iterdir())

    def _pids(self, name: str, host: int) -> list[int]:
        found = self.network.named(host, PROCESSES[name])
        return [pid for pid in found if not _is_guardian(pid)]

    def is_tidy(self) -> bool:
        """Nothing is there twice."""
        counts = Counter({"engine": 2, "reward host": 2, "rank": 2, "agent": 2})
        found = Counter(
            {name: sum(len(self._pids(name, host)) for host in range(3)) for name in counts}
        )
        return found == counts

    # -- strikes -----------------------------------------------------------------------------------

    def volley(self, volley: Volley, rng: random.Random) -> dict[str, Any]:
        """Strike, and wait until all is made good."""
        self.pause(rng.uniform(0, 1.0))
        began, before = time.monotonic(), len(self.log.commits)
        struck = []
        for fault in volley:
            if fault.when == "noticed":
                before_it = struck[-1:]
                is_seen = any(one.must_be_noticed for one in before_it)
                last = time.monotonic() + (HEARTBEAT_S + 1.0 if is_seen else 1.0)
                while not self._seen(before_it) and time.monotonic() < last:
                    self.turn()
            elif fault.when == "later":
                self.pause(rng.uniform(0.3, 4.0))
            if self._strike(fault):
                fault.overlaps = any(set(fault.slots) & set(one.slots) for one in struck)
                struck.append(fault)
        last = time.monotonic() + IN_TIME_S
        while not self._all_noticed(struck) and time.monotonic() < last:
            self.turn()
        self.wait(self.is_whole, f"{volley} was not made good")
        self.commits(1)
        lasted_s = time.monotonic() - began
        num_commits = len(self.log.commits) - before
        for fault in struck:
            others = {slot for one in struck if one is not fault for slot in one.slots}
            fault.is_apart = others.isdisjoint(fault.slots)
            self._note(fault)
        self.wait(self.is_tidy, f"{volley}: something was left behind", LEFT_S)
        self.faults += struck
        return {
            "faults": [asdict(fault) for fault in struck],
            "back_s": round(lasted_s, 2),
            "commits": num_commits,
        }

    def _seen(self, struck: Volley) -> bool:
        return any(self._first_loss(fault) is not None for fault in struck)

    def _all_noticed(self, struck: Volley) -> bool:
        return all(self._first_loss(one) is not None for one in struck if one.must_be_noticed)

    def _first_loss(self, fault: Fault) -> float | None:
        for at_s, slot in self.log.losses:
            if at_s >= fault.at_s and slot in fault.slots:
                return at_s
        return None

    def _note(self, fault: Fault) -> None:
        at_s = self._first_loss(fault)
        fault.noticed_s = None if at_s is None else round(at_s - fault.at_s, 2)

    def _strike(self, fault: Fault) -> bool:
        """False: there was nothing to strike."""
        fault.at_s = time.monotonic()
        verb, _, name = fault.kind.partition(" ")
        until = fault.at_s + fault.length_s
        if verb == "cut":
            self._cut[fault.host] += 1
            self.network.cut(fault.host)
            self._undo.append((until, lambda: self._mend(fault.host)))
            return True
        pids = self._pids(name, fault.host)
        if verb == "stop":  # who let go of one that is stopped already would let go of it early
            pids = [pid for pid in pids if state(pid) != "T"]
        for pid in pids:
            os.kill(pid, signal.SIGKILL if verb == "kill" else signal.SIGSTOP)
        if verb == "stop":
            self._undo.append((until, lambda: _go_on(pids)))
        return bool(pids)

    def _mend(self, host: int) -> None:
        self._cut[host] -= 1
        if not self._cut[host]:
            self.network.mend(host)

    def _start_rays(self) -> None:
        """Start ray again where its raylet is gone, as whoever runs a cluster does."""
        for host in (1, 2):
            old = self._rays.get(host)
            if self._cut[host] or (old is not None and old.is_alive()):
                continue
            if not self._pids("raylet", host):
                self._rays[host] = threading.Thread(target=self._restart_ray, args=(host,))
                self._rays[host].start()

    def _restart_ray(self, host: int) -> None:
        self.network.kill_all(host)
        self.network.start_ray([host])

    def finish(self) -> None:
        """Interrupt the run, and let it end on this machine."""
        for pid in self.network.named(0, "rollpacker.cli.main"):
            if b"ip\0netns" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGINT)
        self.process.wait(120)
        self.log.read()
        steps = len(self.log.commits) + 2
        subprocess.run(
            [*self.command, *OVERRIDES, *OVER_HOSTS, *ON_ONE, f"train.steps={steps}", "--resume"],
            cwd=ROOT,
            check=True,
            timeout=600,
            stdout=subprocess.DEVNULL,
        )

    def undisturbed(self, steps: int) -> Path:
        """The log of a run that nobody strikes."""
        subprocess.run(
            [*self.command, *OVERRIDES, "name=undisturbed", f"train.steps={steps}"],
            cwd=ROOT,
            check=True,
            timeout=600,
            stdout=subprocess.DEVNULL,
        )
        return self.events.parents[1] / "undisturbed" / "events.jsonl"


def _is_guardian(pid: int) -> bool:
    try:
        return b"guardian" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # gone


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        pid = int(status.partition("PPid:")[2].split()[0])
        yield pid


def _go_on(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def prompts_by_step(log: Path) -> dict[int, int]:
    """How many prompts each step trained on."""
    found = {}
    for line in log.read_text().splitlines():
        if '"TrainOn"' in line:
            for command in json.loads(line)["commands"]:
                if command["command"] == "TrainOn":
                    found[command["step"]] = len(command["groups"])
    return found


def seconds_per_step(commits: list[float]) -> float:
    """Of these steps, one after the other."""
    return (commits[-1] - commits[0]) / (len(commits) - 1)


def tables(faults: list[Fault], rounds: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Of each kind, and of volleys of each size."""
    by_kind: dict[str, Any] = {}
    for kind in WEIGHTS:
        of_kind = [fault for fault in faults if fault.kind == kind]
        noticed = [
            fault.noticed_s for fault in of_kind if fault.is_apart and fault.noticed_s is not None
        ]
        alone = [
            one for one in rounds if len(one["faults"]) == 1 and one["faults"][0]["kind"] == kind
        ]
        by_kind[kind] = {
            "faults": len(of_kind),
            "length_s_max": max((fault.length_s for fault in of_kind), default=0.0),
            "apart": sum(fault.is_apart for fault in of_kind),
            "noticed": len(noticed),
            "noticed_s_median": round(statistics.median(noticed), 2) if noticed else None,
            "noticed_s_max": max(noticed, default=None),
            "alone": _costs(alone, step_s),
        }
    by_size = {
        size: _costs([one for one in rounds if len(one["faults"]) == size], step_s)
        for size in sorted({len(one["faults"]) for one in rounds})
    }
    whens = Counter(fault.when for fault in faults)
    return {"by_kind": by_kind, "by_faults_of_volley": by_size, "whens": dict(whens)}


def _costs(rounds: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    if not rounds:
        return {"volleys": 0}
    back = [one["back_s"] for one in rounds]
    lost = [max(one["back_s"] - one["commits"] * step_s, 0.0) for one in rounds]
    return {
        "volleys": len(rounds),
        "back_s_mean": round(statistics.mean(back), 1),
        "back_s_max": max(back),
        "lost_s_mean": round(statistics.mean(lost), 1),
    }


def judged(chaos: Chaos) -> dict[str, Any]:
    """What the log says, and what it would have said of a run that nobody struck."""
    checked = check(chaos.events)
    problems = checked["problems"]
    problems += [
        f"{fault} was not noticed in time"
        for fault in chaos.faults
        if fault.must_be_noticed and (fault.noticed_s is None or fault.noticed_s > IN_TIME_S)
    ]
    trained = prompts_by_step(chaos.events)
    alone = prompts_by_step(chaos.undisturbed(min(len(trained), UNDISTURBED_STEPS)))
    last = max(alone) - 1
    return {
        **{one: checked[one] for one in ("steps", "fetched", "trained", "dropped", "engines")},
        "trainer": checked["trainer"],
        "rewards": {"lost": sum(slot.startswith("reward") for _, slot in chaos.log.losses)},
        "other_prompts_at_steps": [
            step for step in range(1, last + 1) if trained.get(step) != alone.get(step)
        ],
        "problems": problems,
    }


@pytest.mark.skipif("ROLLPACKER_TEST_CLUSTER" not in os.environ, reason="make test-cluster runs it")
@pytest.mark.timeout(3600)
def test_a_run_over_hosts_outlives_what_is_struck(tmp_path: Path) -> None:
    """Every loss is noticed in time, and each step trains on what it trains on undisturbed."""
    if why := why_impossible():
        pytest.fail(why)
    number = number_of(6)
    plan, moments = random.Random(0), random.Random(0)
    rounds: list[dict[str, Any]] = []
    with Network(3, cores=2, retry_s=RETRY_S) as network:
        network.start_ray()
        chaos = Chaos(network, tmp_path)
        try:
            chaos.commits(40)
            step_s = seconds_per_step(chaos.log.commits[10:])
            for volley in volleys(plan, int(number > len(WEIGHTS))):
                if len(chaos.faults) >= number:
                    break
                rounds.append(chaos.volley(volley, moments))
                print(json.dumps(rounds[-1]), flush=True)
                chaos.commits(2)
            chaos.finish()
            found = {
                "faults": len(chaos.faults),
                "undisturbed_step_s": round(step_s, 3),
                **tables(chaos.faults, rounds, step_s),
                **judged(chaos),
                "replay_difference": replay(EventLog(chaos.events)).difference,
            }
        finally:
            network.kill_all(0)
    print(json.dumps(found, indent=1))
    assert not found["problems"] and not found["other_prompts_at_steps"], found
    assert found["replay_difference"] is None, found
