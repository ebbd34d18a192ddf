"""Every key of a config with its type, default and meaning, read off the schema's own source.

`python docs/make_configuration.py` writes docs/configuration.md and docs/scenarios.md, the
references that users read.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config.check import allowed, allowed_value, field_types, item_schema, nested_schema

DOCS = Path(__file__).resolve().parent
_MISSING = dataclasses.MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDescription:
    """One key."""

    path: str
    """As in an override; `N` stands for a list's index."""
    type: str
    default: str | None
    """None: must be set."""
    text: str


def describe(schema: type, prefix: str = "") -> list[KeyDescription]:
    """Every key of `schema`, in the order of the source, sections before what is in them."""
    rows = []
    texts = field_texts(schema)
    for field in dataclasses.fields(schema):
        kind = field_types(schema)[field.name]
        path = prefix + field.name
        inner, items = nested_schema(kind), item_schema(kind)
        words = allowed_value(kind) if inner or items else allowed(kind)
        text = texts.get(field.name) or (class_text(inner) if inner else "")
        rows.append(KeyDescription(path=path, type=words, default=_default(field), text=text))
        if inner or items:
            rows += describe(inner or items, f"{path}." if inner else f"{path}.N.")  # type: ignore[arg-type]
    return rows


def _default(field: dataclasses.Field[Any]) -> str | None:
    if field.default_factory is not _MISSING:
        made = field.default_factory()
        return "{}" if made == {} else "see below"
    if field.default is _MISSING:
        return None
    return _yaml_word(field.default)


def _yaml_word(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_yaml_word(item) for item in value) + "]"
    return str(value)


@functools.cache
def _class_node(schema: type) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(sys.modules[schema.__module__]))
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == schema.__name__)


def class_text(schema: type) -> str:
    """The class's docstring as one line."""
    return " ".join((ast.get_docstring(_class_node(schema)) or "").split())


def field_texts(schema: type) -> dict[str, str]:
    """The text under each field that has one, as one line."""
    texts = {}
    body = _class_node(schema).body
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            texts[statement.target.id] = " ".join(following.value.value.split())
    return texts


def markdown_table(schema: type) -> str:
    """`describe` as a Markdown table."""
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for row in describe(schema):
        default = "**required**" if row.default is None else f"`{row.default}`"
        if row.default == "see below":
            default = "see below"
        cells = [f"`{row.path}`", row.type, default, row.text]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def reference_page() -> str:
    """The text of `docs/configuration.md`."""
    from rollpacker.config.schema import RunConfig
    from rollpacker.config.warmup import WarmupConfig

    return f"""# Configuration

Generated from the schema: `python docs/make_configuration.py`.

A config is a YAML file. Any key can be set from the command line as `a.b.c=value`, an entry of a
list by its number (`rewards.0.weight=2`). `${{a.b}}` stands for another value of the same config.
An unknown key or a value of the wrong type is an error that names the nearest known key and what is
allowed. The resolved config, every default written out, is saved beside the run.

## `rollpacker train`

{markdown_table(RunConfig)}

## `rollpacker warmup`

{markdown_table(WarmupConfig)}
"""


def scenario_page() -> str:
    """The text of `docs/scenarios.md`."""
    from rollpacker.sim.presets import describe_presets
    from rollpacker.sim.scenario import Scenario

    return f"""# Scenarios

Generated from the schema: `python docs/make_configuration.py`.

A scenario says what `rollpacker simulate` and `rollpacker plan` simulate: a model on a cluster, its
prompts, and the system that runs them ([simulation.md](simulation.md)). It is a YAML file, and any
key can be set from the command line as `a.b.c=value`, an entry of a list by its number
(`rewards.0.share=0.5`). `configs/scenarios/` holds five. `system` names a preset of the five
sections `tail_batching`, `reward_scheduler`, `parallelism_planner`, `stream_trainer` and `oracle`:
what the file says of them wins over the preset, and the defaults below are those of a system that
sets nothing.

{markdown_table(Scenario)}

## Names that may be used

`rollpacker simulate --presets` prints them. Shapes and datasheets are public numbers. The constants
of the simulator were fitted to Qwen2.5 of 7B, 14B and 32B on H800s: what a simulation of another
model or GPU extrapolates, it says below its table.

```text
{describe_presets()}
```
"""


PAGES = {"configuration.md": reference_page, "scenarios.md": scenario_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
