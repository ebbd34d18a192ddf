"""Dialogues of several turns as growing lists of tokens. Generated tokens are never
decoded and encoded again."""
