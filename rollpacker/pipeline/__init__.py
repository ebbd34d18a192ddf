"""A trainer's pipeline stages, which stay busy if a stage or a link between two is slow."""
