"""Brings weights to engines on other hosts."""
