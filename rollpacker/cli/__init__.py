"""Commands: a small file for each verb, and the texts of the larger ones. `main.py` imports none of
the heavy parts before a command runs."""
