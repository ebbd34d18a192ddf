"""Calls to services behind an HTTP address: checks of their answers, and limits on waits."""
