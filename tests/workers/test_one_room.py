"""Processes and threads are started in `workers/`. What is started elsewhere stands here with its
reason, and the list may only shrink."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "rollpacker"
ROOM = "workers"
STARTS = {
    *("Popen", "create_subprocess_exec", "create_subprocess_shell", "posix_spawn"),
    *("fork", "forkpty", "ProcessPoolExecutor", "Thread"),
}
"""Names whose call starts a process or a thread, of whichever module."""
MULTIPROCESSING = "multiprocessing"

ELSEWHERE: dict[tuple[str, str], tuple[int, str]] = {
    # programs that must not import the package, or that are not one of ours
    ("sandbox/bwrap.py", "Popen"): (1, "bubblewrap, with the zygote in it, which has own frames"),
    ("sandbox/zygote.py", "fork"): (1, "in the sandbox: standard library only, one per program"),
    ("sandbox/selftest.py", "Popen"): (1, "a bystander that the sandbox must not be able to see"),
    ("sandbox/cgroup.py", "posix_spawn"): (1, "sleeps, to see whether a group may be entered"),
    ("sandbox/unsandboxed.py", "create_subprocess_exec"): (1, "a program without a sandbox"),
    ("cluster/service/keeper.py", "fork"): (1, "it must live on when whoever started it has ended"),
    ("cluster/service/keeper.py", "Popen"): (1, "a job of the cluster, any program of the user's"),
    ("sim/plan_workers.py", MULTIPROCESSING): (1, "simulations have no line: a value in, one out"),
    ("sim/plan_workers.py", "ProcessPoolExecutor"): (1, "the same"),
    ("cli/simulations.py", MULTIPROCESSING): (1, "simulations have no line: a value in, one out"),
    ("cli/simulations.py", "ProcessPoolExecutor"): (1, "the same"),
    ("engines/vllm/parallel.py", MULTIPROCESSING): (1, "waits for processes that vLLM starts"),
    # threads that compute or wait inside of one process, with no line to another
    ("engines/loop.py", "Thread"): (1, "the decode loop of an embedded engine"),
    ("engines/engine_worker.py", "Thread"): (
        2,
        "in an engine's process: its reports and calls",
    ),
    ("engines/vllm/parallel.py", "Thread"): (1, "waits for processes that vLLM starts"),
    ("pipeline/stages/executor.py", "Thread"): (1, "a sweep of a stage, beside the calls"),
    ("pipeline/links/host_receiver.py", "Thread"): (2, "tensors between stages"),
    ("pipeline/links/host_sender.py", "Thread"): (1, "tensors between stages"),
    ("pipeline/links/direct_link.py", "Thread"): (2, "tensors between stages"),
    ("environments/calls.py", "Thread"): (1, "in a process of environments: a blocking episode"),
    ("run/folder/event_log.py", "Thread"): (1, "writes the log beside the event loop"),
    ("run/ports/salvage.py", "Thread"): (1, "compares tokens beside the event loop"),
    ("run/ports/hand_over.py", "Thread"): (1, "makes an engine, which may block for minutes"),
    ("run/ports/held.py", "Thread"): (1, "closes an engine, which may block"),
    ("run/ports/waiting.py", "Thread"): (1, "a call that may block for ever, given up on"),
    ("trackers/sending.py", "Thread"): (1, "libraries of trackers block"),
    ("integrations/trl/policy.py", "Thread"): (1, "closes the engine where a loop runs already"),
    ("report/notebook.py", "Thread"): (1, "a notebook's display"),
    ("cli/log_progress.py", "Thread"): (1, "a progress line while the main thread computes"),
    ("run/driving.py", "Thread"): (1, "a run in a program that has an event loop already"),
    ("run/parts/hosts.py", "Thread"): (1, "watches ray"),
    ("cli/doctor.py", "Thread"): (1, "findings that may never come back"),
    ("run/parts/hub.py", "Thread"): (1, "a question to a server that may never answer"),
    ("cluster/seats/mailbox_seat.py", "Thread"): (1, "reads letters beside a job"),
    ("cluster/on_ray/warden.py", "Thread"): (1, "the contact of a warden with its run"),
    # gigabytes, which would hold up all lines of the room's loop
    ("weights/between_hosts/port.py", "Thread"): (2, "listens, and sends to each who asks"),
    ("weights/between_hosts/arriving.py", "Thread"): (1, "takes a version beside the calls"),
}
"""File and name: how often it is there, and why."""


def starts_in(source: str) -> Counter[str]:
    """The names of what a file starts, in a call or as the base of a class. Modules of
    `multiprocessing` count once, however often they are imported."""
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found[name] += name in STARTS
        elif isinstance(node, ast.ClassDef):
            for base in node.bases:
                name = getattr(base, "attr", getattr(base, "id", ""))
                found[name] += name in STARTS
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
            found[MULTIPROCESSING] |= any(m.split(".")[0] == MULTIPROCESSING for m in modules)
        elif isinstance(node, ast.ImportFrom):
            found[MULTIPROCESSING] |= (node.module or "").split(".")[0] == MULTIPROCESSING
    return +found


def test_processes_and_threads_are_started_in_one_room_or_with_a_reason() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name): number
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != ROOM
        for name, number in starts_in(path.read_text()).items()
    }
    listed = {where: number for where, (number, _) in ELSEWHERE.items()}
    new = {where: n for where, n in found.items() if n > listed.get(where, 0)}
    assert not new, f"these belong in {ROOM}/: {new}"
    gone = {where: found.get(where, 0) for where, n in listed.items() if n > found.get(where, 0)}
    assert not gone, f"the list may shrink to this: {gone}"


def test_the_check_finds_what_it_should() -> None:
    source = """
import multiprocessing.pool, threading, subprocess as s
from os import fork
def f(process: "s.Popen[bytes]"):
    "Popen(x) and Thread(y)"
    s.Popen(["x"])
    fork()
    threading.Thread(target=f).start()
    threading.Thread(target=f).start()
"""
    assert starts_in(source) == {"Popen": 1, "fork": 1, "Thread": 2, "multiprocessing": 1}
    assert starts_in("class Own(threading.Thread):\n    pass\n") == {"Thread": 1}
    assert not starts_in("import threading\nlock = threading.Lock()\n")
