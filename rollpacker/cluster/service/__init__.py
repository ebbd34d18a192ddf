"""Starts jobs, grants them turns on shared pools, and survives its own restarts."""
