"""The straggler-resilient trainer: plans (pure), stages, links, and their simulation."""
