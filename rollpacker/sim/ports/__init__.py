"""The ports of a simulation: each obeys some kinds of commands, in virtual time."""
