"""A run: `train` and `Run`, what drives it, and in `parts`, `ports` and `folder` what it is made
of."""
