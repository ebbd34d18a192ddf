"""How long a job's phases take, told from its event log."""
