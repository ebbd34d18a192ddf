"""What `rollpacker cluster ACTION` does."""
