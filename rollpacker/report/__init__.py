"""Reports on runs, made from their event logs: seconds by cause, metrics, pictures, tables."""
