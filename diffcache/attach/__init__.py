"""Attaching methods to foreign models: the only part that touches modules."""
