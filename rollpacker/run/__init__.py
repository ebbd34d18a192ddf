"""Everything that runs a training job: `train` and `Run` for programs, and the parts behind
them."""
