"""Keys and values beyond one prompt: shared, packed, saved, moved."""
