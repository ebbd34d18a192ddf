"""The ports of a simulation: the objects that carry out the core's commands in simulated time."""
