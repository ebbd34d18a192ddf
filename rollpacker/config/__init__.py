"""The config of a run: loaded, merged with overrides, checked once, frozen."""
