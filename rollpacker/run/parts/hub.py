"""Asks once whether the Hugging Face hub can be reached, before libraries try again and again.

If not, libraries are told to use local copies only (`HF_HUB_OFFLINE`), and a model or data set
without a local copy is refused with one message.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from rollpacker.config.schema import RunConfig

logger = logging.getLogger(__name__)

CONNECT_S = 1.5
"""Seconds within which a connection, name lookup included, must succeed; else the hub counts as out
of reach."""
ANSWER_S = 10.0
"""Seconds that the hub's answer may take once a connection is made, since a proxy may be slow."""
HUB = "https://huggingface.co"
_OFFLINE = "HF_HUB_OFFLINE"

_set_by_us = False


class HubError(ValueError):
    """A model or data set can be had neither from the hub nor from this machine."""


def look_for_hub(config: RunConfig, *, model_path: str | None = None) -> None:
    """Check that the config's models and data sets on the hub can be had. Raises `HubError` for one
    that is neither in reach nor on this machine. `model_path`: checked instead of `model.path`, if
    given."""
    models = {"model.path": model_path or config.model.path}
    if config.model.teacher is not None:
        models["model.teacher"] = config.model.teacher
    if config.train.critic.path is not None:
        models["train.critic.path"] = config.train.critic.path
    sets = {
        f"data.{name}.path": part.path
        for name, part in (("train", config.data.train), ("eval", config.data.eval))
        if part is not None and part.kind == "huggingface" and part.path is not None
    }
    look_for_names(models, sets)


def look_for_names(models: Mapping[str, str], sets: Mapping[str, str] | None = None) -> None:
    """Check that these models and data sets can be had, as `look_for_hub` does. `models` and `sets`
    map the config key, for messages, to the name; names of local folders are passed over."""
    models = {key: name for key, name in models.items() if _is_hub_name(name)}
    sets = {key: name for key, name in (sets or {}).items() if _is_hub_name(name)}
    if not (models or sets):
        return
    if sets:
        from rollpacker.data.files import require_datasets

        require_datasets()
    if _OFFLINE in os.environ and not _set_by_us:
        _refuse_what_is_not_here(models, sets)
        return
    why = unreachable()
    _go_offline(why is not None)
    if why is None:
        return
    for key, name, kind in _not_here(models, sets):
        raise HubError(
            f"{key} {name}: the Hugging Face hub ({_endpoint()}) cannot be reached ({why}), and"
            f" this machine has no copy of that {kind}. Without a network, set {key} to a folder"
            " that has it."
        )
    names = ", ".join((*models.values(), *sets.values()))
    told = f"the Hugging Face hub ({_endpoint()}) cannot be reached ({why})"
    logger.warning("%s: %s from the copies on this machine", told, names)


def _refuse_what_is_not_here(models: Mapping[str, str], sets: Mapping[str, str]) -> None:
    """Raise `HubError` for a name without a local copy, if the environment forbids asking the hub.
    The libraries themselves would complain of the network, and late."""
    value = os.environ[_OFFLINE]
    if value.upper() not in ("1", "ON", "YES", "TRUE"):
        return
    for key, name, kind in _not_here(models, sets):
        raise HubError(
            f"{key} {name}: {_OFFLINE}={value} forbids asking the Hugging Face hub, and this"
            f" machine has no copy of that {kind}. Correct the name, set"
            f" {key} to a folder that has it, or unset {_OFFLINE}."
        )


def _not_here(models: Mapping[str, str], sets: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Returns (config key, name, "model" or "data set") of each name without a local copy."""
    missing = [(key, n, "model") for key, n in models.items() if not _model_is_here(n)]
    return missing + [(key, n, "data set") for key, n in sets.items() if not _set_is_here(n)]


def unreachable() -> str | None:
    """Returns why the hub does not answer: no connection in `CONNECT_S`, or no answer in
    `ANSWER_S`. None if it answers."""
    outcome: list[str | None] = []
    connected = threading.Event()

    def ask() -> None:
        request = urllib.request.Request(_endpoint(), method="HEAD")
        try:
            socket.create_connection(_first_hop(request), timeout=CONNECT_S).close()
            connected.set()
            urllib.request.build_opener().open(request, timeout=ANSWER_S).close()
        except urllib.error.HTTPError:
            outcome.append(None)  # which is an answer
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            outcome.append(str(reason) or type(reason).__name__)
        else:
            outcome.append(None)

    # Looking a name up may take longer than any timeout says.
    thread = threading.Thread(target=ask, name="hub", daemon=True)
    thread.start()
    thread.join(CONNECT_S)
    if connected.is_set():
        thread.join(ANSWER_S)
    if outcome:
        return outcome[0]
    if connected.is_set():
        return f"no answer within {ANSWER_S:g} s"
    return f"no connection within {CONNECT_S:g} s"


def _first_hop(request: urllib.request.Request) -> tuple[str, int]:
    """Returns host and port to connect to for this request: the hub's, or a proxy's. Raises
    `ValueError` if the address has no host."""
    scheme = request.type
    proxy = urllib.request.getproxies().get(scheme)
    if proxy and not urllib.request.proxy_bypass(request.host):
        scheme, _, _ = proxy.rpartition("://")
        address = urlsplit(proxy if "://" in proxy else f"//{proxy}")
    else:
        address = urlsplit(request.full_url)
    if not address.hostname:
        raise ValueError(f"there is no host in {address.geturl()}")
    return address.hostname, address.port or (443 if scheme == "https" else 80)


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or HUB


def _is_hub_name(name: str) -> bool:
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or "\\" in name:
        return False
    return not Path(name).exists()


def _model_is_here(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _set_is_here(name: str) -> bool:
    """Whether the cache folder of `datasets` has the data set; the library itself takes seconds to
    say."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = os.environ.get("HF_DATASETS_CACHE") or Path(home, "datasets")
    return Path(cache, name.replace("/", "___")).is_dir()


def _go_offline(offline: bool) -> None:
    """Have Hugging Face's libraries use local copies only; False: undo an earlier call."""
    global _set_by_us
    if offline:
        os.environ[_OFFLINE] = "1"
    elif _set_by_us:
        del os.environ[_OFFLINE]
    else:
        return
    _set_by_us = offline
    for name in ("huggingface_hub.constants", "datasets.config"):
        if name in sys.modules:
            setattr(sys.modules[name], _OFFLINE, offline)
