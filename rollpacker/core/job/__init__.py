"""The job: a whole run as one state machine, and what it is made of."""
