"""A job's side of the cluster: where it waits for its turn on a pool."""
