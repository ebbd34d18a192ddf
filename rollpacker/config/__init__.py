"""Configs of runs: loaded from YAML, merged with overrides, checked once, frozen."""
