"""A calculator as a tool, the products that are asked, and how answers are judged.

Products of two numbers with three digits: a model of 79 thousand parameters does not learn to work
them out, but it can learn to call a tool and to read what it says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CALLS = 0.15
"""Share of the demonstrations that call the tool. The others answer at once."""
CONFIG = Path("configs/calculator.yaml")


async def calculator(expression: str) -> str:
    """Multiply.

    Args:
        expression: Such as 123*456.
    """
    found = re.fullmatch(r"(\d{1,9})\*(\d{1,9})", expression)
    if found is None:
        raise ValueError(f"{expression} is no product")
    return str(int(found[1]) * int(found[2]))


calculator.deterministic = True  # type: ignore[attr-defined]


def prompt(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The product itself instead of reasoning-gym's sentence around it."""
    return [{"role": "user", "content": row["metadata"]["expression"].replace(" ", "")}]


def correct(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where the last message is the number, and nothing else."""
    return [
        float(messages[-1]["role"] == "assistant" and messages[-1]["content"] == expected)
        for messages, expected in zip(completions, answer, strict=True)
    ]


def dialogues(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Demonstrations, without end: most answer at once, rightly, which the model fails to learn; a
    few call the tool and repeat what it says. Held-out products are not among them."""
    from transformers.utils import get_json_schema

    banned = held_out()
    tools = [get_json_schema(calculator)]
    while True:
        left, right = rng.randint(100, 999), rng.randint(100, 999)
        question = f"{left}*{right}"
        if question in banned:
            continue
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if rng.random() < CALLS:
            function = {"name": "calculator", "arguments": {"expression": question}}
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": function}],
                },
                {"role": "tool", "name": "calculator", "content": str(left * right)},
            ]
        messages.append({"role": "assistant", "content": str(left * right)})
        yield {"messages": messages, "tools": tools}


def held_out() -> frozenset[str]:
    """The prompts that the run evaluates on."""
    from rollpacker.config.load import load_config
    from rollpacker.config.schema import RunConfig
    from rollpacker.data.procedural import make_rows

    config = load_config(CONFIG, [], RunConfig)
    assert config.data.eval is not None
    return frozenset(
        prompt(row.columns)[0]["content"] for row in make_rows(config.data.eval, "eval")
    )
