"""Has ray demand a secret token: it then refuses all who reach its ports without the token.

Ray decides about that when it is imported, so this module has to be used before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
TOKEN_FILE = Path.home() / ".ray" / "auth_token"


def demand_token() -> None:
    """Have ray demand the token in the file that `RAY_AUTH_TOKEN_PATH` names, by default
    `TOKEN_FILE`. Raises `ValueError` if there is no token, or if other users may read the file."""
    if os.environ.get(MODE, "token") != "token":
        raise ValueError(
            f"RAY_AUTH_MODE is {os.environ[MODE]}: without a token whoever reaches ray's "
            "ports may run what they like. Set it to token, or leave it out"
        )
    if "RAY_AUTH_TOKEN" in os.environ:
        raise ValueError(
            "RAY_AUTH_TOKEN is set, and what this process starts would inherit it: put the token "
            f"into a file of mode 0600, such as {TOKEN_FILE}, and name that in RAY_AUTH_TOKEN_PATH"
        )
    path = Path(os.environ.get(PATH) or TOKEN_FILE)
    try:
        mode, token = stat.S_IMODE(path.stat().st_mode), path.read_text().strip()
    except OSError as error:
        raise ValueError(
            f"ray's token cannot be read ({error}): make cluster makes one for this machine; in a "
            "cluster it is the file that the head was started with, the same on each host"
        ) from error
    if mode & 0o077:
        raise ValueError(f"{path} holds ray's token, and others may read it: chmod 600 {path}")
    if not token:
        raise ValueError(f"{path} is empty, and should hold ray's token: make cluster makes one")
    os.environ[MODE] = "token"
    os.environ[PATH] = str(path)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def is_demanded() -> bool:
    return os.environ.get(MODE) == "token" and PATH in os.environ


def make_token() -> Path:
    """Make a token for this machine if it has none, and return the path of its file."""
    path = Path(os.environ.get(PATH) or TOKEN_FILE)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path


if __name__ == "__main__":
    print(f"ray's token is in {make_token()}: put the same file on every host of a cluster")
