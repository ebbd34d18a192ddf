"""Pipeline stages in virtual time."""
