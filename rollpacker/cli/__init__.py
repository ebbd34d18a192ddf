"""One small file per command. `main.py` imports none of the heavy parts before a command runs."""
