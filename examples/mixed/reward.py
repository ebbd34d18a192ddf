"""A reward for rows of every task."""


def finished(completions, finish_reasons):
    """0 for a response that came to its end, -1 for one that was cut off."""
    return [0.0 if reason == "stop" else -1.0 for reason in finish_reasons]
