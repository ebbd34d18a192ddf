"""The command line: help, nearest verbs, exit codes, `rollpacker report`."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from rollpacker.cli import report
from rollpacker.cli.main import main
from rollpacker.cli.report import parse_steps
from rollpacker.cli.verbs import VERBS
from rollpacker.run.error_messages import classify, report_error
from tests.report.fake_run import FakeRun, write


def test_help_names_every_verb_and_examples(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in VERBS)
    assert "rollpacker train configs/quickstart.yaml" in text


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_help(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"rollpacker {verb}" in capsys.readouterr().out


def test_help_is_light():  # and quick: tests/test_layering.py
    code = (
        "import sys; from rollpacker.cli.main import main; main(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'matplotlib', 'pydantic', 'asyncio'};"
        "sys.exit(','.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"--help imported {done.stderr}"


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("rollpacker 0.")


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("trian", "Did you mean 'train'?"),
        ("reprot", "Did you mean 'report'?"),
        ("frobnicate", "The verbs are init, train"),
        ("configs/quickstart.yaml", "Did you mean 'rollpacker train configs/quickstart.yaml'?"),
    ],
)
def test_an_unknown_verb_names_the_nearest(verb, message, capsys):
    assert main([verb]) == 2
    assert message in capsys.readouterr().err


def test_of_files_and_runs_a_near_one_is_suggested(tmp_path, monkeypatch, capsys):
    """By its name without the ending, which all share; or that of this very name elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "one.yaml").write_text("")
    (tmp_path / "configs" / "first.yaml").write_text("")
    for name in ("first", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        write(FakeRun(1).run(2), tmp_path / "runs" / name / "events.jsonl")
    for words, message in (
        (("train", "nofile.yaml"), "no such config file.\n"),
        (("train", "first.yaml"), 'Did you mean "configs/first.yaml"?'),
        (("train", "onne.yaml"), 'Did you mean "one.yaml"?'),
        (("report", "first"), 'Did you mean "runs/first"?'),
        (("report", "runs/othr"), 'Did you mean "runs/other"?'),
        (("report", "nofile"), "such as runs/quickstart.\n"),
    ):
        assert main([*words]) == 2
        assert message in capsys.readouterr().err


def test_a_missing_argument_is_one_short_message(capsys):
    assert main(["report"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rollpacker report: ") and "RUN" in lines[0]
    assert len(lines) == 2


def test_an_option_before_the_verb_is_told_its_place(capsys):
    assert main(["--verbose", "report", "runs/x"]) == 2
    said = capsys.readouterr().err
    assert "--verbose stands before the verb: write it after report" in said


def test_report_of_a_run(tmp_path, capsys):
    write(FakeRun(1).run(6), tmp_path / "events.jsonl")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "out"), "--steps", "2-3"]) == 0
    text = capsys.readouterr().out
    assert "tail idle" in text and "Wrote report.html, summary.json" in text
    assert (tmp_path / "out" / "timeline.png").exists()
    assert not (tmp_path / "timeline.png").exists()


def test_report_where_nothing_can_be_written_still_prints_the_table(tmp_path, capsys):
    write(FakeRun(1).run(6), tmp_path / "events.jsonl")
    (tmp_path / "trace.json.tmp").mkdir()  # also root cannot write there
    assert main(["report", str(tmp_path)]) == 5
    shown = capsys.readouterr()
    assert "tail idle" in shown.out and "trace.json.tmp" in shown.err


def test_report_of_two_runs_draws_the_comparison(tmp_path):
    for name, tail_batching in (("with", True), ("without", False)):
        (tmp_path / name).mkdir()
        run = FakeRun(1, tail_batching=tail_batching).run(6)
        write(run, tmp_path / name / "events.jsonl")
    one, other = str(tmp_path / "with"), str(tmp_path / "without")
    assert main(["report", one, "--against", other]) == 0
    assert (tmp_path / "with" / "comparison.png").exists()


def test_report_says_that_a_log_is_cut_off(tmp_path, capsys):
    path = write(FakeRun(1).run(3), tmp_path / "events.jsonl")
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["report", str(tmp_path)]) == 0
    assert "is cut off" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("", "no finished step yet"), ("{}\n{}\n", "line 1")],
)
def test_report_of_something_else(tmp_path, capsys, content, message):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        (folder / "events.jsonl").write_text(content)
    assert main(["report", str(folder)]) == (0 if content == "" else 2)
    output = capsys.readouterr()
    assert message in (output.out + output.err).replace("\n", " ")
    assert "Traceback" not in output.err


def test_steps_of_the_timeline():
    assert parse_steps(None) is None
    assert parse_steps("5") == range(5, 6)
    assert parse_steps("5-9") == range(5, 10)
    for text in ("x", "5-", "9-5", "-3"):
        with pytest.raises(ValueError, match="--steps takes"):
            parse_steps(text)


def raised(error: BaseException) -> BaseException:
    """The error with a traceback, as if a library had raised it."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_errors_get_their_exit_codes():
    from rollpacker.core.records import LogError
    from rollpacker.rewards.reward import RewardError
    from rollpacker.run.errors import DeadlineExceeded
    from rollpacker.trainer.trainer import NonFiniteError

    assert classify(raised(NonFiniteError("step 3")))[0] == 3
    assert classify(raised(DeadlineExceeded("rewards", 600, "deadlines.reward_s")))[0] == 4
    assert classify(KeyboardInterrupt())[0] == 130
    assert classify(raised(LogError("line 3"))) == (2, "line 3")
    assert classify(raised(RewardError("no such function")))[0] == 2
    assert classify(raised(RuntimeError("boom")))[0] == 1
    full = OSError(errno.ENOSPC, "No space left on device", "/data/x")
    assert classify(full)[0] == 5
    assert classify(full)[1].startswith("/data/x: the disk is full")
    assert classify(PermissionError(errno.EACCES, "denied", "/data/x"))[0] == 5
    wrapped = RuntimeError("I/O error: No space left on device (os error 28)")
    assert classify(wrapped)[0] == 5


def test_only_a_value_error_of_our_own_is_the_users():
    """One from deep inside a library is a bug and keeps its traceback."""
    import json

    with pytest.raises(ValueError) as ours:
        parse_steps("x")
    with pytest.raises(ValueError) as theirs:
        json.loads("nonsense")
    assert classify(ours.value)[0] == 2
    assert classify(theirs.value)[0] == 1


def test_a_group_of_errors_is_told_by_its_first(capsys):
    from rollpacker.trainer.trainer import NonFiniteError

    group = ExceptionGroup("tasks", [NonFiniteError("loss of step 3 is NaN"), RuntimeError("x")])
    assert report_error(group) == 3
    assert capsys.readouterr().err == "rollpacker: loss of step 3 is NaN\n"


def test_a_bug_keeps_its_traceback(capsys, monkeypatch, tmp_path):
    def broken(args):
        raise RuntimeError("boom")

    monkeypatch.setattr(report, "run", broken)
    assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "RuntimeError: boom" in error
    assert "report it" in error.splitlines()[-1]


def test_a_closed_pipe_is_quiet(tmp_path):
    write(FakeRun(1).run(3), tmp_path / "events.jsonl")
    command = f"{sys.executable} -m rollpacker.cli.main report {tmp_path} | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_an_interrupted_dry_run_promises_no_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(config: object, **_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rollpacker.cli.dry_run.print_dry_run", interrupted)
    assert main(["train", "configs/quickstart.yaml", "--dry-run"]) == 130
    assert capsys.readouterr().err == "rollpacker: interrupted; nothing was written\n"
