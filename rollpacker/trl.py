"""The old import path of `rollpacker.integrations.trl`, kept for one release."""

import warnings

from rollpacker.integrations.trl import SUPPORTED, RolloutFunction, rollout_function

__all__ = ["SUPPORTED", "RolloutFunction", "rollout_function"]

warnings.warn(
    "rollpacker.trl is now rollpacker.integrations.trl; the old path goes with the next release",
    FutureWarning,  # Python hides DeprecationWarning from users of a library
    stacklevel=2,
)
