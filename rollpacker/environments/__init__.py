"""Environments: they answer a model between its turns."""
