"""Texts that a user sees, kept word for word: help, dry runs, configuration keys, public names.

python -m tests.golden.outputs --write    # rewrites them, with everything else
python -m tests.golden.texts --write      # rewrites them alone (half a minute)
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = HERE / "texts"
WIDTH = "100"
"""Columns of the terminal for which help is laid out."""
CONFIGS = sorted(path.relative_to(ROOT) for path in (ROOT / "configs").glob("*.yaml"))


def printed(*arguments: str) -> str:
    """What a command prints to both streams, with its exit code if that is not 0."""
    from rollpacker.cli.main import main

    both = io.StringIO()
    environment = {"COLUMNS": WIDTH, "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(both),
        contextlib.redirect_stderr(both),
        contextlib.chdir(ROOT),
    ):
        code = main([*arguments])
    text = both.getvalue() + (f"exit code {code}\n" if code else "")
    return text.replace(str(ROOT), "ROOT")


def help_texts() -> dict[str, str]:
    """Of the program and of each verb."""
    from rollpacker.cli.verbs import VERBS

    found = {"help": printed("--help")}
    return found | {f"help {verb}": printed(verb, "--help") for verb in VERBS}


def dry_run(config: Path) -> str:
    """What `train --dry-run` prints of a config of `configs/`, as far as it does not depend on the
    machine: on its devices and memory, or on models that are there or not."""
    return stable(printed("train", str(config), "--dry-run"))


_STABLE = re.compile(
    r"\S|  (algorithm|short round|long round|every round|a step trains|steps|rows|evaluation)\b"
)
"""Beginnings of lines that do not speak of the machine; the first line is not indented."""


def stable(text: str) -> str:
    """The lines that do not speak of the machine."""
    lines = (line.rstrip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if _STABLE.match(line))


def config_keys() -> str:
    """The keys that `docs/configuration.md` describes, sorted."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    return "".join(f"{key}\n" for key in sorted(set(re.findall(r"^\| `([^`]+)`", text, re.M))))


def public_names() -> str:
    """The public names of `rollpacker`, sorted."""
    import rollpacker

    return "".join(f"{name}\n" for name in sorted(rollpacker.__all__))


def texts() -> dict[str, str]:
    """All of them, by the name of the file that keeps them."""
    found = help_texts() | {f"dry-run {path.stem}": dry_run(path) for path in CONFIGS}
    return found | {"configuration keys": config_keys(), "public names": public_names()}


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '-')}.txt"


def write() -> None:
    """Keep the texts as they are now, and no others."""
    FOLDER.mkdir(exist_ok=True)
    kept = {file_of(name): text for name, text in texts().items()}
    for path in FOLDER.glob("*.txt"):
        if path not in kept:
            path.unlink()
    for path, text in kept.items():
        path.write_text(text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
