"""Abilities of methods beside feature reuse, each carried out by one extension."""
