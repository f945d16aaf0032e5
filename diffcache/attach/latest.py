"""A dictionary of bounded size."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

V = TypeVar("V")


class Latest(dict[Any, V], Generic[V]):
    """A dictionary that forgets the entry that was not asked for the longest.

    Args:
        size: Entries that are kept.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def recall(self, key: Any) -> V | None:
        """Return an entry, which is the newest from now on; None if there is none."""
        value = self.pop(key, None)
        if value is not None:
            self[key] = value
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self.size:
            del self[next(iter(self))]
