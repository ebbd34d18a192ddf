"""Placement of engines, training replicas and a judge on the devices of all hosts."""
