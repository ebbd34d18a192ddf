"""Starts a cluster's jobs, and carries its messages, on the hosts of a ray cluster."""
