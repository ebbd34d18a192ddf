"""Calls to services behind an address: checks of their answers, and limits on waits for them."""
