"""The check, before anything is loaded, that supervised fine-tuning can write its model."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollpacker.config.warmup import WarmupConfig


class WarmupError(ValueError):
    """The warm-up (supervised fine-tuning) cannot go on; the message says where and what to do."""


def check_output(output: Path, config: WarmupConfig, overwrite: bool) -> None:
    """Raise `WarmupError` or `OSError` if the model could not be written to `output`. `overwrite`
    allows the folder of a model there, other than the one to start from."""
    if config.model is not None:
        start = Path(config.model.path).expanduser()
        if start.resolve() == output.resolve():
            raise WarmupError(f"output {output} is the model to start from; name another folder")
    may_replace = overwrite and (output / "config.json").is_file()
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not may_replace:
        why = "and is no model's folder" if overwrite else "(--overwrite replaces a model)"
        raise WarmupError(f"output {output} exists already {why}; remove it or name another folder")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(output.parent))
