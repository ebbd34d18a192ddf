"""The ports of a run carry out the core's commands in real time; and what these ports share."""
