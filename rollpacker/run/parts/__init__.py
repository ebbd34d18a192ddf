"""Each part of a run is built here from the config, in one file a part; nothing else knows how."""
