"""Programs as answers: they are run in the sandbox, and their output is judged outside of it."""

from rollpacker.rewards.code.grading import CodeConfig, CodeReward, extract, grade

__all__ = ["CodeConfig", "CodeReward", "extract", "grade"]
