"""A scripted model that plays an environment, sync or async, to its end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

MAX_TURNS = 64


async def play(
    environment: Any, row: Mapping[str, Any], policy: Callable[[list[dict[str, Any]]], Any]
) -> tuple[list[dict[str, Any]], list[float | None]]:
    """The dialogue and the reward of each turn. `policy`: the dialogue so far -> the model's next
    message, or its text."""
    dialogue = list(await _awaited(environment.reset(row)))
    rewards: list[float | None] = []
    for _ in range(MAX_TURNS):
        message = policy(dialogue)
        if isinstance(message, str):
            message = {"role": "assistant", "content": message}
        messages, reward, *is_over = (await _awaited(environment.step(message)))[:4]
        dialogue += [message, *messages]
        rewards.append(reward)
        if any(is_over):
            return dialogue, rewards
    raise AssertionError(f"not over after {MAX_TURNS} turns: {dialogue}")


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
