"""Simulation of a trainer's pipeline stages, in seconds of a simulated clock."""
