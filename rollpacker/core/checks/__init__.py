"""Schedules of reward checks and environments' answers: samples wait for them outside engines."""
