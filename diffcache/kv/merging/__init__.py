"""Mergers, one paper a file: kept slots take over keys and values from those that go."""
