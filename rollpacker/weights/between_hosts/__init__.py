"""Brings the policy's weights from the trainer's hosts to engines on other hosts."""
