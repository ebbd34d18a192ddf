"""The templates of `rollpacker init`: the config files in `configs/`, with the files in `examples/`
that they name.

No list of them is kept. The comment at the head of a config says what it is about and, indented,
its commands; the files that belong to it are those that it names."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollpacker.did_you_mean import did_you_mean

_PACKAGE = Path(__file__).parents[1]
_CONFIG = re.compile(r"\bconfigs/[\w./-]+\.yaml")
_EXAMPLE = re.compile(r"\bexamples[./](\w+)")
_MODULE_OF_EXAMPLES = re.compile(r"\bfrom examples\.")
_COMMAND = re.compile(r"#\s{2,}((?:python|rollpacker) .+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A config to begin from, with all files that it needs to run."""

    name: str
    """Name of the config's file without `.yaml`."""
    about: str
    """The comment at the config's head, without the commands in it."""
    commands: tuple[str, ...]
    """The commands to type after `init`, in order, with paths as in the repository."""
    sources: tuple[str, ...]
    """Paths of the template's files below `root()`, with the config's first."""

    def files(self) -> dict[str, str]:
        """The template's files as texts by name in the user's folder, with the guide `NAME.md`."""
        made = {
            self._moved(one): self._moved((root() / one).read_text("utf-8")) for one in self.sources
        }
        return {**made, f"{self.name}.md": self._guide(made)}

    def preparation(self) -> tuple[str, ...]:
        """Those commands of the template that make data and models, before the run itself."""
        return tuple(one for one in self.steps() if _prepares(one))

    def steps(self) -> tuple[str, ...]:
        """The commands of the template, with paths as in the user's folder."""
        return tuple(self._moved(one) for one in self.commands)

    def _moved(self, text: str) -> str:
        """Returns `text` with the paths of the user's folder, where all files of the template are
        side by side.

        Scripts that import each other by `examples.` stay in a folder of that name."""
        folders = {f"{Path(one).parent}/" for one in self.sources}
        keeps_examples = any(
            _MODULE_OF_EXAMPLES.search((root() / one).read_text("utf-8"))
            for one in self.sources
            if one.endswith(".py")
        )
        for folder in sorted(folders, key=len, reverse=True):
            if not (keeps_examples and folder.startswith("examples/")):
                text = text.replace(folder, "")
        return text

    def _guide(self, files: dict[str, str]) -> str:
        """Text of the guide `NAME.md`: which files were written, and which commands to type."""
        lines = [f"# {self.name}", "", self._moved(self.about), ""]
        lines += [f"    {command}" for command in self.steps()]
        if any(command.startswith("rollpacker train ") for command in self.steps()):
            lines += [f"    rollpacker {verb} runs/{self.name}" for verb in ("report", "eval")]
        lines += ["", "| file | what it is |", "|---|---|"]
        lines += [
            f"| `{name}` | {first_sentence(_head(name, text))} |"
            for name, text in files.items()
            if _head(name, text)
        ]
        lines += ["", "`rollpacker init --list` shows the other templates."]
        return "\n".join(lines) + "\n"


def root() -> Path:
    """The folder that holds `configs/` and `examples/`: inside an installed package, or the top of
    a checkout of the repository."""
    installed = _PACKAGE / "templates"
    return installed if installed.is_dir() else _PACKAGE.parent


def templates() -> dict[str, Template]:
    """All templates by name: runs first, then scenarios of the simulator. Configs of warm-ups,
    which belong to a run, and of clusters, to which jobs are submitted, are no templates."""
    configs = (path for path in (root() / "configs").rglob("*.yaml") if not _is_cluster(path))
    paths = sorted(configs, key=lambda path: (_is_scenario(path), path))
    found = (_template(path) for path in paths if "\nstages:" not in path.read_text("utf-8"))
    return {one.name: one for one in found}


def find_template(asked: str) -> Template:
    """Returns the template of this name, or the only one whose name begins with it and a hyphen.

    Raises `ValueError` if there is no such template, or more than one."""
    known = templates()
    longer = [name for name in known if name.startswith(f"{asked}-")]
    if asked in known:
        return known[asked]
    if len(longer) == 1:
        return known[longer[0]]
    if longer:
        raise ValueError(f'there are several templates "{asked}-...": {", ".join(longer)}.')
    hint = did_you_mean(asked, known)
    raise ValueError(f'there is no template "{asked}".{hint} The templates are {", ".join(known)}.')


def first_sentence(text: str) -> str:
    """Returns the text up to the first full stop that ends a sentence, on one line."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]


def _template(path: Path) -> Template:
    text = path.read_text("utf-8")
    source = path.relative_to(root()).as_posix()
    verbs = ("simulate",) if _is_scenario(path) else ("doctor", "train")
    commands = tuple(_commands(text)) or tuple(f"rollpacker {verb} {source}" for verb in verbs)
    return Template(
        name=path.stem,
        about=_head(source, text),
        commands=commands,
        sources=tuple(_closure(source)),
    )


def _is_cluster(path: Path) -> bool:
    return path.parent.name == "clusters"


def _is_scenario(path: Path) -> bool:
    return path.parent.name == "scenarios"


def _head(name: str, text: str) -> str:
    """The comment at a config's head without its commands, or a Python module's docstring."""
    if name.endswith(".py"):
        return ast.get_docstring(ast.parse(text)) or ""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not _COMMAND.match(line):
            lines.append(line.removeprefix("#").strip())
    return "\n".join(lines).strip()


def _commands(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if found := _COMMAND.match(line):
            yield found[1].strip()


def _prepares(command: str) -> bool:
    words = shlex.split(command)
    return words[0] == "python" or words[1] == "warmup"


def _closure(config: str) -> list[str]:
    """Paths of a config, of the files that it names, of the files that these name, and so on."""
    found = [config]
    for one in found:  # grows while it is read
        text = (root() / one).read_text("utf-8")
        named = sorted({*_CONFIG.findall(text)})
        for example in sorted({*_EXAMPLE.findall(text)}):
            named += _files_of(example)
        found += [name for name in dict.fromkeys(named) if name not in found]
    return found


def _files_of(example: str) -> list[str]:
    place = root() / "examples" / example
    files = sorted(place.iterdir()) if place.is_dir() else [place.with_suffix(".py")]
    return [path.relative_to(root()).as_posix() for path in files if path.is_file()]
