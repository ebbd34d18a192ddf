"""Algorithms: advantages and per-token losses, one small file each."""
