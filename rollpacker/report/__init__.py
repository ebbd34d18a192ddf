"""What a run did, told from its event log alone: seconds by cause, metrics, pictures, tables."""
