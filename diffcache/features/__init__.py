"""Feature caches: one method, one file."""
