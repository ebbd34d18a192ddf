"""A run's identity: fingerprints of model, data and code, which a resume must find unchanged."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.config.schema import RunConfig
from rollpacker.imports import given, is_given

if TYPE_CHECKING:
    from rollpacker.run.parts.policy import LoadedPolicy


def tokenizer_fingerprint(policy: LoadedPolicy) -> str:
    """SHA-256 of the tokenizer's vocabulary, so that token ids of an older run can be checked."""
    tokenizer = policy.loaded.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.eos_token_id]).encode()).hexdigest()


def identity_of(config: RunConfig, policy: LoadedPolicy) -> dict[str, Any]:
    """Returns a dict with fingerprints of model, data and the user's own files, and the number of
    threads."""
    from rollpacker.trainer.model import fingerprint

    return {
        "model": fingerprint(config.model.path),
        "dtype": str(policy.loaded.dtype),
        "train_data": policy.train_prompts.fingerprint,
        "chat": {name: prompts.chat for name, prompts in policy.inputs.prompt_sets.items()},
        "threads": policy.threads,
        "files": config.algorithm.own_files()
        | {
            f"the reward {name}": _file_sha256(file)
            for name, file in policy.reward.sources().items()
        }
        | {
            f"the reward {reward.name or reward.function}": _code_sha256(reward.function)
            for reward in config.rewards
            if is_given(reward.function)
        }
        | _of_environment(config),
    }


def _of_environment(config: RunConfig) -> dict[str, str | None]:
    """Returns the SHA-256 of the code of the environment and of each tool (a file, or a function
    that a program passed), by a name for messages. None for a function without a source."""
    environment = config.environment
    if environment is None:
        return {}
    specs = [*environment.tools, *([environment.function] if environment.function else ())]
    found: dict[str, str | None] = {}
    for spec in specs:
        file = spec.rpartition(":")[0]
        if is_given(spec):
            found[f"the environment {spec}"] = _code_sha256(spec)
        elif file.endswith(".py"):
            found[f"the environment {spec}"] = _file_sha256(file)
    return found


def _code_sha256(spec: str) -> str | None:
    """Returns the SHA-256 of the source of a function that a program passed. None if it has no
    source."""
    import inspect

    try:
        return hashlib.sha256(inspect.getsource(given(spec)).encode()).hexdigest()
    except (OSError, TypeError):  # made by an `exec`, or no function but what can be called
        return None


def _file_sha256(file: str) -> str | None:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None
