"""Tail batching: which prompts a round launches, who wins its race, and which prompts wait."""
