"""Arguments that several verbs (commands of `rollpacker`) take, and checks of them that can be made
before any file is read."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path


def add_overrides(
    parser: argparse.ArgumentParser, help_text: str = "replace single settings"
) -> None:
    """Add to the parser the arguments `key=value`, any number of them, which replace settings of
    the config. `help_text` describes them in --help."""
    parser.add_argument("overrides", nargs="*", default=(), metavar="key=value", help=help_text)


def check_jobs(jobs: int | None) -> None:
    """Raise `ValueError` if --jobs is less than 1."""
    if jobs is not None and jobs < 1:
        raise ValueError(f"--jobs must be at least 1, not {jobs}")


def check_file(option: str, file: str) -> None:
    """Raise `ValueError` if no file of this name, given by this option, can be written."""
    if not file:
        raise ValueError(f"{option} is empty: give the name of a file")
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{option} {file} is a folder: give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: there is no folder {path.parent}")


def compared(text: str, known: Collection[str], kind: str) -> list[str]:
    """The names in the text of the option --compare, each once. Raises `ValueError` for a name that
    is not in `known`, with `kind` as the word for what the names stand for."""
    from rollpacker.config.document import nearest

    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(
                f'--compare: there is no {kind} "{name}". Known: {", ".join(known)}.'
                f"{nearest(name, known)}"
            )
    return names
