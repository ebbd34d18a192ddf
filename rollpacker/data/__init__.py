"""Data sets of prompts: reading, tokenizing and ordering the prompts of a run."""
