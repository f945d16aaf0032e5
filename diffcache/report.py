"""What a cache did in the last run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffcache.attach.handle import Handle


class Report:
    """placeholder"""

    def __init__(self, handle: Handle) -> None:
        self.record = handle.last
        self.held_bytes = handle.held_bytes()
        self.computed = self.record.computed
        self.skipped = self.record.skipped
