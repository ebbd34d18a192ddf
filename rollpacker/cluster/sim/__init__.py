"""Simulates many jobs on shared pools of devices, in virtual time."""
