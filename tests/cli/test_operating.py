"""What those who run it do: restart the same command, close the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollpacker.run.folder.run_folder import (
    RESUME_MAY_DIFFER,
    RESUME_MAY_GROW,
    RESUME_MUST_KEEP,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks.resume import write_config, write_model

    folder = tmp_path_factory.mktemp("operating")
    write_model(folder / "model")
    write_config(folder, 400)
    return folder


def _as_a_terminal_has_them() -> None:
    """Whoever runs the tests may ignore them (nohup, a job in the background), and children would
    too."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def start(folder: Path, name: str, *words: str, hup: bool = True) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollpacker.cli.main", "train", str(folder / "run.yaml")]
    if not hup:
        command = ["nohup", *command]
    return subprocess.Popen(
        [*command, f"name={name}", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        preexec_fn=_as_a_terminal_has_them,
    )


def steps(folder: Path, name: str) -> int:
    path = folder / "runs" / name / "metrics.jsonl"
    rows = path.read_text().splitlines() if path.exists() else []
    return len([row for row in rows if row.endswith("}")])


def wait_for_steps(folder: Path, name: str, num: int, run: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while steps(folder, name) < num:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_closed_terminal_saves_and_the_same_command_goes_on(folder: Path) -> None:
    run = start(folder, "auto", "--resume=auto")
    wait_for_steps(folder, "auto", 2, run)
    run.send_signal(signal.SIGHUP)
    shown, said = run.communicate(timeout=120)
    assert run.returncode == 130, said
    first, *_, last = [line for line in shown.splitlines() if line][:4]
    assert first.startswith(f"auto: {folder}/model, 40 rows of {folder}/rows.jsonl, rewards ")
    assert re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d \| step \d+/400 ", last)
    assert "The same command goes on from here" in said
    done = steps(folder, "auto")
    assert f"\nStep {done} is saved; writing the reports.\n" in said
    again = start(folder, "auto", f"train.steps={done + 2}", "--resume=auto")
    shown, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert f"\nresuming after step {done} (checkpoints/step_{done:06d})\n" in shown
    assert re.findall(r"\| step (\d+)/\d+ \|", shown) == [str(done + 1), str(done + 2)]
    assert "evaluation after step 0" not in shown
    rows = (folder / "runs" / "auto" / "metrics.jsonl").read_text().splitlines()
    numbers = [json.loads(row)["step"] for row in rows]
    assert numbers[: done + 2] == list(range(1, done + 3))


def test_on_a_terminal_the_panel_stays_in_place_and_what_rewards_print_is_above_it(
    folder: Path,
) -> None:
    """A run whose last step empties the queue, and whose reward prints an escape sequence."""
    printing = folder / "printing.py"
    printing.write_text(
        "def f(completions):\n    print('seen\\x1b[2J')\n    return [1.0] * len(completions)\n"
    )
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollpacker.cli.main", "train", str(folder / "run.yaml")]
    words = ["name=terminal", "train.steps=12", f"rewards.0.function={printing}:f"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    run = subprocess.Popen(
        [*command, *words], cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 1 << 16):
            shown += piece
    assert run.wait(timeout=120) == 0
    text = shown.decode()
    assert "reward f: seen\\x1b[2J" in text and "\x1b[2J" not in text
    assert "step 12/12 + 1" in text and "step 13/12" not in text
    assert "deferred" in text and "where the seconds went" in text


_FIRST_LINE = """
import io, sys, time
class Out(io.TextIOBase):
    encoding = "utf-8"
    def write(self, text):
        heavy = sorted({"torch", "transformers", "pyarrow"} & sys.modules.keys())
        sys.__stdout__.write(f"{time.time()} {heavy} {text}")
        sys.__stdout__.flush()
        import os
        os._exit(0)
sys.stdout = Out()
from rollpacker.cli.main import main
main(["train", sys.argv[1], "name=first-line"])
"""


def test_the_first_line_comes_before_anything_is_loaded(folder: Path) -> None:
    """Within two seconds where nothing else runs; a busy machine gets more."""
    taken = []
    for _ in range(3):
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_LINE, folder / "run.yaml"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stdout, done.stderr
        time_s, line = done.stdout.split(" ", 1)
        taken.append(float(time_s) - began)
    assert min(taken) < 6, taken
    reward, into = f"{folder}/reward.py:vowels", f"{folder}/runs/first-line"
    rows = f"40 rows of {folder}/rows.jsonl"
    assert (
        line.rstrip("\n") == f"[] first-line: {folder}/model, {rows}, rewards {reward}, into {into}"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 2.5])
def test_what_ends_a_start_says_so(folder: Path, number: signal.Signals, after_s: float) -> None:
    """It died of the signal, without a word."""
    name = f"start-{number.name}-{after_s:g}"
    run = start(folder, name)
    assert run.stdout is not None and run.stdout.readline()  # the first line
    time.sleep(after_s)
    run.send_signal(number)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 130, said
    if "Finishing this step" not in said:  # it had begun: a fast machine
        line = "rollpacker: interrupted before the first step; the same command starts again"
        assert said.splitlines()[-1] == line and "Traceback" not in said, said
        assert not (folder / "runs" / name).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_ends_the_imports_says_so(folder: Path, number: signal.Signals) -> None:
    """SIGINT was a traceback, the others ended it without a word. The signal is sent by the first
    of our modules that is not needed to heed it."""
    (folder / "sends").mkdir(exist_ok=True)
    (folder / "sends" / "difflib.py").write_text(
        f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(600)\n"
    )
    for module in ("rollpacker", "rollpacker.cli.main"):
        ended = subprocess.run(
            [sys.executable, "-m", module, "train", str(folder / "run.yaml"), "name=early"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{folder / 'sends'}:{ROOT}"},
            capture_output=True,
            text=True,
            preexec_fn=_as_a_terminal_has_them,
            timeout=200,
        )
        line = "rollpacker: interrupted before it began; the same command starts again\n"
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", line)
    assert not (folder / "runs" / "early").exists()


_SWALLOWS = """
import contextlib, os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and "name=swallowed" in sys.argv:
            with contextlib.suppress(BaseException):
                os.kill(os.getpid(), NUMBER)
                for _ in range(1000):  # until Python looks
                    pass
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_an_interrupt_that_a_library_catches_is_not_lost(
    folder: Path, number: signal.Signals
) -> None:
    """The run went on to its end."""
    (folder / "swallows").mkdir(exist_ok=True)
    code = _SWALLOWS.replace("NUMBER", str(int(number)))
    (folder / "swallows" / "sitecustomize.py").write_text(code)
    words = ["-m", "rollpacker", "train", str(folder / "run.yaml"), "name=swallowed"]
    ended = subprocess.run(
        [sys.executable, *words, "train.steps=1"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'swallows'}:{ROOT}"},
        capture_output=True,
        text=True,
        preexec_fn=_as_a_terminal_has_them,
        timeout=200,
    )
    line = "rollpacker: interrupted before the first step; the same command starts again"
    assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (130, [line]), ended.stderr
    assert not (folder / "runs" / "swallowed").exists()


def test_signals_are_heeded_by_the_command_alone() -> None:
    """A program that imports it keeps its own, and other verbs than train end at once."""
    code = (
        "import signal, sys\n"
        "from rollpacker.cli.main import entry, main\n"
        "from rollpacker.cli import doctor\n"
        "from rollpacker.run import interrupts\n"
        "both = [signal.SIGTERM, signal.SIGHUP]\n"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "assert all(signal.getsignal(n) == signal.SIG_DFL for n in both)\n"
        "doctor.run = lambda args: print(*map(signal.getsignal, both)) or 0\n"
        "sys.argv = ['rollpacker', 'doctor']\n"
        "entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        preexec_fn=_as_a_terminal_has_them,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0\n", "")  # SIG_DFL


def test_an_interrupt_of_generated_code_ends_with_the_same_code(tmp_path: Path) -> None:
    """As while an import makes its dataclasses: with `-m`, Python ended by SIGINT afterwards."""
    (tmp_path / "interrupted.py").write_text(
        "from rollpacker.cli import doctor\n"
        "from rollpacker.cli.main import entry\n"
        "doctor.run = lambda args: exec('raise KeyboardInterrupt')\n"
        "entry()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "interrupted", "doctor"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 130 and "interrupted" in ended.stderr


def test_an_interrupt_while_the_parts_are_opened_leaves_no_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rollpacker
    from rollpacker.run.session import RunSession

    def interrupted(*_: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunSession, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rollpacker.train(folder / "run.yaml", ["name=opened"])
    assert not (folder / "runs" / "opened").exists()


def test_verbose_shows_what_is_done(folder: Path) -> None:
    said = []
    for verbose in ([], ["--verbose"]):
        run = start(folder, f"v{len(verbose)}", "train.steps=1", "train.threads=auto", *verbose)
        said.append(run.communicate(timeout=120)[1])
        assert run.returncode == 0, said[-1]
    measured = "torch threads (measured; set train.threads to choose)"
    assert measured not in said[0] and measured in said[1]


def test_under_nohup_a_closed_terminal_is_nothing(folder: Path) -> None:
    run = start(folder, "nohup", hup=False)
    wait_for_steps(folder, "nohup", 2, run)
    run.send_signal(signal.SIGHUP)
    wait_for_steps(folder, "nohup", steps(folder, "nohup") + 3, run)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=120)
    assert run.returncode == 130


def test_a_beginning_of_another_run_is_not_thrown_away(folder: Path) -> None:
    other = folder / "runs" / "other"
    other.mkdir(parents=True)
    (other / "config.yaml").write_text("seed: 5\nname: other\n")
    run = start(folder, "other", "--resume=auto")
    _, said = run.communicate(timeout=120)
    assert run.returncode == 2 and "not the run that was started" in said
    assert (other / "config.yaml").read_text() == "seed: 5\nname: other\n"


def test_the_page_says_which_keys_a_resume_refuses() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    begin, end = "<!-- resume keys: begin -->\n", "<!-- resume keys: end -->"
    table = page.partition(begin)[2].partition(end)[0]
    rows = [f"| `{key}` | refused |\n" for key in RESUME_MUST_KEEP]
    rows += [f"| `{key}` | may grow |\n" for key in RESUME_MAY_GROW]
    rows += [f"| `{key}` | allowed |\n" for key in RESUME_MAY_DIFFER]
    assert table == "| key, with all below it | changed at a resume |\n|---|---|\n" + "".join(rows)
