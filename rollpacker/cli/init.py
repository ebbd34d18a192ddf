"""`rollpacker init TEMPLATE [FOLDER]`: writes a config that runs, and its files, to begin from."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.cli.templates import Template


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "init",
        help="write a config that runs, with its reward and data, into this folder",
        description="Writes a template's files into a folder and makes its data and its warmed-up "
        "model, where it needs some. What is already there is never replaced without --overwrite.",
    )
    parser.add_argument("template", nargs="?", help="such as quickstart (see --list)")
    parser.add_argument("folder", nargs="?", default=".", help="where to write (default: here)")
    parser.add_argument("--list", action="store_true", help="show the templates")
    parser.add_argument(
        "--files-only",
        action="store_true",
        help="only write the files; the commands for data and model are printed",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is in the way")


def run(args: argparse.Namespace) -> int:
    """Write a template's files and prepare its run; returns the exit code. Raises `ValueError`."""
    from rollpacker.cli.templates import find_template

    if args.list:
        _print_list()
        return 0
    if args.template is None:
        raise ValueError("init needs a template, such as quickstart; --list shows all of them")
    template, folder = find_template(args.template), Path(args.folder)
    written = write_files(folder, template.files(), overwrite=args.overwrite)
    if written:
        print(f"Wrote {', '.join(written)} to {folder.resolve()}.")
    else:
        print(f"All files are in {folder.resolve()} already.")
    steps = template.steps()
    if not args.files_only:
        prepare(template, folder, overwrite=args.overwrite)
        steps = tuple(step for step in steps if step not in template.preparation())
    print("\nNext:")
    if folder.resolve() != Path.cwd():
        print(f"    cd {shlex.quote(str(folder))}")
    for step in steps:
        print(f"    {step}")
    return 0


def write_files(folder: Path, files: dict[str, str], *, overwrite: bool) -> list[str]:
    """Write `files` (texts by name) that are not there yet, or with `overwrite` all that differ;
    returns the names written. Raises `ValueError`, before anything is written, if one would be
    replaced without `overwrite`."""
    new = {name: text for name, text in files.items() if not _is_there(folder / name, text)}
    in_the_way = [name for name in new if (folder / name).exists()]
    if in_the_way and not overwrite:
        verb = "is" if len(in_the_way) == 1 else "are"
        raise ValueError(
            f"{', '.join(in_the_way)} {verb} already in {folder.resolve()}, with other contents."
            " Nothing was written. Name another folder, or replace what is there with --overwrite"
        )
    for name, text in new.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return list(new)


def prepare(template: Template, folder: Path, *, overwrite: bool) -> None:
    """Run the commands that make the template's data and model, so that it can train. A model that
    is there already is kept, unless `overwrite`. Raises `ValueError` if a command fails."""
    left = list(template.preparation())
    while left:
        command = left[0]
        if not overwrite and _is_made(command, folder):
            print(f"\n{command}: its model is there already.")
            left.pop(0)
            continue
        program, *words = shlex.split(command)
        if program == "rollpacker":
            # The working folder stays off the module path: files in it must not hide modules.
            words = ["-P", "-m", "rollpacker", *words]
            words += ["--overwrite"] if overwrite else []
        print(f"\n{command}", flush=True)
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(
                f"the files are written, but '{command}' failed: {_without_class(said)}. Mend"
                f" that, then run: {' && '.join(left)}"
            )
        left.pop(0)


def _is_made(command: str, folder: Path) -> bool:
    """Whether `command` is a warm-up (supervised fine-tuning) and its model in `folder` already."""
    if not command.startswith("rollpacker warmup "):
        return False
    from rollpacker.config.load import load_config
    from rollpacker.config.warmup import WarmupConfig

    config, *overrides = shlex.split(command)[2:]
    return (folder / load_config(folder / config, overrides, WarmupConfig).output).exists()


def _is_there(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


def _without_class(line: str) -> str:
    """Returns an error's message without the name of the error's class before its colon."""
    name, colon, rest = line.partition(": ")
    return (rest if colon and " " not in name else line).rstrip(".")


def _print_list() -> None:
    from rollpacker.cli.templates import first_sentence, templates

    known = templates()
    width = max(map(len, known))
    for name, template in known.items():
        print(f"{name:<{width}}  {first_sentence(template.about)}")
    print("\n'rollpacker init NAME [FOLDER]' writes one.")
