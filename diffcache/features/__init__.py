"""Feature caches: one method, one file; the parts they share are in `parts`."""
