"""The scheduling decisions of a run as pure code: events in, commands out; no clock, no threads."""
