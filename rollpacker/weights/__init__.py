"""Brings the policy's weights from the trainer to engines, on one host and between hosts."""
