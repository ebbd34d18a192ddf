"""Rewards: they judge responses."""
