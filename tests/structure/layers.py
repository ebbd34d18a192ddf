"""Who may import whom: a table of dotted prefixes, and circles."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from tests.structure.source import Module, Package

CONTRACTS = (
    *("algo.config", "data.dataset", "rewards.reward", "engines.engine", "sandbox.sandbox"),
    *("trackers.tracker", "trainer.trainer", "callbacks", "cluster.seats.seat"),
    *("dialogue.trajectory", "environments.environment"),
)
"""A part's protocol, the records that cross it and its config class, in one light file."""

NOUNS = tuple(f"core.{noun}" for noun in ("ids", "events", "commands", "lifecycle"))

FOR_ALL = (
    *("bounds", "chat_template", "codec", "did_you_mean", "imports", "spans", "warn_once"),
    "writing",
)
"""Free to all parts but the pure ones."""

_TRAINER = (*NOUNS, "core.packs", "algo", "pipeline", "workers", "weights")
_CHECKS = ("core.checks.deadlines", "core.checks.reward_hosts")

_RUN = ("bus", "core", "config", "weights.buffer", "weights.delivery", *CONTRACTS)
_ALL_BUT_CLI = (
    *("algo", "bus", "callbacks", "cluster", "config", "core", "data", "dialogue", "endpoints"),
    *("engines", "environments", "integrations", "pipeline", "report", "rewards", "run", "sandbox"),
    *("serving", "sim", "trackers", "trainer", "weights", "workers"),
)

ANYTHING = ("",)
"""The prefix of every name."""

MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": ANYTHING,
    "__main__": ANYTHING,
    "algo": ("imports",),
    "bounds": (),
    "bus": ("core",),
    "callbacks": (),
    "chat_template": (),
    "cli": ANYTHING,
    "cluster": ("cluster.seats",),
    "cluster.commands": ANYTHING,
    "cluster.decide": ("bounds", "codec", "core"),
    "cluster.on_ray": ("cluster", "workers"),
    "cluster.profile": ("cluster.decide", "core", "config", "report"),
    "cluster.seats": ("cluster.decide", "core", "weights", "workers"),
    "cluster.service": ("cluster.decide", "cluster.seats", "core", "workers"),
    "cluster.sim": ("cluster.decide", "cluster.profile", "config", "core", "report.table", "sim"),
    "codec": (),
    "config": ("core", *CONTRACTS),
    "core": ("bounds", "codec"),
    "data": NOUNS,
    "dialogue": ("data",),
    "did_you_mean": (),
    "endpoints": (),
    "engines": (*NOUNS, "workers", "weights"),
    "environments": (*NOUNS, "data", "integrations.environments", "workers", "rewards", "sandbox"),
    "imports": (),
    "integrations": (),
    "integrations.environments": ("data", "environments", "rewards", "serving", "workers"),
    "integrations.trl": (
        *("core", "data.dataset", "engines", "config.load", "run.errors", "scheduler"),
    ),
    "integrations.slime": ("config.load", "core", "scheduler"),
    "integrations.verl": ("config.load", "core", "engines", "scheduler"),
    "pipeline": ("report",),
    "pipeline.links": ("pipeline.plan", "trainer.trainer", "workers"),
    "pipeline.plan": ("codec", "core"),
    "pipeline.sim": ("pipeline.plan", "core", "sim"),
    "pipeline.stages": ("pipeline", *_TRAINER, "trainer"),
    "pipeline.stages.check": ("pipeline", *_TRAINER, "trainer", "config"),
    "report": ("callbacks", "core", "config", "pipeline.report", "serving.http"),
    "rewards": (*NOUNS, *_CHECKS, "endpoints", "environments.environment", "workers", "sandbox"),
    "run": _RUN,
    # The ports above know contracts alone; these build and drive a run, and know every room below.
    **dict.fromkeys(
        ("run.parts", "run.session", "run.train", "run.driving", "run.view"), _ALL_BUT_CLI
    ),
    "sandbox": ("endpoints", "workers"),
    "scheduler": (
        *("bus", "core", "data.dataset", "endpoints", "engines.engine", "report.accounting"),
        *("report.step_summary", "run.errors", "run.ports.carried"),
        "run.ports.clock",
    ),
    "serving": (*NOUNS, "dialogue", "engines"),
    "sim": ("bus", "core", "config", "report", "pipeline.sim", "pipeline.plan", "cluster.decide"),
    "spans": (),
    "trackers": ("callbacks",),
    "trainer": _TRAINER,
    # What these read is spread over the whole config.
    "trainer.batch_arithmetic": ("trainer", *_TRAINER, "config"),
    "trainer.estimate": ("trainer", *_TRAINER, "config"),
    "trainer.training_memory": ("trainer", *_TRAINER, "config"),
    "trainer.warmup": ("trainer", *_TRAINER, "config.warmup"),
    "trainer.warmup_output": ("trainer", *_TRAINER, "config.warmup"),
    "trainer.warmup_rows": ("trainer", *_TRAINER, "config.warmup"),
    # These take records of rewards and of engines as they come.
    "trainer.samples": ("trainer", *_TRAINER, "rewards.reward", "engines.engine"),
    "trl": ("integrations.trl",),
    "warn_once": (),
    "weights": ("workers",),
    "workers": ("weights",),
    "workers.hosts": ("weights", "workers", "cluster.decide.nodes"),
    "writing": (),
}
"""What of rollpacker the modules below each dotted prefix may import, besides what is below that
prefix; the longest prefix of a module counts. Imports inside functions and those for type checking
count as all others."""

LIGHT_AT_MODULE_LEVEL = ("", "__main__", "cli", "cluster.commands")
"""Rows that may import anything, but outside of functions only light parts: a command is quick."""
LIGHT = (
    *("cli", "config", "core", "report", "sim", "cluster", "pipeline.plan", "pipeline.sim"),
    *("pipeline.report", "run", *FOR_ALL, *CONTRACTS),
)

NOTHING_HEAVY = (
    *("", "cli", "config", "core", "report", "sim", "pipeline.plan", "pipeline.sim"),
    *("cluster.commands", "cluster.decide", "cluster.profile", "cluster.sim", *CONTRACTS),
)
"""Modules below these prefixes load none of the heavy libraries when they are imported."""
HEAVY = {"torch", "transformers", "ray", "vllm", "datasets", "reasoning_gym", "pyarrow"}

PURE = ("core", "cluster.decide", "pipeline.plan")
"""Modules below these prefixes decide: no clocks, no I/O, no threads, few libraries."""
IMPURE = {"asyncio", "logging", "os", "socket", "subprocess", "threading", "time", "random"}
LIBRARIES_OF_PURE = {"numpy", "msgspec"}

RAY = ("workers.hosts", "cluster.on_ray", "integrations.verl")
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
