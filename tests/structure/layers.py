"""Who may import whom: a table of dotted prefixes, and circles."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.structure.source import Module, Package

CONTRACTS = (
    *("algo.config", "data.dataset", "rewards.reward", "rollout.engine", "sandbox.sandbox"),
    *("trackers.tracker", "trainer.trainer", "callbacks", "cluster.seat"),
    *("dialogue.trajectory", "environments.environment"),
)
"""A part's protocol, the records that cross it and its config class, in one light file."""

NOUNS = tuple(f"core.{noun}" for noun in ("ids", "events", "commands", "lifecycle"))

FOR_ALL = ("chat_template", "codec", "did_you_mean", "imports", "spans", "warn_once")
"""Free to all parts but the pure ones."""

_CONTROLLER = ("bus", "core", "config", *CONTRACTS)
_TRAINER = (
    *(*NOUNS, "core.packs", "core.pipeline", "core.pipeline_layout", "core.pipeline_links"),
    *("core.pipeline_order", "core.pipeline_plan", "core.pipeline_split", "core.pipeline_watch"),
    *("core.pipeline_work", "algo", "host_store", "workers", "weight_buffer", "weight_probe"),
)

ANYTHING = ("",)
"""The prefix of every name."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": ANYTHING,
    "__main__": ANYTHING,
    "algo": ("imports",),
    "bus": ("core",),
    "callbacks": (),
    "chat_template": (),
    "cli": ANYTHING,
    "cluster": ("core", "host_store", "workers"),
    "config": ("core", *CONTRACTS),
    "controller": _CONTROLLER,
    "controller.hand_over": ("controller", *_CONTROLLER, "weight_buffer"),
    "codec": (),
    "core": ("codec",),
    "data": NOUNS,
    "dialogue": ("data",),
    "did_you_mean": (),
    "endpoints": (),
    "environments": (
        *(*NOUNS, "data", "workers", "rewards", "sandbox", "serving.chat", "serving.http"),
    ),
    "host_store": (),
    "imports": (),
    "workers": ("weight_buffer",),
    "remote": ("cluster", "core.coexecution.nodes", "workers", "weight_buffer"),
    "report": ("callbacks", "core", "config"),
    "rewards": (
        *(*NOUNS, "core.deadlines", "core.reward_hosts", "endpoints", "environments.environment"),
        *("workers", "sandbox"),
    ),
    "rollout": (*NOUNS, "host_store", "workers", "weight_buffer", "weight_probe"),
    "sandbox": ("endpoints", "workers"),
    "serving": (*NOUNS, "dialogue", "rollout"),
    "sim": ("bus", "core", "config", "report"),
    "spans": (),
    "trackers": ("callbacks",),
    "trainer": _TRAINER,
    # What these read is spread over the whole config.
    "trainer.batch_arithmetic": ("trainer", *_TRAINER, "config"),
    "trainer.estimate": ("trainer", *_TRAINER, "config"),
    "trainer.pipeline.check": ("trainer", *_TRAINER, "config"),
    "trainer.stage_memory": ("trainer", *_TRAINER, "config"),
    "trainer.training_memory": ("trainer", *_TRAINER, "config"),
    "trainer.unit_memory": ("trainer", *_TRAINER, "config"),
    "trainer.warmup": ("trainer", *_TRAINER, "config.warmup"),
    "trainer.warmup_output": ("trainer", *_TRAINER, "config.warmup"),
    "trainer.warmup_rows": ("trainer", *_TRAINER, "config.warmup"),
    # These take records of rewards and of engines as they come.
    "trainer.samples": ("trainer", *_TRAINER, "rewards.reward", "rollout.engine"),
    "trl": (
        *("bus", "core", "data.dataset", "report.history", "report.time_book", "rollout"),
        *("config.load", "controller.carried", "controller.clock", "controller.errors"),
    ),
    "warn_once": (),
    "weight_buffer": (),
    "weight_probe": (),
}
"""What of rollpacker the modules below each dotted prefix may import, besides what is below that
prefix; the longest prefix of a module counts. Imports inside functions and those for type checking
count as all others."""

LIGHT_AT_MODULE_LEVEL = ("", "__main__", "cli")
"""Rows that may import anything, but outside of functions only light parts: a command is quick."""
LIGHT = ("cli", "config", "core", "report", "sim", *FOR_ALL, *CONTRACTS)

NOTHING_HEAVY = ("", "cli", "config", "core", "report", "sim", *CONTRACTS)
"""Modules below these prefixes load none of the heavy libraries when they are imported."""
HEAVY = {"torch", "transformers", "ray", "vllm", "datasets", "reasoning_gym", "pyarrow"}

PURE = ("core",)
"""Modules below these prefixes decide: no clocks, no I/O, no threads, few libraries."""
IMPURE = {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time", "random"}
LIBRARIES_OF_PURE = {"numpy", "msgspec"}

RAY = ("remote",)
"""Only modules below these prefixes import ray."""


def below(name: str, prefixes: Sequence[str]) -> bool:
    """Whether a dotted name is one of these or inside one of these; "" is around all names."""
    return any(not prefix or f"{name}.".startswith(f"{prefix}.") for prefix in prefixes)


def row_of(name: str, table: Mapping[str, tuple[str, ...]]) -> str | None:
    """The longest prefix in the table of a module of rollpacker; None if it has no row."""
    if not name:
        return ""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in table), None)


def violations(package: Package) -> Iterator[str]:
    for module in package.modules.values():
        yield from _of_layers(package, module)
        yield from _of_libraries(module)


def _of_layers(package: Package, module: Module) -> Iterator[str]:
    name = module.name.removeprefix("rollpacker").lstrip(".")
    row = row_of(name, MAY_IMPORT)
    if row is None:
        yield f"{module.path}: {name} has no row in MAY_IMPORT"
        return
    free = () if below(name, PURE) else FOR_ALL
    allowed = (*((row,) if row else ()), *MAY_IMPORT[row], *free)
    for one in module.imports:
        imported = package.module_of(one.name)
        if imported is None or imported == "rollpacker":
            continue
        rest = imported.removeprefix("rollpacker.")
        light_only = row in LIGHT_AT_MODULE_LEVEL and one.at_module_level
        may = LIGHT if light_only else allowed
        if not below(rest, may):
            what = "at module level" if light_only else f"below {row!r}"
            yield f"{module.path}, line {one.line}: {rest} ({what}: {', '.join(may)})"


def _of_libraries(module: Module) -> Iterator[str]:
    name = module.name.removeprefix("rollpacker").lstrip(".")
    is_light = name == "" or below(name, [prefix for prefix in NOTHING_HEAVY if prefix])
    for one in module.imports:
        library = one.name.partition(".")[0]
        where = f"{module.path}, line {one.line}: {one.name}"
        if library == "rollpacker":
            continue
        if library == "ray" and not below(name, RAY):
            yield f"{where} (ray is imported below {', '.join(RAY)} only)"
        elif below(name, PURE) and library in IMPURE:
            yield f"{where} (what decides is pure)"
        elif below(name, PURE) and library not in sys.stdlib_module_names | LIBRARIES_OF_PURE:
            libraries = ", ".join(sorted(LIBRARIES_OF_PURE))
            yield f"{where} (what decides has the standard library and {libraries})"
        if is_light and one.at_module_level and library in HEAVY:
            yield f"{where} (this module must stay light)"


def circles(package: Package) -> list[list[str]]:
    """Groups of modules that import each other in a ring, lazily or for type checking too: the
    strongly connected components of more than one module (Tarjan's algorithm)."""
    graph = package.imported
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        path.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in path:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            ring = path[path.index(name) :]
            del path[path.index(name) :]
            if len(ring) > 1:
                found.append(sorted(ring))

    for name in graph:
        if name not in order:
            visit(name)
    return found
