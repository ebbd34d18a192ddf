"""Reports of runs, made from their event logs alone: seconds by cause, metrics, pictures,
tables."""
