"""Functions that build the parts of a run from the config, in one file for each part."""
