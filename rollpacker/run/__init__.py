"""The real-time driver of the core."""
