"""Services behind an address: what may be believed of them, and how long one waits for them."""
