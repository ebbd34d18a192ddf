"""The service that starts jobs, grants them turns on two pools, and survives its own restarts."""
