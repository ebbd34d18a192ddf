"""Opens a sandbox's pool of workers only if it has passed the self-test, whose result is kept until
this machine restarts, or Python, bubblewrap or this package changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import platform
import subprocess
from pathlib import Path

from rollpacker.sandbox import bwrap
from rollpacker.sandbox.pool import Pool
from rollpacker.sandbox.sandbox import Limits, SandboxUnavailable
from rollpacker.sandbox.selftest import ESSENTIAL, self_test

_OF_CHILDREN = "memory of children"
"""Name of the attack that uses memory in several processes. If only this attack is not contained,
`open_pool` opens the pool anew with programs that may not start processes."""

_log = logging.getLogger(__name__)


async def open_pool(workers: int, defaults: Limits) -> Pool:
    """Open a pool of `workers` that passed its self-test. Raises `SandboxUnavailable` if it
    fails."""
    for allow_fork in (True, False):
        pool = Pool(workers=workers, defaults=defaults, allow_fork=allow_fork)
        try:
            await pool.open()
            escaped = [name for name in await _test(pool) if name in ESSENTIAL]
        except BaseException:
            await pool.close()
            raise
        if not escaped:
            return pool
        await pool.close()
        if escaped != [_OF_CHILDREN] or not pool.capabilities.can_fork:
            break
    what = f"bubblewrap runs, but does not contain: {', '.join(escaped)}"
    raise SandboxUnavailable(bwrap.why_unavailable(what))


async def _test(pool: Pool) -> tuple[str, ...]:
    """Run the self-test on the pool, or read the result of an earlier one, and set the pool's
    `capabilities`. Returns the names of the attacks that the pool does not contain."""
    path = _cache_file(pool)
    known = _read(path)
    if known is None:
        began = asyncio.get_running_loop().time()
        passed, failed = await self_test(pool, backend="bwrap")
        known = (passed, failed, asyncio.get_running_loop().time() - began)
        if not ESSENTIAL.intersection(failed):
            _write(path, known)
    passed, failed, seconds = known
    pool.capabilities = dataclasses.replace(
        pool.capabilities, passed=passed, failed=failed, seconds=seconds
    )
    return failed


_Known = tuple[tuple[str, ...], tuple[str, ...], float]


def _cache_file(pool: Pool) -> Path:
    """The file in which the result of this pool's self-test is kept. The file's name is a hash of
    everything that the result depends on."""
    version = subprocess.run([bwrap.find_bwrap(), "--version"], capture_output=True, timeout=10)
    digest = hashlib.sha256(version.stdout)
    for text in (
        _boot_id(),
        platform.python_version(),
        bwrap.interpreter(),
        f"{pool.capabilities.memory} {pool.capabilities.can_fork}",
        str(os.getuid()),
    ):
        digest.update(text.encode() + b"\0")
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "rollpacker", f"sandbox-{digest.hexdigest()[:24]}.json")


def _boot_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return ""


def _read(path: Path) -> _Known | None:
    """Return the result of an earlier self-test: the attacks contained, the attacks not contained,
    and the duration. None: there is no result that can be read."""
    try:
        found = json.loads(path.read_text())
        return tuple(found["passed"]), tuple(found["failed"]), float(found["seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, known: _Known) -> None:
    passed, failed, seconds = known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"passed": passed, "failed": failed, "seconds": seconds}))
        partial.replace(path)
    except OSError as error:
        _log.info("the sandbox's self-test is not remembered: %s", error)
