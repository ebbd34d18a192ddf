"""Reward for GSM8K: is the final number right?"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def correct(completions, answer, **columns):
    """1.0 where the last number after `####` equals the solution's, else 0.0."""
    return [
        float(final_number(text_of(completion)) == final_number(solution))
        for completion, solution in zip(completions, answer, strict=True)
    ]


def text_of(completion):
    """A text; where the rows hold chat messages, the assistant's message in a list."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def final_number(text):
    """The last number after the last `####`; NaN, which equals nothing, if there is none."""
    _, marker, end = text.rpartition("####")
    numbers = NUMBER.findall(end) if marker else []
    return float(numbers[-1].replace(",", "")) if numbers else float("nan")
