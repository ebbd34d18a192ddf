"""Runs an attack in a box and says what got through."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rollpacker.sandbox.sandbox import Limits, RunResult, Sandbox, Status
from tests.sandbox.attacks.bait import Bait, resident_bytes
from tests.sandbox.attacks.record import OK, Attack

HONEST = "import json\nprint(json.dumps({'total': sum(range(1000))}))"
HONEST_PRINTS = b'{"total": 499500}\n'
SLACK_S = 1.0
"""Over a limit of time, on a machine that may be busy. The exact figure is a benchmark's."""
PROMPTLY_S = 4.0
INTERPRETER_BYTES = 32 << 20
"""Of what is seen from outside, memory that forks share with the interpreter they come from, and
the error of reading one process after the other."""
_MORE_TIME = (1, 3, 9)
STOOD_STILL = ("no processor", "did not answer within its limit", "had not begun")
"""In what a box says when the machine, and not the program, was too slow."""
_PROBE_BROKEN = (b"NameError", b"SyntaxError", b"AssertionError", b"ModuleNotFoundError")


@dataclass
class Found:
    """What was wrong with one attempt."""

    escapes: list[str] = field(default_factory=list)
    delays: list[str] = field(default_factory=list)
    """What a machine without a free processor brings about, too."""


class Runner(Protocol):
    """Programs, one at a time, from a thread without a loop."""

    def start(self, program: str, **more: Any) -> Future[RunResult]: ...


class Boxed:
    """A sandbox in a loop of its own, in a thread of its own."""

    def __init__(self, opening: Any, *, profile: str = "python") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._opening = opening
        self.profile = profile
        try:
            self.box: Sandbox = self.call(opening.__aenter__())
        except BaseException:
            self._end()
            raise

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, program: str, **more: Any) -> Future[RunResult]:
        run = self.box.run(program, profile=self.profile, **more)
        return asyncio.run_coroutine_threadsafe(run, self._loop)

    def close(self) -> None:
        self.call(self._opening.__aexit__(None, None, None))
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Bare:
    """No sandbox at all: a plain process that inherits everything. Only for attacks that are marked
    `bare`: a harness that does not see them escape here could not see it anywhere."""

    def __init__(self, bait: Bait) -> None:
        self._bait = bait

    def start(self, program: str, **more: Any) -> Future[RunResult]:
        done: Future[RunResult] = Future()
        done.set_result(self._run(program, **more))
        return done

    def _run(
        self, program: str, *, limits: Limits, stdin: Any = b"", files: Any = None
    ) -> RunResult:
        with tempfile.TemporaryDirectory(prefix="bare-") as folder:
            Path(folder, "main.py").write_text(program)
            process = subprocess.Popen(
                [sys.executable, "main.py"],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._bait.descriptor,),
                env={**os.environ, "HOME": str(self._bait.home)},
                start_new_session=True,
            )
            try:
                stdout, _ = process.communicate(timeout=1)
            except subprocess.TimeoutExpired:
                process.kill()
                return RunResult(status=Status.TIMEOUT, wall_s=1.0)
        status = Status.OK if process.returncode == 0 else Status.NONZERO
        return RunResult(status=status, exit_code=process.returncode, stdout=stdout)


def contained(attack: Attack, runner: Runner, bait: Bait, *, bare: bool = False) -> list[str]:
    """What got through; empty if the attack was contained.

    On a machine that stands still an attack runs out of time before it has tried anything. Nothing
    is shown by that, so it is made again with more time. What gets through once has got through."""
    for more in _MORE_TIME:
        limits = replace(attack.limits, wall_s=attack.limits.wall_s * more)
        found = _attempt(replace(attack, limits=limits), runner, bait, bare)
        if found.escapes or not found.delays:
            break
    if found.escapes:
        bait.repair()
    return found.escapes + found.delays


def _attempt(attack: Attack, runner: Runner, bait: Bait, bare: bool) -> Found:
    found = Found(_refused(attack, runner)) if attack.refused else _attacked(attack, runner, bait)
    found.escapes += bait.problems(patience_s=0.1 if bare else 3.0)
    if not bare:
        if attack.then is not None:
            limits = replace(attack.limits, wall_s=10.0)
            _afterwards(found, runner, attack.then, attack.then_prints, limits)
        _afterwards(found, runner, HONEST, HONEST_PRINTS, Limits(wall_s=10.0))
    return found


def _refused(attack: Attack, runner: Runner) -> list[str]:
    with contextlib.suppress(ValueError):
        runner.start(attack.program, files=attack.files, limits=attack.limits).result()
        return ["it was not refused"]
    return []


def _attacked(attack: Attack, runner: Runner, bait: Bait) -> Found:
    began = time.monotonic()
    running = runner.start(
        attack.text(bait.described()),
        stdin=attack.stdin,
        files=attack.files,
        limits=attack.limits,
    )
    most = 0
    while attack.memory and not running.done():
        most = max(most, resident_bytes(bait.marked()))
        time.sleep(0.01)
    result = running.result()
    took = time.monotonic() - began
    found = Found(_escapes_of(attack, result, bait))
    (found.delays if had_no_time(result) else found.escapes).extend(_undone_of(attack, result))
    if took > attack.limits.wall_s + SLACK_S:
        found.delays.append(f"it took {took:.2f} s, with a limit of {attack.limits.wall_s} s")
    if attack.memory:
        found.escapes += _of_memory(attack, result.peak_memory_bytes, most)
    return found


def had_no_time(result: RunResult) -> bool:
    """The program may have done what it was to do, had it had a processor for longer."""
    if result.status is Status.SANDBOX_ERROR:
        return any(words in result.detail for words in STOOD_STILL)
    return result.status is Status.TIMEOUT


def _of_memory(attack: Attack, reported: int, most: int) -> list[str]:
    allowed = 1.1 * attack.limits.memory_bytes
    seen = {"reported": reported, "seen from outside": most - INTERPRETER_BYTES}
    return [
        f"{size >> 20} MiB resident at its peak, {how}"
        for how, size in seen.items()
        if size > allowed
    ]


def problems_of(attack: Attack, result: RunResult, bait: Bait) -> list[str]:
    """What the result alone tells."""
    return _escapes_of(attack, result, bait) + _undone_of(attack, result)


def _escapes_of(attack: Attack, result: RunResult, bait: Bait) -> list[str]:
    problems = []
    output = result.stdout + result.stderr
    if bait.secret.encode() in output:
        problems.append("the secret came out")
    for line in result.stdout.splitlines():
        if line.startswith(b"ESCAPED"):
            problems.append(line.decode(errors="replace"))
    problems += [f"{text!r} came out" for text in attack.never if text in output]
    cap = attack.limits.output_bytes
    problems += [
        f"{len(it)} bytes were kept" for it in (result.stdout, result.stderr) if len(it) > cap
    ]
    return problems


def _undone_of(attack: Attack, result: RunResult) -> list[str]:
    """It did not end as it should, or did not come as far."""
    problems = []
    if result.status not in attack.statuses:
        problems.append(
            f"status {result.status.value} (exit {result.exit_code}, {result.detail}): "
            f"{result.stderr[-300:]!r}"
        )
    if not attack.raw:
        problems += _of_probe(attack, result)
    if attack.prints is not None and attack.prints not in result.stdout:
        problems.append(f"the probe did not print {attack.prints[:40]!r}")
    return problems


def _of_probe(attack: Attack, result: RunResult) -> list[str]:
    """A probe that did not do its work has shown nothing."""
    if b"started" not in result.stdout and result.status is not Status.OUTPUT:
        return [f"the probe did not start: {result.stderr[-300:]!r}"]
    if attack.statuses == OK and b"finished" not in result.stdout:
        return [f"the probe did not finish: {result.stderr[-300:]!r}"]
    if attack.raises:
        return []
    broken = [error for error in _PROBE_BROKEN if error in result.stderr]
    return [f"the probe is broken: {result.stderr[-300:]!r}"] if broken else []


def _afterwards(found: Found, runner: Runner, program: str, prints: bytes, limits: Limits) -> None:
    who = "an honest program" if program == HONEST else "the next program"
    began = time.monotonic()
    result = runner.start(program, limits=limits).result()
    took = time.monotonic() - began
    if result.status is not Status.OK or result.stdout != prints:
        (found.delays if had_no_time(result) else found.escapes).append(
            f"{who} then gave {result.status.value} {result.stdout[:200]!r} "
            f"{result.stderr[-200:]!r} {result.detail}"
        )
    elif took > PROMPTLY_S:
        found.delays.append(f"{who} then took {took:.1f} s")
