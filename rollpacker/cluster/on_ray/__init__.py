"""The cluster's jobs and letters on the hosts of a ray cluster."""
