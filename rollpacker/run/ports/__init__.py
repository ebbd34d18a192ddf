"""Ports, the objects that carry out the core's commands in real time, and what they share."""
