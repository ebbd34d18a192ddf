"""What samples wait for outside of an engine: checks of responses and answers of environments."""
