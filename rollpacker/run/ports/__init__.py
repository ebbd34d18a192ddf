"""Ports, which obey the core's commands in real time, and what these ports share."""
