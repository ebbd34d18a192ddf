"""Many jobs on shared pools, in virtual time."""
