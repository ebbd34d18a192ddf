"""Weights on their way to engines on other hosts."""
