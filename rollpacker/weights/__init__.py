"""Weights on their way from the trainer to engines, on one host and between hosts."""
