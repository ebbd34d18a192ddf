"""A job's side of the cluster: the object (*seat*) by which it waits for its turn on a pool."""
