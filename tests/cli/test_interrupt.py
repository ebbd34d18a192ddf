"""An interrupt ends a run after its step, saved, wherever it was called from: a real notebook
kernel, a script, a thread."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollpacker
from benchmarks.resume import write_config, write_model

jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
STEPS = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupt")
    write_model(folder / "model")
    write_config(folder, steps=STEPS)
    return folder


def call(folder: Path, name: str, *arguments: str) -> str:
    """The call of `train`, as a cell has it; a checkpoint only where the run ends."""
    overrides = [f"name={name}", "checkpoint.every_steps=1000000", "save_samples=false"]
    extra = "".join(f", {argument}" for argument in arguments)
    return f"rollpacker.train({str(folder / 'run.yaml')!r}, {overrides!r}{extra})"


def steps_of(folder: Path, name: str) -> list[int]:
    path = folder / "runs" / name / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def wait_for_steps(folder: Path, name: str, count: int) -> None:
    until = time.monotonic() + 120
    while len(steps_of(folder, name)) < count:
        assert time.monotonic() < until, "the run takes no steps"
        time.sleep(0.05)


def is_resumable(folder: Path, name: str) -> bool:
    """It is the same run that goes on, and nobody holds its folder."""
    before = steps_of(folder, name)
    run = rollpacker.train(
        folder / "run.yaml",
        [f"name={name}", f"train.steps={before[-1] + 2}", "save_samples=false"],
        resume=True,
    )
    steps = steps_of(folder, name)
    return run.reason == "every step is done" and steps[: len(before)] == before


class Kernel:
    """A real one, in which cells are run."""

    def __init__(self) -> None:
        self.manager = jupyter_client.KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(ROOT), env={**os.environ, "PYTHONPATH": str(ROOT)})
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def begin(self, code: str) -> str:
        return self.client.execute(code)

    def wait_for(self, cell: str, said: str) -> None:
        """Until it has printed this."""
        printed, until = "", time.monotonic() + 120
        while said not in printed:
            message = self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic()))
            if message["parent_header"].get("msg_id") == cell and message["msg_type"] == "stream":
                printed += message["content"]["text"]

    def end_of(self, cell: str, timeout_s: float = 120.0) -> tuple[str, str]:
        """Its status (ok, or the error's name) and what it printed, a traceback with it."""
        printed, status, until = "", None, time.monotonic() + timeout_s
        while True:
            message = self.client.get_iopub_msg(timeout=max(0.1, until - time.monotonic()))
            if message["parent_header"].get("msg_id") != cell:
                continue
            content: dict[str, Any] = message["content"]
            if message["msg_type"] == "stream":
                printed += content["text"]
            elif message["msg_type"] == "error":
                status = content["ename"]
                printed += re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return status or "ok", printed

    def run(self, code: str) -> tuple[str, str]:
        return self.end_of(self.begin(code))

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    try:
        assert kernel.run("import rollpacker, os; print(os.getpid())")[0] == "ok"
        yield kernel
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("awaited", [False, True], ids=["plain cell", "cell that awaits"])
def test_an_interrupted_cell_returns_the_run(folder: Path, kernel: Kernel, awaited: bool) -> None:
    name = f"cell-{awaited}"
    code = f"run = {call(folder, name)}\nprint(run.reason, run.summary['steps']['total'])"
    if awaited:
        code = "import asyncio\nawait asyncio.sleep(0)\n" + code
    cell = kernel.begin(code)
    wait_for_steps(folder, name, 3)
    kernel.interrupt()
    status, printed = kernel.end_of(cell)
    assert status == "ok", printed
    assert "Finishing this step, then saving" in printed
    reason, num_steps = printed.split()[-2:]
    assert reason == "interrupted" and int(num_steps) == steps_of(folder, name)[-1] < STEPS
    assert is_resumable(folder, name)


def test_a_mistake_is_one_message_in_a_cell(folder: Path, kernel: Kernel) -> None:
    """And somebody else's code keeps its traceback."""
    status, printed = kernel.run(call(folder, "mistaken").replace("name=", "nam="))
    assert status == "ConfigError" and len(printed.splitlines()) < 4, printed
    assert 'Did you mean "name"' in printed
    status, printed = kernel.run("rollpacker.train({}, reward_funcs=len)")
    assert status == "TypeError" and len(printed.splitlines()) < 3, printed
    assert "here it is rewards" in printed
    code = "class Raises(rollpacker.Callback):\n  def on_start(self, run): return 1 / 0\n"
    status, printed = kernel.run(code + call(folder, "raised", "callbacks=[Raises()]"))
    assert status == "CallbackError" and "return 1 / 0" in printed


def test_a_cell_shows_progress_in_one_output_that_changes(folder: Path, kernel: Kernel) -> None:
    name = "shown"
    code = "class Stops(rollpacker.Callback):\n  def on_step(self, run, step, metrics):\n"
    code += (
        "    import time; time.sleep(0.4)\n    print('told', step)\n    step == 8 and run.stop()\n"
    )
    cell = kernel.begin(code + call(folder, name, "callbacks=[Stops()]"))
    began = time.monotonic()
    pages, shown, printed, result = [], set(), "", {}
    while True:
        message = kernel.client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != cell:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind in ("display_data", "update_display_data"):
            shown.add((kind, content["transient"]["display_id"]))
            pages.append(content["data"]["text/html"])
        elif kind == "stream":
            printed += content["text"]
        elif kind == "execute_result":
            result = content["data"]
        elif kind == "status" and content["execution_state"] == "idle":
            break
    assert len({display for _, display in shown}) == 1 and len(shown) == 2
    assert 3 <= len(pages) <= time.monotonic() - began + 2  # at most one a second
    assert "shown" in pages[0] and "loading" in pages[0]
    assert f"step 8/{STEPS}" in pages[-1] and "reward" in pages[-1] and "left" not in pages[-1]
    told = [line for line in printed.splitlines() if line.startswith("told")]
    assert told == [f"told {step}" for step in range(1, 9)]
    assert "a callback asked for it" in result["text/plain"]
    assert "<table>" in result["text/html"]


def test_a_second_interrupt_ends_the_cell_and_leaves_the_kernel(
    folder: Path, kernel: Kernel
) -> None:
    """A reward that takes long keeps the step from ending, so that the second one counts."""
    (folder / "slow.py").write_text(
        "import pathlib, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "def slow(completions, **columns):\n"
        "    while (folder / 'hold').exists():\n"
        "        (folder / 'held').touch()\n"
        "        time.sleep(0.05)\n"
        "    return [float(len(text)) for text in completions]\n"
    )
    config = json.loads((folder / "run.yaml").read_text())
    config |= {"rewards": [{"function": f"{folder / 'slow.py'}:slow"}], "name": "twice"}
    config |= {"checkpoint": {"every_steps": 1}}
    (folder / "slow.yaml").write_text(json.dumps(config))
    pid = kernel.run("print(os.getpid())")[1].strip()
    cell = kernel.begin(f"rollpacker.train({str(folder / 'slow.yaml')!r})")
    wait_for_steps(folder, "twice", 2)
    (folder / "hold").touch()
    until = time.monotonic() + 120
    while not (folder / "held").exists():  # the step at hand may have had its rewards before
        assert time.monotonic() < until, "no step asks for a reward"
        time.sleep(0.05)
    kernel.interrupt()
    kernel.wait_for(cell, "Finishing this step")  # two signals at once may be one
    began = time.monotonic()
    kernel.interrupt()
    status, printed = kernel.end_of(cell)
    assert status == "KeyboardInterrupt" and "Traceback" not in printed, printed
    assert printed.splitlines()[-1] == "KeyboardInterrupt: interrupted"
    assert time.monotonic() - began < 60
    assert kernel.run("print(os.getpid())") == ("ok", f"{pid}\n")
    (folder / "hold").unlink()
    before = steps_of(folder, "twice")[-1]
    again = rollpacker.train(folder / "slow.yaml", [f"train.steps={before + 1}"], resume=True)
    assert again.reason == "every step is done"


def test_an_interrupt_while_a_run_starts_is_one_message(folder: Path, kernel: Kernel) -> None:
    (folder / "asleep.py").write_text(
        "import pathlib, time\n"
        f"pathlib.Path({str(folder / 'asleep')!r}).touch()\n"
        "time.sleep(60)\n"
        "def asleep(completions, **columns):\n    return [0.0] * len(completions)\n"
    )
    rewards = f"rewards=[{str(folder / 'asleep.py') + ':asleep'!r}]"
    cell = kernel.begin(call(folder, "starting", rewards))
    until = time.monotonic() + 120
    while not (folder / "asleep").exists():
        assert time.monotonic() < until, "the reward worker does not start"
        time.sleep(0.05)
    kernel.interrupt()
    status, printed = kernel.end_of(cell)
    assert status == "KeyboardInterrupt" and "Traceback" not in printed, printed
    assert printed.splitlines()[-1].startswith("KeyboardInterrupt"), printed


def test_a_cell_after_an_interrupted_one_is_interrupted_as_ever(kernel: Kernel) -> None:
    cell = kernel.begin("import time\nprint('x', flush=True)\ntime.sleep(60)")
    kernel.wait_for(cell, "x")
    kernel.interrupt()
    assert kernel.end_of(cell)[0] == "KeyboardInterrupt"


SCRIPT = """
import sys
import rollpacker
run = {call}
print(run.reason, flush=True)
"""


def test_a_script_gets_the_run_and_a_second_interrupt_raises(folder: Path) -> None:
    for name, num_interrupts in [("script", 1), ("script-twice", 2)]:
        code = SCRIPT.format(call=call(folder, name))
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_for_steps(folder, name, 3)
            for _ in range(num_interrupts):
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
        if num_interrupts == 1:
            assert (process.returncode, out) == (0, "interrupted\n"), err
            assert "Finishing this step, then saving" in err
        else:
            assert out == "interrupted\n" or "KeyboardInterrupt" in err, (out, err)
    assert is_resumable(folder, "script")


def test_it_trains_in_a_thread_and_leaves_signals_and_lock_alone(folder: Path) -> None:
    handler, interval = signal.getsignal(signal.SIGINT), sys.getswitchinterval()
    runs: list[Any] = []
    thread = threading.Thread(
        target=lambda: runs.append(
            rollpacker.train(
                folder / "run.yaml", ["name=thread", "train.steps=2", "save_samples=false"]
            )
        )
    )
    thread.start()
    thread.join(120)
    assert [run.reason for run in runs] == ["every step is done"]
    assert signal.getsignal(signal.SIGINT) is handler
    assert sys.getswitchinterval() == interval
