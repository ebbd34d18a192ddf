"""One config for a run: loaded, merged with overrides, checked once, frozen."""
