"""Choosing a method for a pipeline: what to try, what it costs, and which to take."""
