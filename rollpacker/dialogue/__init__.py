"""Dialogues of several turns as tokens, of which none is decoded and encoded again."""
