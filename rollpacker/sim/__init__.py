"""The virtual driver: the same core as a real run, in simulated time."""
