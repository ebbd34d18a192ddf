"""The ports of a simulation, which obey the core's commands in virtual time."""
