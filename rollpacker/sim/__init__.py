"""The simulator: it drives the same scheduling core as a real run, in simulated time."""
