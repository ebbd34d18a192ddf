"""Every attack of the corpus in every sandbox that this machine has: contained, or named here.

The corpus runs once per sandbox, on two boxes at a time; each attack is a test of its own. With
ROLLPACKER_FULL=1 all of it runs in all of them; otherwise all of it in the default one, and in the
others the classes for which they differ.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue

import pytest

from rollpacker.sandbox import open_sandbox
from tests.sandbox.attacks import ATTACKS, CLASSES, Attack
from tests.sandbox.attacks.bait import laid_out
from tests.sandbox.attacks.harness import Bare, Boxed, contained, had_no_time

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandboxes here are Linux's")

BOXES = 2
SANDBOXES: dict[str, tuple[str, ...]] = {
    "bwrap python": tuple(CLASSES),
    "bwrap cold": ("secrets", "processes", "kernel"),
    "bwrap without cgroup": ("processes",),
}
"""Name (backend, profile or lack), classes that always run in it."""
FULL = os.environ.get("ROLLPACKER_FULL") == "1"
CASES = [
    (sandbox, attack)
    for sandbox, classes in SANDBOXES.items()
    for kind, attacks in CLASSES.items()
    if FULL or kind in classes
    for attack in attacks
]


def _ids(case: tuple[str, Attack]) -> str:
    return f"{case[0]}: {case[1].name}".encode("ascii", "backslashreplace").decode()


def _missing() -> str | None:
    """Why no sandbox can run here at all. One that runs and does not contain is a failure."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "the program bwrap (package bubblewrap) is not installed"
    command = [bwrap, "--unshare-all", "--ro-bind", "/", "/", "/bin/true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return f"bwrap does not work: {done.stderr.strip()}" if done.returncode else None


MISSING = _missing() if sys.platform == "linux" else None


class Corpus:
    """What came of each attack in each sandbox; a sandbox's are run when the first is asked for."""

    def __init__(self, wanted: list[tuple[str, Attack]]) -> None:
        self._wanted = wanted
        self._results: dict[tuple[str, str], list[str]] = {}

    def problems(self, sandbox: str, attack: Attack) -> list[str]:
        if MISSING:
            pytest.skip(MISSING)
        if (sandbox, attack.name) not in self._results:
            self._run(sandbox)
        return self._results[sandbox, attack.name]

    def counts(self) -> Iterator[str]:
        for sandbox in SANDBOXES:
            found = [problems for (name, _), problems in self._results.items() if name == sandbox]
            if found:
                good = sum(not problems for problems in found)
                yield f"{sandbox}: {good} of {len(found)} attacks contained"
            elif MISSING:
                yield f"{sandbox}: NOT TESTED. {MISSING}"

    def _run(self, sandbox: str) -> None:
        waiting: SimpleQueue[Attack] = SimpleQueue()
        for name, attack in self._wanted:
            if name == sandbox:
                waiting.put(attack)
        with ThreadPoolExecutor(BOXES) as threads:
            for done in [threads.submit(self._work, sandbox, waiting) for _ in range(BOXES)]:
                done.result()

    def _work(self, sandbox: str, waiting: SimpleQueue[Attack]) -> None:
        with laid_out() as bait:
            profile = "cold" if sandbox.endswith("cold") else "python"
            box = Boxed(open_sandbox("bwrap", workers=1), profile=profile)
            try:
                while True:
                    attack = waiting.get_nowait()
                    self._results[sandbox, attack.name] = contained(attack, box, bait)
            except Empty:
                pass
            finally:
                box.close()


@pytest.fixture(scope="module")
def corpus(request: pytest.FixtureRequest) -> Iterator[Corpus]:
    """Runs what was collected, and says how many were contained."""
    own = [i for i in request.session.items if getattr(i, "function", None) is test_contained]
    corpus = Corpus([item.callspec.params["case"] for item in own])
    yield corpus
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for line in corpus.counts():
            print(f"\n{line}", end="", flush=True)


@pytest.fixture(autouse=True)
def _cgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose cgroups are not ours to use, for the sandbox of that name."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is not None and "without cgroup" in callspec.params.get("case", ("",))[0]:
        monkeypatch.setattr("rollpacker.sandbox.cgroup.find_place", lambda: None)


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_contained(case: tuple[str, Attack], corpus: Corpus) -> None:
    sandbox, attack = case
    problems = corpus.problems(sandbox, attack)
    assert not problems, f"{attack.name} ({attack.escape}): " + "; ".join(problems)


BESIDE = (
    "fork bomb",
    "thread bomb",
    "memory: many small blocks",
    "output: one line",
    "time: threads",
)


@pytest.mark.skipif(MISSING is not None, reason=f"NOT TESTED: {MISSING}")
def test_honest_programs_beside_attacks() -> None:
    """While one worker of a box is attacked, what the other runs comes out right."""
    attacks = [attack for attack in ATTACKS if attack.name in BESIDE]
    assert len(attacks) == len(BESIDE)
    with laid_out() as bait:
        boxed = Boxed(open_sandbox("bwrap", workers=2))
        try:
            for attack in attacks:
                running = boxed.start(attack.text(bait.described()), limits=attack.limits)
                patient = replace(attack.limits, wall_s=10.0)
                for number in range(5):
                    honest = boxed.start(f"print(sum(range({number})))", limits=patient).result()
                    expected = f"{sum(range(number))}\n".encode()
                    assert honest.stdout == expected, f"{attack.name}: {honest}"
                result = running.result()
                assert result.status in attack.statuses or had_no_time(result), attack.name
        finally:
            boxed.close()


def test_the_corpus_is_as_large_as_is_said() -> None:
    assert len(ATTACKS) >= 120


@pytest.mark.parametrize("attack", [it for it in ATTACKS if it.bare], ids=lambda it: it.name)
def test_without_a_sandbox_the_harness_sees_the_escape(attack: Attack) -> None:
    """The positive control: the harmless part of the corpus, with no sandbox around it."""
    with laid_out() as bait:
        assert contained(attack, Bare(bait), bait, bare=True)
