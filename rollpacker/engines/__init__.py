"""Engines: they turn prompts into responses."""
