"""One torch thread (threads fight on small machines), no network, fast tests first; the tiers."""

from __future__ import annotations

import gc
import os

gc.disable()  # nearly all that is imported stays; looking for what does not takes a fourth of it

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from tests import guard

guard.install()  # before a module under test imports a function by its name

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests import durations, tiers

# A change must not fail for an example that has nothing to do with it: on the build machine the
# examples are fixed, on a developer's they are fresh.
# How long examples take, to draw or to run, says something of the machine alone, which is shared.
settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
_FIXED = bool(os.environ.get("CI") or os.environ.get("ROLLPACKER_FIXED_EXAMPLES"))
settings.load_profile("ci" if _FIXED else "here")

_ORDER = (
    *("core", "config", "report", "data", "examples", "endpoints", "workers", "sandbox"),
    *("rewards", "cli", "run", "trainer", "engines"),
)

_BEGAN = pytest.StashKey[float]()
_SECONDS = "processor_s"

# -- which tests run ---------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rollpacker")
    group.addoption(
        "--tier",
        choices=("quick", "full", "nightly", "all"),
        default=os.environ.get("ROLLPACKER_TIER"),
        help="quick: what needs no processes, sockets or time; full (the default): that and all "
        "else but nightly; nightly: the rest, and cheap properties with many examples; all. "
        "Files and folders named run whatever their tier, unless a tier is named, too. "
        "ROLLPACKER_TIER says the same.",
    )
    group.addoption("--record-durations", action="store_true", help="rewrite tests/durations.json")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of the tier asked for; pure and quick folders before those that need a model."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.parent.name
        return _ORDER.index(folder) if folder in _ORDER else len(_ORDER)

    named = config.args_source is pytest.Config.ArgsSource.ARGS and not any(
        Path(name).absolute() in (durations.ROOT, durations.ROOT / "tests") for name in config.args
    )
    tier = config.getoption("tier") or ("all" if named else "full")
    long = durations.listed() if tier == "nightly" else {}
    left_out = []
    for item in items:
        own = tier_of(item)
        cheap_property = is_hypothesis_test(getattr(item, "obj", None)) and item.nodeid not in long
        if tier == "nightly" and cheap_property:
            draw(item, at_least=tiers.NIGHTLY_EXAMPLES)
        elif tier == "quick" and own == "quick":
            draw(item, at_most=tiers.QUICK_EXAMPLES)
        elif not tiers.runs(item.nodeid, own, tier):
            left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What is imported by now is no garbage, and need not be searched again and again."""
    gc.freeze()
    gc.enable()


def tier_of(item: pytest.Item) -> tiers.Tier:
    return tiers.tier_of(item.nodeid, getattr(item, "fixturenames", ()))


def draw(item: pytest.Item, *, at_least: int = 0, at_most: int | None = None) -> None:
    """Bounds the number of examples of a test with properties, if it is one."""
    test = getattr(item, "obj", None)
    test = getattr(test, "__func__", test)  # of a method
    if not is_hypothesis_test(test):
        return
    own: settings = test._hypothesis_internal_use_settings  # where hypothesis keeps them
    examples = max(own.max_examples, at_least)
    examples = examples if at_most is None else min(examples, at_most)
    test._hypothesis_internal_use_settings = settings(own, max_examples=examples)


# -- what tests of the quick tier may not do ---------------------------------------


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Watches from here on, so that fixtures of a module are watched, too: in a quick run alone,
    since in a full one it would only find again what `make check` has found."""
    item.stash[_BEGAN] = durations.processor_seconds()
    is_quick = item.config.getoption("tier") == "quick" and tier_of(item) == "quick"
    guard.watch(item.nodeid if is_quick else None)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    seconds = durations.processor_seconds() - item.stash[_BEGAN]
    item.user_properties.append((_SECONDS, seconds))
    refused = guard.watch(None)
    if refused:
        pytest.fail("\n".join(refused), pytrace=False)
    return result


# -- how long they take ------------------------------------------------------------


_durations: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A worker's processor seconds reach the process that records them in the last report."""
    if report.when == "teardown":
        _durations[report.nodeid] = dict(report.user_properties).get(_SECONDS, 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    worker = hasattr(session.config, "workerinput")
    if session.config.getoption("record_durations") and not worker:
        durations.record(_durations)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto` is three for two processors that this process may use, hyperthreads included: a
    third of what tests take they wait for processes."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)) * 3 // 2)
    return os.cpu_count() or 1
