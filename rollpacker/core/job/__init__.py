"""The job: a whole run as one state machine, and the parts of that machine."""
