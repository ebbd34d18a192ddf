"""The tools `python` and `shell`: isolated, with a folder for each episode."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollpacker.environments.environment import EnvironmentConfig, EnvironmentSetupError
from rollpacker.environments.sandbox_tools import Folder
from rollpacker.environments.supervised import SupervisedEnvironments
from rollpacker.environments.tools import ToolFailed, ToolUnavailable
from rollpacker.sandbox.sandbox import (
    I_ACCEPT,
    Capabilities,
    RunResult,
    SandboxConfig,
    Status,
)
from tests.environments.playing import answered, calling, opened


def told(*episodes: list[tuple[str, str]]) -> list[list[str]]:
    """What the calls of each episode come to, the episodes side by side."""
    config = EnvironmentConfig(tools=("python", "shell"), workers=1, timeout_s=60)
    try:
        environments = SupervisedEnvironments(config)
    except EnvironmentSetupError as error:
        pytest.skip(str(error).partition("\n")[0])
    assert [tool["function"]["name"] for tool in environments.tools] == ["python", "shell"]
    assert not environments.is_deterministic

    async def one(number: int, calls: list[tuple[str, str]]) -> list[str]:
        found = []
        for turn, (tool, text) in enumerate(calls, 1):
            argument = {"python": "code", "shell": "command"}[tool]
            answer = await answered(environments, turn, calling((tool, {argument: text})), number)
            found.append(answer.messages[0]["content"])
        return found

    async def run() -> list[list[str]]:
        async with opened(environments):
            return await asyncio.gather(*(one(n, calls) for n, calls in enumerate(episodes)))

    return asyncio.run(run())


def test_programs_leave_each_other_files_and_nothing_else() -> None:
    first, second = told(
        [
            ("python", "import pathlib; pathlib.Path('d').mkdir(); open('d/a', 'w').write('one')"),
            ("shell", "cat d/a; printf '#!/site/bin/sh\\necho ran' > run; chmod +x run; ls"),
            ("shell", "./run && rm d/a && false"),
            ("python", "import os; print(sorted(os.listdir()), input)"),
            ("python", "import run_me"),
            ("python", "print(1 / 0)"),
        ],
        [("shell", "ls; sleep 0.5; ls; echo x > own; exit 3"), ("shell", "ls")],
    )
    assert first[:3] == ["", "oned\nrun", "ran\n[exit status 1]"]
    assert first[3].startswith("['run'] ")
    assert "ModuleNotFoundError" in first[4]
    assert "ZeroDivisionError: division by zero" in first[5]
    assert first[5].endswith("[exit status 1]")
    assert second == ["[exit status 3]", "own"]


def test_programs_are_isolated_and_bounded(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    (found,) = told(
        [
            ("shell", f"cat {secret}"),
            ("python", "import socket; socket.create_connection(('127.0.0.1', 1))"),
            ("python", "open('big', 'wb').write(b'x' * (9 << 20)); print('done')"),
            ("shell", "ls"),
            ("python", "print('y' * 3_000_000)"),
            ("python", "x = 'z' * (600 << 20)"),
            ("python", "import os; os.kill(os.getppid(), 9)"),
            ("python", "print('still here')"),
        ]
    )
    assert "No such file" in found[0]
    assert "PermissionError" in found[1]
    assert found[2].startswith("done\n[the files of the working folder are as they were before")
    assert found[3] == ""
    assert found[4].startswith("yyy")
    assert len(found[4]) < 20_000
    assert "memory" in found[5].lower()
    assert found[6].startswith("Error: it ended the sandbox that it ran in; the files are as")
    assert found[7] == "still here"


# -- with a made-up sandbox ---------------------------------------------------------------------


class Box:
    """Answers each run with what it is told to."""

    capabilities = Capabilities(
        backend="made up",
        passed=(),
        failed=(),
        profiles=(),
        memory="",
        can_fork=True,
        seconds=0.0,
    )

    def __init__(self, *results: RunResult) -> None:
        self.results = list(results)
        self.files: list[Any] = []

    async def run(self, program: str, **settings: Any) -> RunResult:
        self.files.append(settings["files"])
        return self.results.pop(0)

    async def lacks(self, profile: Any) -> str:
        return ""

    async def close(self) -> None: ...


def ended(stdout: str, status: Status = Status.OK) -> RunResult:
    return RunResult(status=status, stdout=stdout.encode())


def test_forged_files_stay_out() -> None:
    said = '{"output": "hi", "code": 0, "executable": [], "files": %s}'
    forged = ['{"../a": ""}', '{"/a": ""}', '{"a": 5}', "[1]", "null", '{"a": "%"}', '{"a/b": ""']
    box = Box(*(ended(said % files) for files in [*forged[:-1], '{"kept": "eA=="}']))
    folder = Folder(box)

    async def run() -> list[str]:
        return [await folder.python("") for _ in forged]

    *refused, good = asyncio.run(run())
    assert all("as they were before this call" in one for one in refused)
    assert good == "hi"
    assert box.files[-1] == {}
    assert folder._files == {"kept": b"x"}


def test_what_is_no_answer_is_told_to_the_model() -> None:
    for status, told_so in [
        (Status.TIMEOUT, "it was ended after 20 s, its limit"),
        (Status.MEMORY, "it took more memory"),
        (Status.OK, "it ended the sandbox"),
    ]:
        with pytest.raises(ToolFailed, match=told_so):
            asyncio.run(Folder(Box(ended("nonsense", status))).python("x"))


def test_a_failed_sandbox_is_asked_again_and_is_no_answer() -> None:
    failed = RunResult(status=Status.SANDBOX_ERROR, detail="no worker")
    good = ended('{"output": "", "code": 0, "executable": [], "files": {}}')
    assert asyncio.run(Folder(Box(failed, good)).shell("x")) == ""
    with pytest.raises(ToolUnavailable, match="the sandbox failed: no worker"):
        asyncio.run(Folder(Box(failed, failed)).shell("x"))


def test_without_isolation_a_run_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    config = EnvironmentConfig(tools=("python",), workers=1)
    with pytest.raises(EnvironmentSetupError, match="bwrap"):
        SupervisedEnvironments(config)


def test_without_isolation_tools_work_for_those_who_accept_it() -> None:
    config = EnvironmentConfig(tools=("python", "shell"), workers=1)
    accepted = SandboxConfig(backend="auto", allow_unsandboxed_code=I_ACCEPT)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PATH", "/nonexistent")
        environments = SupervisedEnvironments(config, sandbox=accepted)

    async def run() -> list[str]:
        async with opened(environments) as those:
            calls = [("python", {"code": "open('a', 'w').write('x'); print(5)"})] * 2
            one = await answered(those, 1, calling(*calls, ("shell", {"command": "ls"})))
            return [message["content"] for message in one.messages]

    assert asyncio.run(run()) == ["5", "5", "a"]
