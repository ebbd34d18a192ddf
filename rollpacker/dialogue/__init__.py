"""Dialogues as tokens: what was sampled, what was given, and nothing encoded twice."""
