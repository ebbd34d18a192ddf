"""Trainers, which turn weighted samples into optimizer steps."""
