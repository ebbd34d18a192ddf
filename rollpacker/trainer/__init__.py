"""Trainers: they turn weighted samples into one optimizer step."""
