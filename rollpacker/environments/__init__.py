"""Environments: what answers a model between its turns."""
