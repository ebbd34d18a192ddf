"""Measures, from a run's event log, how long the phases of a job take."""
