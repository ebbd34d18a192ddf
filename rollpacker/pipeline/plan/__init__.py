"""What a pipeline stage does next, how layers are split, and which link or stage is slow. Pure."""
