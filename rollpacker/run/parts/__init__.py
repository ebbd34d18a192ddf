"""Makes each part of a run from the config, in one file a part; nothing else knows how."""
