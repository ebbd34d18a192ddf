"""Checks of responses and answers of environments: samples wait for them outside of an engine."""
