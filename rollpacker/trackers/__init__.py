"""Trackers show a run in other programs, such as Weights & Biases: one file per library."""
