"""The engines and devices of a run: where each sample is generated, and what follows a loss."""
