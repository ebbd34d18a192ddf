"""Tail batching: which prompts a round launches, which samples it keeps, and which prompts wait."""
