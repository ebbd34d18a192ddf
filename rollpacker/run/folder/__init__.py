"""A run's folder on disk: checkpoints, the event log, samples."""
