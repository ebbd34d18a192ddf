"""Trackers show a run outside of its own folder: one file per tracking library."""
