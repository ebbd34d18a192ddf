"""Programs as answers: run in the sandbox, judged outside of it, from bytes."""

from rollpacker.rewards.code.grading import CodeConfig, CodeReward, extract, grade

__all__ = ["CodeConfig", "CodeReward", "extract", "grade"]
