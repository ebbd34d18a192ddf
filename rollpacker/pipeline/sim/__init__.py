"""Simulation of a trainer's pipeline stages in virtual time."""
