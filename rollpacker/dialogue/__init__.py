"""Dialogues of several turns as tokens. No token, generated or given, is decoded and encoded
again."""
