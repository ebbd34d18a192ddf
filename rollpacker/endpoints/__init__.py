"""Services behind an address: checks of what they say, and limits on how long one waits for
them."""
