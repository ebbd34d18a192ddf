"""Finds out how long a job's phases take, from its event log."""
