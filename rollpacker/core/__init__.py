"""The scheduling decisions of a run as pure code: events in, commands out. No clock, no I/O, no
tensors, no threads."""
