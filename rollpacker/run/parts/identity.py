"""The identity of a run: what a resume must find again beyond the config."""

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
    """SHA-256 of the tokenizer's vocabulary, by which the numbers of tokens have their meaning."""
    tokenizer = policy.loaded.tokenizer
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps([vocabulary, tokenizer.eos_token_id]).encode()).hexdigest()


def identity_of(config: RunConfig, policy: LoadedPolicy) -> dict[str, Any]:
    """Returns fingerprints of model, data and the user's files, and the number of threads, by
    name."""
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
    """SHA-256 of the files of environment and tools, or of the code that a program gave instead, by
    what they are. None for code without a source."""
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
    """SHA-256 of a function that a program gave, as its file or notebook cell has it. None if it
    has no source."""
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
