"""Dialogues as tokens: sampled and given ones, none of which is encoded twice."""
