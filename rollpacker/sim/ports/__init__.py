"""The ports of a simulation: objects that obey the scheduling core's commands in simulated time."""
