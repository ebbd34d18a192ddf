"""Reward for GSM8K: is the final number right?"""

import re

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def correct(completions, answer, **columns):
    """1.0 where the last number after `####` equals the solution's, else 0.0."""
    return [
        float(final_number(messages[-1]["content"]) == final_number(solution))
        for messages, solution in zip(completions, answer, strict=True)
    ]


def final_number(text):
    """The last number after the last `####`; NaN, which equals nothing, if there is none."""
    _, marker, end = text.rpartition("####")
    numbers = NUMBER.findall(end) if marker else []
    return float(numbers[-1].replace(",", "")) if numbers else float("nan")
