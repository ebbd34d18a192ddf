"""The engine inside the run's own process, over the trainer's own module."""
