"""The commands of `rollpacker`: a file for each verb (first word of a command), and the texts of
the larger verbs. Before a command runs, `main.py` imports none of the heavy parts."""
