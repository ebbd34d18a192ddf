"""The tools `python` and `shell`, which run the model's code in the sandbox, with a folder that
lasts as long as the episode.

Each run has an empty folder of its own in the sandbox. A program of ours copies the episode's files
into it before and out of it afterwards, and runs the model's code as a child. That code may forge
the files that come out. This harms only its own episode, and the files are checked like any
untrusted ones. Runs in a worker process.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rollpacker.environments.tools import ToolFailed, ToolUnavailable
from rollpacker.sandbox import open_sandbox
from rollpacker.sandbox.frames import checked_files
from rollpacker.sandbox.sandbox import (
    Limits,
    Profile,
    RunResult,
    Sandbox,
    SandboxConfig,
    SandboxUnavailable,
    Status,
)

WALL_S = 20.0
"""Seconds that one program of the model may take."""
MAX_FOLDER_BYTES = 8 << 20
"""Most bytes of an episode's files. They are kept in memory between calls, for many episodes at
once."""
MAX_OUTPUT_BYTES = 1 << 20
_OWN_S = 2.0
"""Seconds beyond `WALL_S` for our own program, which copies the files around the model's."""
_PROFILE = Profile(
    name="tools",
    folders=(("bin", "/usr/bin"),),
    warm=("base64", "json", "os", "shutil", "subprocess", "sys", "tempfile", "traceback"),
)
"""The sandbox's profile: the standard library and the commands of this machine's /usr/bin, without
installed packages."""

_RUNNER = r'''
import base64, json, os, shutil, subprocess, sys, tempfile

request = json.load(sys.stdin)
own = tempfile.mkdtemp()
os.makedirs("work", exist_ok=True)
os.chdir("work")
here = os.getcwd()
for name in request["executable"]:
    os.chmod(name, 0o755)
said = os.path.join(own, "said")
environment = {**os.environ, "PYTHONPATH": here, "HOME": here}
path = environment["PATH"] = ":".join(
    [os.path.dirname(sys.executable), "/site/bin", os.environ.get("PATH", os.defpath)]
)
if request["tool"] == "python":
    program = os.path.join(own, "program.py")
    with open(program, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(request["text"])
    command = [sys.executable, "-sB", "-X", "utf8", program]
else:
    command = [shutil.which("sh", path=path), "-c", request["text"]]


def as_child():
    with open(said, "wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            return child.wait(request["seconds"])
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            return "timeout"


def in_here():
    """Where nothing may be started: files are lost if the program does not come to its end."""
    import traceback

    before = os.dup(1)
    with open(said, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.path.insert(0, here)
    code = 0
    try:
        exec(compile(request["text"], "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(before, 1)
    return code


try:
    code = as_child()
except PermissionError:
    if request["tool"] != "python":
        raise
    code = in_here()
files, executable, size = {}, [], 0
for folder, _, names in os.walk(here):
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path) or not os.path.isfile(path):
            continue
        size += os.path.getsize(path)
        if size > request["most"]:
            break
        relative = os.path.relpath(path, here)
        with open(path, "rb") as file:
            files[relative] = base64.b64encode(file.read()).decode()
        if os.access(path, os.X_OK):
            executable.append(relative)
with open(said, "rb") as file:
    text = file.read(request["most_output"])
answer = {
    "code": code,
    "output": text.decode(errors="replace"),
    "files": files if size <= request["most"] else None,
    "executable": executable,
}
print(json.dumps(answer))
'''


async def open_box(config: SandboxConfig, stack: AsyncExitStack) -> Sandbox:
    """Open a sandbox that is closed with the stack. Raises `SandboxUnavailable`."""
    box = await stack.enter_async_context(
        open_sandbox(
            config.backend,
            url=config.url,
            token_env=config.token_env,
            allow_unsandboxed_code=config.allow_unsandboxed_code,
            memory_bytes=config.memory_mb << 20,
            disk_bytes=config.disk_mb << 20,
            # Files come out as base64, beside what was printed.
            output_bytes=2 * MAX_FOLDER_BYTES + 8 * MAX_OUTPUT_BYTES,
            wall_s=WALL_S + _OWN_S,
        )
    )
    if missing := await box.lacks(_PROFILE):
        raise SandboxUnavailable(missing)
    return box


class Folder:
    """The tools `python` and `shell` of one episode, with the files that their calls leave."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._files: dict[str, bytes] = {}
        self._executable: list[str] = []

    async def python(self, code: str) -> str:
        """
        Run a Python program and return what it printed. The standard library is there, the network
        is not. Files in the working folder stay there for later calls; variables do not.

        Args:
            code: The program.
        """
        return await self._run("python", code)

    async def shell(self, command: str) -> str:
        """
        Run a command in a POSIX shell and return what it printed. The network is not there. Files
        in the working folder stay there for later calls.

        Args:
            command: The command, or several lines of them.
        """
        return await self._run("shell", command)

    async def _run(self, tool: str, text: str) -> str:
        if not isinstance(text, str):
            raise ToolFailed(f"give {tool} a text, not {type(text).__name__}")
        request = {
            "tool": tool,
            "text": text,
            "seconds": WALL_S,
            "executable": self._executable,
            "most": MAX_FOLDER_BYTES,
            "most_output": MAX_OUTPUT_BYTES,
        }
        for _ in range(2):  # what failed in the sandbox says nothing of the program
            done = await self._box.run(
                _RUNNER,
                stdin=json.dumps(request),
                files={f"work/{name}": data for name, data in self._files.items()},
                profile=_PROFILE,
            )
            if done.status is not Status.SANDBOX_ERROR:
                break
        answer = _answer_of(done)
        told = [answer["output"].rstrip("\n")] if answer["output"] else []
        if not self._keep(answer):
            told.append(
                "[the files of the working folder are as they were before this call: they were too"
                " many or too large]"
            )
        match answer["code"]:
            case 0:
                return "\n".join(told)
            case "timeout":
                told.append(f"[ended after {WALL_S:g} s, its limit]")
            case code:
                told.append(f"[exit status {code}]")
        return "\n".join(told)

    def _keep(self, answer: Mapping[str, Any]) -> bool:
        """Keep the files that a run left. Returns False for malformed or too many files."""
        try:
            files = {
                n: base64.b64decode(text, validate=True)
                for n, text in dict(answer["files"]).items()
            }
            limits = replace(Limits(), disk_bytes=2 * MAX_FOLDER_BYTES)
            self._files = checked_files(files, limits)
            self._executable = [name for name in answer["executable"] if name in files]
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        return True


def _answer_of(done: RunResult) -> dict[str, Any]:
    """The answer that our program printed at its end. Raises `ToolFailed` if there is none, and
    `ToolUnavailable` if the sandbox failed."""
    if done.status is Status.SANDBOX_ERROR:
        raise ToolUnavailable(f"the sandbox failed: {done.detail}")
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
        if isinstance(answer["output"], str) and isinstance(answer["code"], int | str):
            return dict(answer)
    except (ValueError, IndexError, TypeError, KeyError):
        pass
    why = {
        Status.TIMEOUT: f"it was ended after {WALL_S:g} s, its limit",
        Status.MEMORY: "it took more memory than there is",
        Status.OUTPUT: "it printed more than it may",
    }.get(done.status, "it ended the sandbox that it ran in")
    raise ToolFailed(f"{why}; the files are as they were before this call")
