"""Where a run is shown besides its own folder: one file per tracking library."""
