"""Reads YAML text as plain values, with the line of every key, and writes it. A config is somebody
else's file: no tags are allowed, no aliases that grow without bound and no silent duplicates, and
scalars are YAML 1.2's (`no` is a text, `1e-6` a number), not YAML 1.1's surprises."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rollpacker.did_you_mean import did_you_mean, did_you_mean_file
from rollpacker.writing import replacing

MAX_FILE_BYTES = 1 << 20
MAX_NODES = 20_000
"""Most values in one config, counted with aliases expanded."""

Path_ = tuple[str | int, ...]


class ConfigError(ValueError):
    """Raised for a config that cannot be used. Its message lists every problem found."""


_NUMBER_START = "-+0123456789."
_SCALARS = (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$", _NUMBER_START),
    (
        "float",
        r"^(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        _NUMBER_START,
    ),
    ("merge", r"^<<$", "<"),
)
"""Each kind of YAML value that is no text: name, pattern, and the characters it may begin with."""


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for name, pattern, first_characters in _SCALARS:
        entry = (f"tag:yaml.org,2002:{name}", re.compile(pattern))
        for character in first_characters:
            table.setdefault(character, []).append(entry)
    return table


class _SyntaxError(ConfigError):
    pass


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers = _resolvers()


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """A YAML dumper that quotes every text that the loader would read as something else."""

    yaml_implicit_resolvers = _resolvers()

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Returns a text's YAML node. Next line (U+0085) is escaped: the loader would make it a
        space."""
        return self.represent_scalar(_TEXT_TAG, data, style='"' if "\x85" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


_TEXT_TAG = "tag:yaml.org,2002:str"
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge", "value")
}


def dotted(path: Path_) -> str:
    """A key's path as text: `("rewards", 0, "weight")` as `rewards.0.weight`."""
    return ".".join(str(part) for part in path)


def nearest(name: str, known: Iterable[str]) -> str:
    """The hint ` Did you mean "..."?`, with the nearest known name; empty if none is close."""
    return did_you_mean(name, known, cutoff=0.55)


def read_text(path: str | Path) -> str:
    """Returns the file's text. Raises `ConfigError` for every way in which it cannot be read."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file.{_nearest_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; name a YAML file in it.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason}).") from None
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; is it a config?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8; save the file as UTF-8.") from None


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    folders = (path.parent / "configs", path.parent)
    there = [one for folder in folders for one in folder.glob("*.y*ml")]
    return did_you_mean_file(path, there)


def parse_document(text: str, where: str) -> tuple[dict[str, Any], dict[Path_, int]]:
    """Parse a config file's text. Returns its mapping, and the line (from 1) of each key by the
    key's path. Raises `ConfigError`, whose message begins with `where`, such as the file's name."""
    value, lines = _parse(text, where)
    if value is None:
        raise ConfigError(f"{where}: the file is empty.")
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected `key: value` lines, not a {_kind(value)}.")
    return value, lines


def parse_value(text: str, where: str) -> Any:
    """Returns the value on the right side of an override, read as YAML, or as a text if it is no
    YAML (such as `[0-9]+`)."""
    try:
        return _parse(text, where, in_value=True)[0]
    except _SyntaxError:
        return text


def _parse(text: str, where: str, *, in_value: bool = False) -> tuple[Any, dict[Path_, int]]:
    lines: dict[Path_, int] = {}
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, lines
            _Walk(where, lines, in_value).visit(node, ())
            return loader.construct_document(node), lines
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise _SyntaxError(f"{where}{line}: not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise _SyntaxError(f"{where}: not valid YAML: {reason}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply.") from None
    except ConfigError:
        raise
    except ValueError as error:  # such as an integer of ten thousand digits
        raise ConfigError(f"{where}: {error}") from None


class _Walk:
    """Checks all nodes of a YAML document, aliases expanded, before any value is made of them."""

    def __init__(self, where: str, lines: dict[Path_, int], in_value: bool) -> None:
        self._where = where
        self._lines = lines
        self._in_value = in_value
        """Whether the YAML text is one key's value, as in an override, and not a whole document."""
        self._num_nodes = 0
        self._open: list[yaml.Node] = []

    def visit(self, node: yaml.Node, path: Path_) -> None:
        line = node.start_mark.line + 1
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ConfigError(f"{self._where}: more than {MAX_NODES} values, aliases expanded.")
        if node.tag not in _PLAIN_TAGS:
            raise ConfigError(f"{self._where}, line {line}: the tag {node.tag} is not allowed.")
        if any(node is parent for parent in self._open):
            raise ConfigError(f"{self._where}, line {line}: an alias contains itself.")
        self._open.append(node)
        if isinstance(node, yaml.MappingNode):
            self._visit_mapping(node, path)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines.setdefault((*path, index), item.start_mark.line + 1)
                self.visit(item, (*path, index))
        self._open.pop()

    def _visit_mapping(self, node: yaml.MappingNode, path: Path_) -> None:
        first_line: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag.endswith(":merge"):
                self.visit(value, path)
                continue
            if (path or self._in_value) and key.tag.endswith((":int", ":float")):
                key.tag = _TEXT_TAG  # `0.5: 600` in a table; the schema may make it a number again
            if not isinstance(key, yaml.ScalarNode) or key.tag != _TEXT_TAG:
                raise ConfigError(
                    f"{self._where}, line {line}: a key must be a text; put it in quotes."
                )
            name = dotted((*path, key.value))
            if key.value in first_line:
                raise ConfigError(
                    f"{self._where}: {name} is set twice, in line {first_line[key.value]} and in"
                    f" line {line}. Keep one."
                )
            first_line[key.value] = line
            self._lines[*path, key.value] = line
            self.visit(value, (*path, key.value))


def _kind(value: object) -> str:
    return "list" if isinstance(value, list) else "single value"


def write_document(value: dict[str, Any], path: str | Path, *, comment: str = "") -> None:
    """Write the value as YAML below a comment: the whole file or none. Raises `OSError`."""
    text = yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    with replacing(Path(path), durable=True) as temporary:
        temporary.write_text(head + text, "utf-8")
