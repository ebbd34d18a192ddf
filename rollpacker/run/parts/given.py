"""Makes a config, which can be checked and saved, of what a program gives to `rollpacker.train`.

    a dict, dotted keys in it            -> a config file's values, and overrides
    rewards=[function, (function, 0.5)]  -> rewards: [{function: "<python>:name"}, ...]
    {"environment": {"tools": [f]}}      -> environment: {tools: ["<python>:environment.f"]}
    data=[{"prompt": ...}, ...]          -> data.train: {kind: python, path: "<python>:data.train"}

The objects themselves stay in this process (`imports.giving`), by the names that the config has.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

OF_ITS_SOURCE = ("kind", "path", "split", "subset", "tasks", "size", "seed")
"""Keys of a data set's config that say where its rows come from. The other keys say what to make of
the rows, and also apply to rows that a program passes."""

OF_TRL = {
    "reward_funcs": "rewards",
    "train_dataset": "data",
    "eval_dataset": "eval_data",
    "args": "config",
}
"""Arguments of TRL's trainers, each with the argument of `rollpacker.train` of that meaning."""

Overrides = Sequence[str] | Mapping[str, Any]
GivenReward = Callable[..., Any] | str | tuple[Any, float] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Given:
    """A config, and the objects (functions, data) that it names as `<python>:NAME`, by NAME."""

    config: RunConfig
    objects: Mapping[str, Any]


def refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise `TypeError` if `rollpacker.train` does not have these arguments; the message names the
    argument that was probably meant."""
    from rollpacker.config.schema import RunConfig
    from rollpacker.config.synonyms import all_keys, hint

    for name in arguments:
        if name in OF_TRL:
            raise TypeError(
                f"train() has no {name}: here it is {OF_TRL[name]}. docs/migration.md has TRL's"
                " names and ours"
            )
        found = hint([name], {*all_keys(RunConfig)})
        where = f".{found}, a key of config or overrides" if found else ": see help(train)"
        raise TypeError(f"train() has no {name}{where}")


def as_given(
    config: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Overrides,
    *,
    rewards: GivenReward | Sequence[GivenReward] | None,
    data: Iterable[Mapping[str, Any]] | None,
    eval_data: Iterable[Mapping[str, Any]] | None,
) -> Given:
    """Make a checked config of the arguments of `train`, and return it with the Python objects
    (functions, data) among them. Raises `ConfigError` and `ValueError`, as for a config file."""
    from rollpacker.config.document import parse_document, read_text
    from rollpacker.config.load import config_of, to_plain
    from rollpacker.config.schema import RunConfig

    lines, where, dotted = None, "config", list[str]()
    if isinstance(config, RunConfig):
        tree = to_plain(config)
    elif isinstance(config, Mapping):
        tree, dotted = _tree_of(config)
    elif isinstance(config, str | PathLike):
        where = str(config)
        tree, lines = parse_document(read_text(where), where)
    else:
        kind = type(config)
        of_trl = kind.__module__.partition(".")[0] in ("trl", "transformers")
        pointer = ". docs/migration.md has TRL's keys and ours" if of_trl else ""
        raise ValueError(
            "config must be a path, a dict or a RunConfig, not"
            f" {kind.__module__}.{kind.__name__}{pointer}"
        )
    objects: dict[str, Any] = {}
    if rewards is not None or _has_objects(tree.get("rewards")):
        tree["rewards"] = _rewards_of(tree.get("rewards") if rewards is None else rewards, objects)
    if isinstance(tree.get("environment"), dict):
        tree["environment"] = _environment_of(tree["environment"], objects)
    if data is not None or eval_data is not None:
        tree["data"] = _data_of(tree.get("data"), data, eval_data, objects)
    overrides = [*dotted, *_override_texts(overrides)]
    return Given(config_of(tree, overrides, RunConfig, where=where, lines=lines), objects)


def _tree_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Splits a config: keys as in a file, and keys with dots as overrides (texts `a.b=value`)."""
    tree = {key: _plain(value) for key, value in config.items() if "." not in str(key)}
    return tree, _override_texts({k: v for k, v in config.items() if "." in str(k)})


def _override_texts(overrides: Overrides) -> list[str]:
    """Returns overrides as texts `a.b=value`. Values are written as JSON, which is valid YAML."""
    if isinstance(overrides, str):
        raise ValueError(
            f'overrides is a list of texts such as ["train.steps=20"] or a dict, not "{overrides}"'
        )
    if not isinstance(overrides, Mapping):
        return list(overrides)
    texts = []
    for key, value in overrides.items():
        try:
            texts.append(f"{key}={json.dumps(_plain(value))}")
        except TypeError:
            raise ValueError(
                f"{key} is {type(value).__name__}; a config has texts, numbers, lists and dicts"
            ) from None
    return texts


def _plain(value: Any) -> Any:
    """Returns the value with paths as texts, tuples as lists and numpy's numbers as Python's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PathLike):
        return str(value)
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    return value


# -- rewards -----------------------------------------------------------------------------


def _has_objects(rewards: Any) -> bool:
    if callable(rewards):
        return True
    if not isinstance(rewards, list):
        return False
    return any(not isinstance(one, Mapping) or callable(one.get("function")) for one in rewards)


def _rewards_of(rewards: Any, objects: dict[str, Any]) -> list[dict[str, Any]]:
    if callable(rewards) or isinstance(rewards, str | Mapping):
        rewards = [rewards]
    if not isinstance(rewards, Iterable):
        raise ValueError(f"rewards is a list of functions, not {type(rewards).__name__}")
    entries = [_reward_entry(f"rewards.{number}", one) for number, one in enumerate(rewards)]
    named = {entry["name"] for entry in entries if entry.get("name")}
    for number, entry in enumerate(entries):
        function = entry["function"]
        if not callable(function):
            continue
        name = entry.get("name") or _free_name(_name_of(function), named)
        if name in objects:
            raise ValueError(f'two rewards are called "{name}"; give rewards.{number} another name')
        named.add(name)
        objects[name] = function
        entry |= {"function": f"<python>:{name}", "name": name}
    return entries


def _reward_entry(where: str, reward: Any) -> dict[str, Any]:
    """Returns a reward as a dict of the config; `function` is still the function itself, not its
    name. `where`: place in the config, for messages."""
    entry: dict[str, Any]
    if isinstance(reward, Mapping):
        entry = {key: _plain(value) for key, value in reward.items()}
        if "function" not in entry:
            raise ValueError(f"{where} has no function; its keys: {', '.join(map(str, reward))}")
    elif isinstance(reward, list | tuple) and len(reward) == 2:
        entry = {"function": reward[0], "weight": _plain(reward[1])}
    else:
        entry = {"function": reward}
    if not (callable(entry["function"]) or isinstance(entry["function"], str)):
        raise ValueError(
            f"{where} is {type(entry['function']).__name__}, not a function: give a function, the"
            ' name of one ("math", "my_reward.py:f"), (function, weight), or a dict such as'
            ' {"function": f, "weight": 0.5, "name": "short"}'
        )
    return entry


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else str(name)


def _free_name(name: str, taken: set[str]) -> str:
    """Returns the name for a reward: `name`; but if it is `reward`, which all lambdas get, and is
    taken, then `reward_2`, `reward_3` and so on."""
    if name != "reward" or name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


# -- environments ------------------------------------------------------------------------


def _environment_of(section: Mapping[str, Any], objects: dict[str, Any]) -> dict[str, Any]:
    """Returns the config's `environment` with names for functions, and adds them to `objects`."""

    def named(one: Any) -> Any:
        if not callable(one):
            return one
        if one is not function and getattr(one, "__name__", "") == "<lambda>":
            raise ValueError(
                "environment.tools: a lambda has no name, type hints or docstring to tell the model"
                " of; write a function"
            )
        name = f"environment.{_name_of(one)}"
        if objects.setdefault(name, one) is not one:
            raise ValueError(f'environment.tools: two tools are called "{_name_of(one)}"')
        return f"<python>:{name}"

    found = dict(section)
    function = found.get("function")
    if not (function is None or isinstance(function, str) or callable(function)):
        raise ValueError(
            f"environment.function is one {type(function).__name__}, and each episode has its own:"
            " give a class, or a function that makes one"
        )
    if isinstance(found.get("tools"), list):
        found["tools"] = [named(one) for one in found["tools"]]
    if "function" in found:
        found["function"] = named(found["function"])
    return found


# -- data --------------------------------------------------------------------------------


def _data_of(
    section: Any,
    data: Iterable[Mapping[str, Any]] | None,
    eval_data: Iterable[Mapping[str, Any]] | None,
    objects: dict[str, Any],
) -> Any:
    """Returns the config's `data` with names of the rows that a program passed, in place of files.
    The rows go into `objects` by these names."""
    if section is not None and not isinstance(section, Mapping):
        return section  # the check of the whole says what is wrong with it
    section = copy.deepcopy(dict(section or {}))
    said = _rest(section.get("train"))
    if data is not None:
        section["train"] = {**said, **_rows_given("data.train", data, objects)}
    if eval_data is not None:
        said |= _rest(section.get("eval"))
        section["eval"] = {**said, **_rows_given("data.eval", eval_data, objects)}
        section.pop("eval_fraction", None)
    return section


def _rest(dataset: Any) -> dict[str, Any]:
    if not isinstance(dataset, Mapping):
        return {}
    return {key: value for key, value in dataset.items() if key not in OF_ITS_SOURCE}


def _rows_given(name: str, rows: Any, objects: dict[str, Any]) -> dict[str, Any]:
    """Put the rows into `objects`, and return the config keys that refer to them. `name`: the
    config's section for these rows. Raises `ValueError` if `rows` is no list of rows."""
    wanted = f"{name}: rows are a list of dicts, a Dataset or a DataFrame"
    if isinstance(rows, str | bytes | PathLike):
        raise ValueError(
            f'{wanted}. A file is named in the config: {name} = {{"kind": "jsonl", "path": ...}}'
        )
    if isinstance(rows, Mapping):
        parts = ", ".join(map(str, list(rows)[:5]))
        raise ValueError(f"{wanted}, not a {type(rows).__name__} of {parts}: choose one of them")
    if hasattr(rows, "to_dict") and hasattr(rows, "itertuples"):  # a DataFrame
        rows = rows.to_dict("records")
    if not isinstance(rows, Iterable):
        raise ValueError(f"{wanted}, not {type(rows).__name__}")
    objects[name] = rows if hasattr(rows, "__len__") else list(rows)
    return {"kind": "python", "path": f"<python>:{name}"}
