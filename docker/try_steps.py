"""Run a Dockerfile's steps without a docker daemon, in plain folders: needs root, Linux and a base.

    mmdebstrap --variant=minbase bookworm /tmp/debian.tar
    python docker/try_steps.py --base /tmp/debian.tar --target cpu --into /tmp/image \
        --run "doctor" --run "init quickstart --files-only"

Each stage is a folder that begins as a copy of the base (or of another stage); RUN steps run in it
by chroot, with /proc, /dev and this machine's name servers. At the end `--run` starts the image's
entry point as its user. A build's isolation and its layers are not looked at, only whether the
steps work. `--bind` and `--build-arg PIP_...` bring a network's own settings along.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import string
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Stage:
    """What the steps of one `FROM` have made so far."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entry: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def steps(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with what follows them, in order."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n", " ", "\n".join(lines))
    words = (line.strip().partition(" ") for line in whole.splitlines() if line.strip())
    return [(name.upper(), rest.strip()) for name, _, rest in words]


def needed(found: Sequence[tuple[str, str]], target: str) -> set[str]:
    """The stages that `target` is made from, itself included."""
    bases: dict[str, set[str]] = {}
    for name, rest in found:
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            bases[stage] = {base}
        elif copied := re.match(r"--from=(\S+)", rest):
            bases[stage].add(copied[1])
    if target not in bases:
        raise SystemExit(f"there is no stage {target}; the stages are {', '.join(bases)}")
    wanted, grown = {target}, set()
    while wanted != grown:
        grown = set(wanted)
        wanted |= {base for stage in grown for base in bases[stage] if base in bases}
    return wanted


class Build:
    """Stages by name, made one after the other."""

    def __init__(self, into: Path, base: Path, binds: Sequence[str], given: Mapping[str, str]):
        self.into, self.base, self.binds, self.given = into, base, binds, given
        self.stages: dict[str, Stage] = {}
        self.stage = Stage(into)

    def take(self, name: str, rest: str) -> None:
        """Carry out one instruction. Raises `CalledProcessError`, or `SystemExit` if unknown."""
        stage = self.stage
        if name == "FROM":
            self._begin(*rest.split(" AS "))
        elif name == "ARG":
            key, _, value = rest.partition("=")
            stage.arguments[key] = self.given.get(key, value)
        elif name == "ENV":
            pairs = (pair.partition("=") for pair in shlex.split(self._filled(rest)))
            stage.environment |= {key: value for key, _, value in pairs}
        elif name == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif name == "USER":
            stage.user = rest
        elif name == "COPY":
            self._copy(rest.split())
        elif name == "RUN":
            self.run(["/bin/sh", "-c", rest])
        elif name in ("ENTRYPOINT", "CMD"):
            setattr(stage, "entry" if name == "ENTRYPOINT" else "command", json.loads(rest))
        else:
            raise SystemExit(f"{name} is not known here")

    def run(self, words: Sequence[str]) -> None:
        """Run a program in the stage, as its user, in its folder."""
        stage = self.stage
        mounts = ["/proc", "/dev", "/etc/resolv.conf", *self.binds]
        script = "set -e; cd /\n"
        for place in mounts:
            inside = stage.root / place.lstrip("/")
            if Path(place).is_dir():
                inside.mkdir(parents=True, exist_ok=True)
            else:
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.touch()
            script += f"mount --rbind {shlex.quote(place)} {shlex.quote(str(inside))}\n"
        inner = f"cd {shlex.quote(stage.folder)} && exec {shlex.join(words)}"
        script += f"exec chroot --userspec={stage.user} {shlex.quote(str(stage.root))}"
        script += f" /bin/sh -c {shlex.quote(inner)}\n"
        subprocess.run(
            ["unshare", "--mount", "--propagation=private", "/bin/sh", "-c", script],
            env={**stage.arguments, **stage.environment, **_passed(self.given)},
            check=True,
        )

    def _begin(self, base: str, stage: str) -> None:
        root = self.into / stage
        if base in self.stages:
            old = self.stages[base]
            subprocess.run(["cp", "--archive", str(old.root), str(root)], check=True)
            self.stage = Stage(
                root, dict(old.environment), {}, old.folder, old.user, old.entry, old.command
            )
        else:
            root.mkdir(parents=True)
            subprocess.run(
                ["tar", "--extract", f"--file={self.base}", f"--directory={root}"], check=True
            )
            self.stage = Stage(root)
        self.stages[stage] = self.stage

    def _copy(self, words: list[str]) -> None:
        source_root = ROOT
        if words[0].startswith("--from="):
            source_root = self.stages[words.pop(0).removeprefix("--from=")].root
        *sources, goal = words
        inside = self.stage.root / os.path.join(self.stage.folder, goal).lstrip("/")
        for source in sources:
            place = source_root / source.lstrip("/")
            if place.is_dir():
                ignored = shutil.ignore_patterns("__pycache__") if source_root == ROOT else None
                shutil.copytree(place, inside, symlinks=True, dirs_exist_ok=True, ignore=ignored)
            else:
                into = inside / place.name if goal.endswith("/") else inside
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(place, into)

    def _filled(self, text: str) -> str:
        return string.Template(text).safe_substitute(
            {**self.stage.arguments, **self.stage.environment}
        )


def _passed(given: Mapping[str, str]) -> dict[str, str]:
    """Settings of clients that a build would have from its own network: `--build-arg PIP_...`."""
    return {key: value for key, value in given.items() if key.startswith(("PIP_", "SSL_"))}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a Dockerfile's steps without a daemon.")
    parser.add_argument("--file", type=Path, default=ROOT / "docker" / "Dockerfile")
    parser.add_argument("--base", type=Path, required=True, help="archive of a Debian root")
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--into", type=Path, required=True, help="a new folder for the stages")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], help="a path to show in the root")
    parser.add_argument("--run", action="append", default=[], help="words for the entry point")
    args = parser.parse_args()
    given = dict(pair.split("=", 1) for pair in args.build_arg)
    build = Build(args.into.resolve(), args.base.resolve(), args.bind, given)
    found = steps(args.file.read_text())
    wanted = needed(found, args.target)
    stage = ""
    for name, rest in found:
        stage = rest.partition(" AS ")[2] if name == "FROM" else stage
        if stage not in wanted:
            continue
        began = time.monotonic()
        build.take(name, rest)
        print(f"[{stage}] {name} {rest[:60]}  ({time.monotonic() - began:.1f} s)", flush=True)
    for words in args.run:
        print(f"\n$ {shlex.join(build.stage.entry)} {words}", flush=True)
        build.run([*build.stage.entry, *shlex.split(words)])


if __name__ == "__main__":
    main()
